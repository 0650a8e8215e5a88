"""The GPU of the simulator: three streams, two memories, one page table, hot buffers; every read is checked.

Stands where the transfer worker, the resolver and attention stand. A row holds the token that was written there, so a
forward knows at once when it reads a row of another position, request or age. The model shares no code with the
coordinator and looks at nothing but the plans and copies that it is given.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import ResidencyLimits, StepPlan
from sglang_hisparse.residency.types import PageTransfer, StreamPlan
from sim.side_stream import STREAM_LAYERS, SideStream, StreamedExtend

NOTHING = -1  # content of a row that was never written


class Violation(InvariantError):
    """The simulator saw an invariant broken; `invariant` is its number (I1..I7, R7, R19) or "liveness"."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class ForwardItem:
    """One request of a forward: writes rows of positions [start, end), reads those of `reads`.

    `pages` is the step's own snapshot of the request's logical pages (R3).
    """

    slot: int
    tokens: Sequence[int]
    pages: tuple[int, ...]
    start: int
    end: int
    reads: tuple[int, ...]
    is_prefill: bool


class GpuModel:
    """`apply`, `launch` and `enqueue` put operations on streams; `run` executes some of them."""

    def __init__(self, limits: ResidencyLimits) -> None:
        self.limits = limits
        self.page_size = limits.page_size
        self.device = [NOTHING] * ((limits.num_device_pages + 1) * limits.page_size)
        self.host = [NOTHING] * ((limits.num_logical_pages + 1) * limits.page_size)
        self.table = [0] * (limits.num_logical_pages + 1)
        self.leases: dict[int, tuple[int, ...]] = {}
        self.tags: dict[int, OrderedDict[int, int]] = {}  # request slot -> logical id -> hot slot, oldest use first
        self.forward_stream: deque[tuple[Any, ...]] = deque()
        self.copy_stream: deque[tuple[int, int, PageTransfer]] = deque()  # behind: forwards run, operations run
        self.launched = 0
        self.executed = 0
        self.copied = 0  # id of the last copy that has run; ids on the stream ascend
        self.completed: list[int] = []
        self.num_reads = {"resident": 0, "hot": 0, "host": 0, "streamed": 0}
        self.mapped_device, self.mapped_logical = limits.num_device_pages, limits.steps[0].logical_pages
        self.side = SideStream()
        self.num_put = self.num_done = 0  # operations of the forward stream: enqueued, run
        self.last_relocation = self.vacated = 0  # operations until the last one was enqueued; plans that vacated and have run

    # -- what the CPU puts on the streams ---------------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        if plan.wait_transfer_id:
            self._put((self._wait, plan.wait_transfer_id))
        if plan.relocations:
            self._put((self._relocate, plan.relocations))
            self.last_relocation = self.num_put
        if plan.promotions:
            self._put((self._promote, plan.promotions))
        if plan.table:
            self._put((self._write_table, plan.table))
        if plan.leases:
            self._put((self._write_leases, plan.leases))
        if plan.vacates:
            self._put((self._vacate,))

    def _put(self, operation: tuple[Any, ...]) -> None:
        self.forward_stream.append(operation)
        self.num_put += 1

    def launch(self, items: Sequence[ForwardItem], stream: StreamPlan | None = None) -> None:
        """`stream`: the forward is an extend whose attention reads the scratch."""
        self.launched += 1
        if stream is not None:
            self._launch_streamed(items, StreamedExtend(stream))
            return
        self._put((self._write_rows, items))
        self._put((self._read_rows, items))

    def _launch_streamed(self, items: Sequence[ForwardItem], extend: StreamedExtend) -> None:
        self.fetch(extend, 0)
        self.fetch(extend, 1)
        self._put((self._write_rows, items))
        for layer in range(STREAM_LAYERS):
            if 0 < layer < STREAM_LAYERS - 1:
                self.fetch(extend, layer + 1)
            self._put((self.stage, extend, layer))
            self._put((self._read_streamed, items, extend, layer))

    def fetch(self, extend: StreamedExtend, layer: int) -> None:
        """Host pages of a layer, on the side stream, behind what the forward stream has been given so far."""
        self.side.fetches.append((self.num_put, extend, layer))

    def stage(self, extend: StreamedExtend, layer: int) -> bool:
        return self.side.stage(self, extend, layer)

    def enqueue(self, transfer: PageTransfer) -> None:
        """A host copy, behind the last launched forward and behind what the border has moved since."""
        self.copy_stream.append((self.launched, self.last_relocation, transfer))

    def forget_all(self) -> None:
        """Flush: the caller has drained both streams."""
        self._put((self._forget,))

    # -- execution --------------------------------------------------------------------------------------------------

    def run(self, rng: random.Random, num_ops: int, copy_share: float) -> None:
        for _ in range(num_ops):
            if rng.random() < copy_share:
                self._step_copy()
            elif self.side.fetches and rng.random() < 0.5:
                self.side.step(self)
            else:
                self._step_forward()

    def run_until(self, forward: int) -> None:
        """Until that forward has run, with as few copies as it needs."""
        while self.executed < forward:
            if not self._step_forward() and not self.side.step(self) and not self._step_copy():
                raise Violation(
                    "liveness",
                    f"forward {self.executed + 1} waits for copy {self.forward_stream[0][1]}, which never runs",
                )

    def drain(self) -> None:
        while self._step_copy() or self._step_forward() or self.side.step(self):
            pass
        if self.forward_stream or self.copy_stream or self.side.fetches:
            raise Violation("liveness", "the streams wait for each other")

    def _step_forward(self) -> bool:
        if not self.forward_stream:
            return False
        operation = self.forward_stream[0]
        if operation[0](*operation[1:]) is False:
            return False
        self.forward_stream.popleft()
        self.num_done += 1
        return True

    def _step_copy(self) -> bool:
        if not self.copy_stream or self.copy_stream[0][0] > self.executed or self.copy_stream[0][1] > self.num_done:
            return False
        *_, transfer = self.copy_stream.popleft()
        size = self.page_size
        self._touch(transfer.device_page)
        source, target = transfer.device_page * size, transfer.logical_page * size
        self.host[target : target + size] = self.device[source : source + size]
        self.copied = transfer.transfer_id
        self.completed.append(transfer.transfer_id)
        return True

    # -- operations of the forward stream ---------------------------------------------------------------------------

    def _wait(self, transfer_id: int) -> bool:
        return self.copied >= transfer_id

    def _touch(self, device_page: int) -> None:
        """Somebody reads or writes rows of the page."""
        if device_page > self.mapped_device:
            raise Violation("I10", f"device page {device_page} is touched, memory ends at {self.mapped_device}")

    def _relocate(self, relocations: Sequence[Any]) -> None:
        size = self.page_size
        for relocation in relocations:
            source, target = relocation.source * size, relocation.target * size
            self._touch(relocation.source)
            self._touch(relocation.target)
            self.device[target : target + size] = self.device[source : source + size]

    def _vacate(self) -> None:
        self.vacated += 1

    def move_border(self, device_pages: int, logical_pages: int) -> None:
        """Device pages and index-K of logical pages that have memory from now on; not ordered on any stream."""
        size = self.page_size
        kept = min(device_pages, self.mapped_device)  # what comes back is as empty as what has left
        self.device[(kept + 1) * size :] = [NOTHING] * ((self.limits.num_device_pages - kept) * size)
        self.mapped_device, self.mapped_logical = device_pages, logical_pages

    def _promote(self, promotions: Sequence[Any]) -> None:
        size = self.page_size
        for promotion in promotions:
            self._touch(promotion.device_page)
            source, target = promotion.logical_page * size, promotion.device_page * size
            self.device[target : target + size] = self.host[source : source + size]

    def _write_table(self, table: Sequence[tuple[int, int]]) -> None:
        for page, device_page in table:
            self.table[page] = device_page

    def _write_leases(self, leases: Sequence[Any]) -> None:
        for lease in leases:
            self.tags.pop(lease.slot, None)
            if lease.device_pages:
                self.leases[lease.slot] = lease.device_pages
            else:
                self.leases.pop(lease.slot, None)

    def _forget(self) -> None:
        self.table = [0] * len(self.table)
        self.leases.clear()
        self.tags.clear()

    def _write_rows(self, items: Sequence[ForwardItem]) -> None:
        self._check_owners()
        size = self.page_size
        for item in items:
            for position in range(item.start, item.end):
                page = item.pages[position // size]
                device_page = self.table[page]
                if not device_page:
                    raise Violation(
                        "I2", f"slot {item.slot} writes position {position} of page {page}, which has no device page"
                    )
                if page > self.mapped_logical:
                    raise Violation("I10", f"index-K of page {page} is written, memory ends at {self.mapped_logical}")
                self._touch(device_page)
                self.device[device_page * size + position % size] = item.tokens[position]

    def _check_owners(self) -> None:
        """The page table and the leases, as the forward finds them, share no device page."""
        owned = [page for page in self.table if page]
        for lease in self.leases.values():
            owned.extend(lease)
        if len(set(owned)) != len(owned):
            raise Violation("I2", f"a device page has two owners: table {self.table}, leases {self.leases}")

    def _read_rows(self, items: Sequence[ForwardItem]) -> None:
        size = self.page_size
        for item in items:
            if (tags := self.tags.get(item.slot)) and not {tag // size for tag in tags} <= set(item.pages):
                raise Violation("I4", f"slot {item.slot} uses pages {item.pages}, its hot rows are of ids {list(tags)}")
            for position in item.reads:
                page = item.pages[position // size]
                self._read_index(page)
                device_page = self.table[page]
                if device_page:
                    self._touch(device_page)
                    kind, value = "resident", self.device[device_page * size + position % size]
                elif item.is_prefill:
                    raise Violation("R19", f"slot {item.slot} is being prefilled and its page {page} is host-only")
                else:
                    kind, value = self._resolve(item.slot, page * size + position % size)
                self.num_reads[kind] += 1
                if value != item.tokens[position]:
                    invariant = {"resident": "I6", "hot": "I4", "host": "I1"}[kind]
                    raise Violation(
                        invariant,
                        f"slot {item.slot} reads token {value} in a {kind} row of page {page}, "
                        f"not {item.tokens[position]} (position {position})",
                    )
        self.executed += 1

    def _read_index(self, page: int) -> None:
        if page > self.mapped_logical:
            raise Violation("I10", f"index-K of page {page} is read, memory ends at {self.mapped_logical}")

    def _read_streamed(self, items: Sequence[ForwardItem], extend: StreamedExtend, layer: int) -> None:
        size = self.page_size
        for item in items:
            for position in item.reads:
                page = item.pages[position // size]
                self._read_index(page)
                rows = self.side.find(extend, layer, page)
                self.num_reads["streamed"] += 1
                if rows is None:
                    raise Violation("I6", f"slot {item.slot} reads page {page} in layer {layer}, which the scratch does not hold")
                if rows[position % size] != item.tokens[position]:
                    raise Violation(
                        "I6",
                        f"slot {item.slot} reads token {rows[position % size]} of the scratch for page {page}, "
                        f"not {item.tokens[position]} (position {position})",
                    )
        if layer == STREAM_LAYERS - 1:
            self.executed += 1

    def _resolve(self, slot: int, logical_id: int) -> tuple[str, int]:
        """The row of a host-only page: from the hot buffer, else fetched into it."""
        lease = self.leases.get(slot)
        if lease is None:
            raise Violation("R19", f"slot {slot} reads a host-only row and holds no hot lease")
        size, tags = self.page_size, self.tags.setdefault(slot, OrderedDict())
        if hit := logical_id in tags:
            tags.move_to_end(logical_id)
        else:
            free = len(tags)
            tags[logical_id] = free if free < len(lease) * size else tags.popitem(last=False)[1]
        hot = tags[logical_id]
        row = lease[hot // size] * size + hot % size
        self._touch(row // size)
        if not hit:
            self.device[row] = self.host[logical_id]
        return ("hot" if hit else "host"), self.device[row]
