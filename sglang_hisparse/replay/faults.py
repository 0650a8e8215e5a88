"""Faults planted on purpose, to show that a replay would notice them.

Each is a transfer worker that breaks one promise; used by `replay --plant` and by tests. Nothing else
may use these classes.
"""

from __future__ import annotations

import ctypes
import dataclasses

from sglang_hisparse.replay.executor import LateWorker
from sglang_hisparse.residency.types import StepPlan


class FlippedHostByte(LateWorker):
    """One bit of each page's first host row turns over when its copy has arrived."""

    def _run_oldest(self) -> None:
        pages = [transfer.logical_page for transfer in self._late[0][1]]
        super()._run_oldest()
        for page in pages:
            byte = ctypes.c_uint8.from_address(int(self._host_bases[0]) + page * self.page_bytes)
            byte.value ^= 0x10


class SkippedPromotion(LateWorker):
    """Promoted pages enter the page table, but nothing is copied to them."""

    def apply(self, plan: StepPlan) -> None:
        super().apply(dataclasses.replace(plan, promotions=()))


class WrongTableEntry(LateWorker):
    """When two pages enter the page table in one step, they take each other's device page."""

    def apply(self, plan: StepPlan) -> None:
        table = list(plan.table)
        resident = [index for index, (_, device_page) in enumerate(table) if device_page]
        if len(resident) > 1:
            (a, page_a), (b, page_b) = table[resident[0]], table[resident[-1]]
            table[resident[0]], table[resident[-1]] = (a, page_b), (b, page_a)
        super().apply(dataclasses.replace(plan, table=tuple(table)))


class SkippedWait(LateWorker):
    """Plans do not wait for the host copies of the pages that they give up."""

    def apply(self, plan: StepPlan) -> None:
        super().apply(dataclasses.replace(plan, wait_transfer_id=0))


class KeptHotRows(LateWorker):
    """A slot that takes a new lease still believes in the rows of the old one."""

    def apply(self, plan: StepPlan) -> None:
        state, self.hot_state = self.hot_state, _Deaf()
        super().apply(plan)
        self.hot_state = state


class _Deaf:
    def reset(self, slots: object) -> None:
        pass


FAULTS: dict[str, type[LateWorker]] = {
    "host-byte": FlippedHostByte,
    "promotion": SkippedPromotion,
    "table": WrongTableEntry,
    "wait": SkippedWait,
    "hot-rows": KeptHotRows,
}
