"""Faults on purpose: what a link, a worker, a pool or a client can do to a running server, from one seeded plan.

Owns the grammar of SGLANG_HISPARSE_FAULT and the one seam through which every fault enters. The runtime makes a seam when
the variable names a fault (tests give it a plan directly); without one no code of this module runs. It must never touch a
page, a state or a table: it only refuses, delays, reorders, or raises where hardware could. All draws follow from the
seed and from how often each place was passed, so that the ranks of a group meet the same faults.

    SGLANG_HISPARSE_FAULT="copy_fail:0.1,copy_delay:4,copy_reorder:0.5,refuse:@40,seed:7"

zero_rows:SHARE      this share of the selected positions is given to attention as the pad page's row (see audit.py)
copy_fail:WHEN       a host copy is not enqueued (WHEN counts pages)
copy_delay:STEPS     a completed host copy is observed up to so many steps late
copy_reorder:SHARE   completed copies are observed in another order, this often
event_fail:WHEN      an event cannot be recorded or queried
refuse:WHEN          a question for room that may be answered no is answered no: one decode step (the scheduler retracts),
                     one admission (the request stays in the queue)
abort:WHEN           a request chosen at random is aborted, as by its client, at this step
worker_dies:@N       from the N-th call on, the worker enqueues no copy any more
seed:NUMBER          of all draws, 0 by default

WHEN: a share (0.1: one in ten, at random), @N (the N-th time, from 1) or @N+ (the N-th time and ever after).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.residency.types import PageTransfer

FAULT_VARIABLE = "SGLANG_HISPARSE_FAULT"
ALLOWED = (
    "zero_rows:SHARE, copy_fail:WHEN, copy_delay:STEPS, copy_reorder:SHARE, event_fail:WHEN, refuse:WHEN, abort:WHEN, "
    "worker_dies:@N, seed:NUMBER with 0 < SHARE <= 1 and WHEN one of SHARE, @N, @N+ (N from 1), joined by commas"
)


class InjectedFault(RuntimeError):
    """Raised where a CUDA call could fail; nobody but the code that handles such failures may catch it."""


@dataclass(frozen=True, slots=True)
class When:
    """How often something happens: with probability `share`, or at the `first` call (`after`: and at all later ones)."""

    share: float = 0.0
    first: int = 0
    after: bool = False

    @property
    def never(self) -> bool:
        return not self.share and not self.first


NEVER = When()


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Everything that is to go wrong. The fields are the names of the grammar."""

    zero_rows: float = 0.0
    copy_fail: When = NEVER
    copy_delay: int = 0
    copy_reorder: float = 0.0
    event_fail: When = NEVER
    refuse: When = NEVER
    abort: When = NEVER
    worker_dies: When = NEVER
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """A plan from the text of the variable. Raises ConfigError naming the entry."""
        values: dict[str, Any] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            kind, _, value = entry.partition(":")
            try:
                values[kind] = _READERS[kind](value)
            except (KeyError, ValueError):
                raise ConfigError(f"{FAULT_VARIABLE}: {entry!r} is not known; allowed: {ALLOWED}") from None
        return cls(**values)

    @classmethod
    def from_env(cls) -> FaultPlan:
        return cls.parse(os.environ.get(FAULT_VARIABLE, ""))

    @property
    def needs_seam(self) -> bool:
        """Whether anything beyond `zero_rows` is asked for, which lives in the captured graph and not here."""
        plain = FaultPlan(zero_rows=self.zero_rows, seed=self.seed)
        return self != plain


def _read_share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _read_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _read_when(text: str) -> When:
    if not text.startswith("@"):
        return When(share=_read_share(text))
    number = text[1:].removesuffix("+")
    if not number.isdecimal() or not int(number):
        raise ValueError(text)
    return When(first=int(number), after=text.endswith("+"))


def _read_death(text: str) -> When:
    when = _read_when(text)
    if not when.first:
        raise ValueError(text)
    return When(first=when.first, after=True)


_READERS: dict[str, Callable[[str], Any]] = {
    "zero_rows": _read_share,
    "copy_fail": _read_when,
    "copy_delay": _read_count,
    "copy_reorder": _read_share,
    "event_fail": _read_when,
    "refuse": _read_when,
    "abort": _read_when,
    "worker_dies": _read_death,
    "seed": _read_count,
}
assert set(_READERS) == {field.name for field in fields(FaultPlan)}


class Trigger:
    """Counts the times that a place is passed and says at which of them it fails."""

    def __init__(self, when: When, seed: str) -> None:
        self._when = when
        self._random = random.Random(seed)
        self.passed = 0
        self.fired = 0

    def fires(self) -> bool:
        self.passed += 1
        when = self._when
        if when.share:
            hit = self._random.random() < when.share
        else:
            hit = bool(when.first) and (self.passed == when.first or when.after and self.passed > when.first)
        self.fired += hit
        return hit


class FaultSeam:
    """One for each runtime that is to fail. `fired` says what happened, by kind."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        names = ("copy_fail", "event_fail", "refuse", "abort", "worker_dies")
        self._triggers = {name: Trigger(getattr(plan, name), f"{plan.seed}/{name}") for name in names}
        self._random = random.Random(f"{plan.seed}/order")
        self._late: list[tuple[int, int]] = []  # (due at this observation, transfer id)
        self._observations = 0
        self._num_late = self._num_reordered = 0

    @property
    def fired(self) -> dict[str, int]:
        counts = {name: trigger.fired for name, trigger in self._triggers.items()}
        return counts | {"copy_delay": self._num_late, "copy_reorder": self._num_reordered}

    # -- host copies ------------------------------------------------------------------------------------------------

    def surviving(self, transfers: Sequence[PageTransfer]) -> list[PageTransfer]:
        """Those of `transfers` that the worker gets to enqueue; the others fail as if their launch had."""
        if self._triggers["worker_dies"].fires():
            return []
        return [transfer for transfer in transfers if not self._triggers["copy_fail"].fires()]

    def observe(self, transfer_ids: list[int]) -> list[int]:
        """What of the completed copies is seen now: late, and out of order."""
        self._observations += 1
        now = self._observations
        for transfer_id in transfer_ids:
            delay = self._random.randint(0, self.plan.copy_delay)
            self._num_late += bool(delay)
            self._late.append((now + delay, transfer_id))
        seen = [transfer_id for due, transfer_id in self._late if due <= now]
        self._late = [item for item in self._late if item[0] > now]
        if len(seen) > 1 and self._random.random() < self.plan.copy_reorder:
            self._random.shuffle(seen)
            self._num_reordered += 1
        return seen

    @property
    def holds_back(self) -> bool:
        """Whether completed copies are still to be observed."""
        return bool(self._late)

    def settle(self) -> list[int]:
        """Everything held back, at once."""
        late, self._late = self._late, []
        return [transfer_id for _, transfer_id in late]

    def on_event(self) -> None:
        """Passed before every record and query of an event."""
        if self._triggers["event_fail"].fires():
            raise InjectedFault("injected: the event cannot be used")

    # -- the scheduler's questions and its clients --------------------------------------------------------------------

    def refuses(self) -> bool:
        return self._triggers["refuse"].fires()

    def abort_one(self, scheduler: Any) -> None:
        """Passed once a step of SGLang's scheduler: now and then a client gives a request up."""
        if not self._triggers["abort"].fires():
            return
        from sglang.srt.managers.io_struct import AbortReq

        live = [*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()]
        if live:
            scheduler.abort_request(AbortReq(rid=self._random.choice(sorted(req.rid for req in live))))
