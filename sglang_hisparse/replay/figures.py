"""What a replay run counts: the form of its JSON file and the source of its tables.

Filled by the engine, shown by report.py. Counts of rows are entries of the resolver's output, summed over requests, steps
and index groups; `rows_checked` counts a row once for each layer.
"""

from __future__ import annotations

import msgspec


class Counts(msgspec.Struct):
    """Everything that is counted since start; a phase holds the difference of two of these."""

    steps: int = 0
    arrived: int = 0
    started_full: int = 0  #: admitted with a whole prompt to prefill, or a prefix promoted before its extend
    started_on_host: int = 0  #: admitted over a host-only prefix, decoding at once
    finished: int = 0
    retracted: int = 0
    request_steps_full: int = 0  #: decode steps of requests, by the residency they had
    request_steps_mixed: int = 0
    request_steps_none: int = 0
    rows_resident: int = 0  #: selected rows found on a resident page
    rows_hot: int = 0  #: found in the hot buffer
    rows_fetched: int = 0  #: copied from the host
    resolver_errors: int = 0
    pages_mirrored: int = 0
    pages_spilled: int = 0
    pages_promoted: int = 0
    pages_rehomed: int = 0
    leases_acquired: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    rows_checked: int = 0
    mismatches: int = 0
    seconds: float = 0.0

    def minus(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__})


class PhaseFigures(msgspec.Struct):
    name: str
    goal: str
    counts: Counts


class ProfileFigures(msgspec.Struct):
    """Selected rows of all streams of one locality profile."""

    name: str
    rows_resident: int
    rows_hot: int
    rows_fetched: int

    @property
    def rows(self) -> int:
        return self.rows_resident + self.rows_hot + self.rows_fetched


class ReplayReport(msgspec.Struct):
    """`ok`: no mismatch, no resolver error, no problem. `problems`: what was left over or broken at the end, in words."""

    parameters: dict[str, int | float | str]
    phases: list[PhaseFigures]
    total: Counts
    profiles: list[ProfileFigures]
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not (self.total.mismatches or self.total.resolver_errors or self.problems)
