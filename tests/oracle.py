"""Plain-Python oracle of the resolver: says which answers the contract allows and which victims the policy picks.

Used by the kernel tests and by scripts/gpu_kernel_check.py. Lists, dicts and integers only; it shares no code and no tensors
with the libraries. It follows what it is shown (the tags after each step) and checks that every change was allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

AGE_CLASSES = 64
CLOCK_PER_STEP = 8


class OracleError(AssertionError):
    """An answer breaks the contract; the message names the row, the entry and the clause."""


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one call, as plain values; `req_slots`, `seq_lens`, `page_rows` have one element per row."""

    top_k: Sequence[Sequence[int]]
    page_rows: Sequence[Sequence[int]]
    seq_lens: Sequence[int]
    req_slots: Sequence[int]
    num_real_rows: int
    page_table: Sequence[int]
    hot_pages: Sequence[Sequence[int]]
    page_size: int
    scores: Sequence[Sequence[float]] | None = None  # by position; rows and columns may be too few or too many


@dataclass(slots=True)
class Expected:
    """What one row must yield: entry -> device row for `fixed`, entry -> host row for `wanted`; counts of failed ones."""

    fixed: dict[int, int] = field(default_factory=dict)
    wanted: dict[int, int] = field(default_factory=dict)
    resident: int = 0
    failed: int = 0

    @property
    def first_wanted(self) -> list[int]:
        """Distinct wanted host rows in order of first occurrence."""
        return list(dict.fromkeys(self.wanted[i] for i in sorted(self.wanted)))


@dataclass(slots=True)
class HotModel:
    """What the oracle knows of one request slot, by hot slot: host row, last use in units of turnover, position."""

    held: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    clock: int = 0


def expect(step: Step, row: int, num_slots: int) -> Expected:
    """Classify every entry of one row."""
    expected = Expected()
    slot = step.req_slots[row]
    known = 0 <= slot < num_slots
    for i, position in enumerate(step.top_k[row]):
        expected.fixed[i] = -1
        if row >= step.num_real_rows or position < 0:
            continue
        page, offset = divmod(position, step.page_size)
        pages = step.page_rows[row]
        logical = pages[page] if known and position < step.seq_lens[row] and page < len(pages) else 0
        if not 0 < logical < len(step.page_table):
            expected.failed += 1
        elif step.page_table[logical] > 0:
            expected.fixed[i] = step.page_table[logical] * step.page_size + offset
            expected.resident += 1
        elif step.hot_pages[slot][0] == 0:
            expected.failed += 1
        else:
            del expected.fixed[i]
            expected.wanted[i] = logical * step.page_size + offset
    return expected


class Oracle:
    """Follows the hot buffers of `num_slots` request slots with `buffer_size` rows each."""

    def __init__(self, num_slots: int, buffer_size: int) -> None:
        self.num_slots, self.buffer_size = num_slots, buffer_size
        self.unit = max(1, buffer_size // AGE_CLASSES)
        self.models: dict[int, HotModel] = {}

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._model(slot).held.clear()

    def check(
        self,
        step: Step,
        out: Sequence[Sequence[int]],
        tags: Callable[[int], Sequence[int]],
        counted: Callable[[int], Sequence[int]],
    ) -> dict[int, list[tuple[int, int]]]:
        """Check one call. tags(slot): tags after it. counted(slot): growth of (resident, hot, fetched, failed).

        Returns request slot -> [(host row, device row)] of everything the step fetched. Raises OracleError.
        """
        totals: dict[int, list[int]] = {}
        fetched: dict[int, list[tuple[int, int]]] = {}
        for row in range(len(step.top_k)):
            expected = expect(step, row, self.num_slots)
            self._check_fixed(row, expected, out[row])
            if row >= step.num_real_rows:
                continue
            slot = step.req_slots[row] if 0 <= step.req_slots[row] < self.num_slots else 0
            total = totals.setdefault(slot, [0, 0, 0, 0])
            total[0] += expected.resident
            total[3] += expected.failed
            if expected.wanted:
                copies = self._check_hot(step, row, expected, out[row], tags(slot))
                fetched[slot] = copies
                total[1] += len(expected.wanted) - len(copies)
                total[2] += len(copies)
        for slot in range(self.num_slots):
            _require(
                list(counted(slot)) == totals.get(slot, [0, 0, 0, 0]),
                f"slot {slot}: counted {list(counted(slot))}, want {totals.get(slot)}",
            )
        return fetched

    def _model(self, slot: int) -> HotModel:
        return self.models.setdefault(slot, HotModel())

    def _check_fixed(self, row: int, expected: Expected, out: Sequence[int]) -> None:
        for i, want in expected.fixed.items():
            _require(out[i] == want, f"row {row} entry {i}: {out[i]}, want {want}")

    def _check_hot(
        self, step: Step, row: int, expected: Expected, out: Sequence[int], tags: Sequence[int]
    ) -> list[tuple[int, int]]:
        slot = step.req_slots[row]
        model, lease = self._model(slot), step.hot_pages[slot]
        slot_of_row = {
            page * step.page_size + offset: index * step.page_size + offset
            for index, page in enumerate(lease)
            for offset in range(step.page_size)
        }
        place: dict[int, int] = {}
        for i, host_row in expected.wanted.items():
            _require(out[i] in slot_of_row, f"row {row} entry {i}: {out[i]} is no row of the lease")
            hot_slot = slot_of_row[out[i]]
            _require(place.setdefault(host_row, hot_slot) == hot_slot, f"row {row} entry {i}: equal entries differ")
            _require(
                tags[hot_slot] == host_row,
                f"row {row} entry {i}: slot {hot_slot} is tagged {tags[hot_slot]}, not {host_row}",
            )
        _require(len(set(place.values())) == len(place), f"row {row}: two wanted rows share a slot")

        slot_of = {host_row: hot_slot for hot_slot, host_row in model.held.items()}
        misses = [host_row for host_row in expected.first_wanted if host_row not in slot_of]
        hits = {slot_of[host_row] for host_row in place if host_row in slot_of}
        for host_row, hot_slot in place.items():
            _require(slot_of.get(host_row, hot_slot) == hot_slot, f"row {row}: hit {host_row} moved to slot {hot_slot}")
        victims = [place[host_row] for host_row in misses]
        _require(not hits & set(victims), f"row {row}: evicted a slot that this step reads")
        wanted = self._victims(model, hits, len(misses), step, row)
        _require(victims == wanted, f"row {row}: victims {victims} are not the policy's, {wanted}")
        for hot_slot in range(self.buffer_size):
            if hot_slot not in victims:
                _require(tags[hot_slot] == model.held.get(hot_slot, -1), f"row {row}: tag of slot {hot_slot} changed")
        now = model.clock // self.unit
        first_entry = {host_row: i for i, host_row in sorted(expected.wanted.items(), reverse=True)}
        for host_row, hot_slot in place.items():
            model.held[hot_slot], model.used[hot_slot] = host_row, now
            if host_row in misses:
                model.position[hot_slot] = step.top_k[row][first_entry[host_row]]
        model.clock += len(misses) + CLOCK_PER_STEP
        return [
            (host_row, lease[hot_slot // step.page_size] * step.page_size + hot_slot % step.page_size)
            for host_row, hot_slot in zip(misses, victims, strict=True)
        ]

    def _victims(self, model: HotModel, hits: set[int], needed: int, step: Step, row: int) -> list[int]:
        now = model.clock // self.unit

        def order(hot_slot: int) -> tuple[int, int]:
            if hot_slot not in model.held:
                return -AGE_CLASSES - 1, hot_slot
            return -min((now - model.used[hot_slot]) % 256, AGE_CLASSES), hot_slot

        def order_by_score(hot_slot: int) -> tuple[bool, float, tuple[int, int]]:
            if hot_slot not in model.held:
                return False, 0.0, order(hot_slot)
            return True, score_of(step, row, model.position[hot_slot]), order(hot_slot)

        candidates = [hot_slot for hot_slot in range(self.buffer_size) if hot_slot not in hits]
        if step.scores is not None:
            return sorted(sorted(candidates, key=order_by_score)[:needed])
        leaving = sorted(candidates, key=order)[:needed]
        last_class = order(leaving[-1])[0] if leaving else 0
        return sorted(leaving, key=lambda hot_slot: (order(hot_slot)[0] == last_class, hot_slot))


def score_of(step: Step, row: int, position: int) -> float:
    """Score of one position in this step, minus infinity where it has none."""
    scores = step.scores[row] if row < len(step.scores) else ()
    if position >= min(len(scores), step.seq_lens[row]) or math.isnan(scores[position]):
        return -math.inf
    return scores[position]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OracleError(message)
