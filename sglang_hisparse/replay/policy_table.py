"""`sglang-hisparse replay --policies`: replacement policies side by side on a profile or on a recording.

Called by command.py. It decides which streams are compared and shows what comparison.py finds; rates of several streams
are taken over all their selections together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from sglang_hisparse.kernels.resolver import MAX_BUFFER_SIZE
from sglang_hisparse.recording.reader import Recording
from sglang_hisparse.replay.comparison import COMMON, Outcome, Selection, compare, selections
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.profiles import MIX, PROFILES, ScoreProfile
from sglang_hisparse.replay.recorded import recorded_selections, spread
from sglang_hisparse.replay.workload import RECORDED

STEPS = 400  #: of a profile's stream, times --scale
MAX_STREAMS = 16  #: of a recording that are compared
WARM_UP_SHARE = 0.25  #: of the steps, which the warm rate leaves out


class PolicyRow(msgspec.Struct):
    """`miss_rate` without the first quarter of the steps, `cold_miss_rate` with it; shares of selected positions."""

    profile: str
    buffer: int
    policy: str
    miss_rate: float
    cold_miss_rate: float


class PolicyReport(msgspec.Struct):
    parameters: dict[str, int | float | str]
    streams: int
    streams_there: int
    rows: list[PolicyRow]


class _Stream(msgspec.Struct):
    source: str
    buffers: tuple[int, ...]
    policies: tuple[str, ...]
    steps: int
    make: Callable[[], Iterator[Selection]]


def run_policies(
    options: ReplayOptions, recording: Recording | None, on_total: Callable[[int], None], on_step: Callable[[], None]
) -> tuple[PolicyReport, dict[str, list[Outcome]]]:
    """Compare on `recording`, or on the options' profile. `on_total` is told how often `on_step` will be called."""
    streams = _profile_streams(options) if recording is None else _recorded_streams(options, recording)
    on_total(sum(2 * stream.steps for stream in streams))
    found: dict[str, list[list[Outcome]]] = {}
    for number, stream in enumerate(streams):
        outcomes = compare(
            stream.make(), buffers=stream.buffers, policies=stream.policies, seed=options.seed + number, on_step=on_step
        )
        found.setdefault(stream.source, []).append(outcomes)
    merged = {source: [_merged(list(same)) for same in _by_policy(several)] for source, several in found.items()}
    rows = [_row(source, outcome) for source, outcomes in merged.items() for outcome in outcomes]
    there = len(streams)
    if recording is not None:
        there = len(recording.requests()) * len(recording.header.groups)
    parameters = {
        "top_k": options.top_k,
        "seed": options.seed,
        "stream": options.stream,
        "context": options.max_context,
    }
    return PolicyReport(parameters, len(streams), there, rows), merged


def _buffers(options: ReplayOptions) -> tuple[int, ...]:
    """What was asked for, and twice that where the resolver can number so many slots."""
    return tuple(buffer for buffer in (options.buffer_size, 2 * options.buffer_size) if buffer <= MAX_BUFFER_SIZE)


def _profile_streams(options: ReplayOptions) -> list[_Stream]:
    steps = max(8, round(STEPS * options.scale))
    names = dict.fromkeys(MIX) if options.profile == "mix" else (options.profile,)

    def stream(name: str) -> Iterator[Selection]:
        made = PROFILES[name].stream(
            num_positions=options.max_context,
            top_k=options.top_k,
            rng=np.random.default_rng([options.seed, 2]),
            buffer_size=options.buffer_size,
        )
        return selections(made, steps)

    def policies(name: str) -> tuple[str, ...]:
        return (*COMMON, "index_score") if isinstance(PROFILES[name], ScoreProfile) else COMMON

    return [_Stream(name, _buffers(options), policies(name), steps, lambda name=name: stream(name)) for name in names]


def _recorded_streams(options: ReplayOptions, recording: Recording) -> list[_Stream]:
    pairs = [(request, group) for request in recording.requests() for group in range(len(recording.header.groups))]
    chosen = recorded_selections(recording, [pairs[index] for index in spread(len(pairs), MAX_STREAMS)])
    return [_Stream(RECORDED, _buffers(options), COMMON, len(sets), lambda sets=sets: iter(sets)) for sets in chosen]


def _by_policy(several: list[list[Outcome]]) -> Iterator[tuple[Outcome, ...]]:
    return zip(*several, strict=True)


def _merged(same: list[Outcome]) -> Outcome:
    """One policy and buffer on several streams: sums of the streams that have the step."""
    steps = max(outcome.misses.size for outcome in same)
    misses, selected = np.zeros(steps, dtype=np.int64), np.zeros(steps, dtype=np.int64)
    for outcome in same:
        misses[: outcome.misses.size] += outcome.misses
        selected[: outcome.selected.size] += outcome.selected
    return Outcome(same[0].policy, same[0].buffer, misses, selected)


def _row(source: str, outcome: Outcome) -> PolicyRow:
    warm_up = int(WARM_UP_SHARE * outcome.misses.size)
    return PolicyRow(source, outcome.buffer, outcome.policy, outcome.miss_rate(warm_up), outcome.miss_rate())


def policy_table(report: PolicyReport) -> Table:
    """Warm miss rates in per cent, a line for each source and buffer."""
    rates = {(row.profile, row.buffer, row.policy): row.miss_rate for row in report.rows}
    policies = list(dict.fromkeys(row.policy for row in report.rows))
    table = Table(
        "stream", "buffer", *policies, title=f"misses, % of the selected positions (top_k {report.parameters['top_k']})"
    )
    for source, buffer in dict.fromkeys((row.profile, row.buffer) for row in report.rows):
        values = [rates.get((source, buffer, policy)) for policy in policies]
        table.add_row(source, f"{buffer:,}", *("" if value is None else f"{100 * value:.2f}" for value in values))
    table.caption = (
        f"{report.streams} of {report.streams_there} streams; without the first quarter of the steps. turnover is the "
        "resolver's own replacement; belady knows the future"
    )
    return table


def write_json(report: PolicyReport, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
