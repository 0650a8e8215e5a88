"""Looking for wrong rows while a server runs, and planting them on purpose.

Both are off in production and cost nothing then; both run inside the captured graph, after the resolver. They are switched
by environment variables because they are tools of tests and soak runs, not settings of a service.

SGLANG_HISPARSE_AUDIT=1        of the rows that each decode step gives to attention,
                               - every row of a host-only page is compared, in all layers, with its home on the host;
                               - SAMPLED rows of each request, resident ones too, are compared, in all layers, with the checksum
                                 taken when their page was sealed;
                               - every row is held against the poison that freed pages are overwritten with.
                               `audited_rows` and `mismatches` count them; what is wrong is logged with request, layer, page and
                               the page's history. Cost: 4 bytes of GPU memory per row and layer; every selected row of a
                               host-only page is read from the host once more, up to top_k * row bytes * layers a request and step,
                               where without the audit only misses are.
SGLANG_HISPARSE_FAULT=zero_rows:0.01
                               this share of the selected positions is given to attention as the pad page's row; the other
                               faults of that variable are described in faults.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from sglang_hisparse.faults import FAULT_VARIABLE, FaultPlan
from sglang_hisparse.kernels.resolver import audit_rows
from sglang_hisparse.page_audit import POISON_WORD, PageAudit, row_sums

if TYPE_CHECKING:
    from sglang_hisparse.residency.types import StepPlan
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

AUDIT_VARIABLE = "SGLANG_HISPARSE_AUDIT"
__all__ = ["AUDIT_VARIABLE", "FAULT_VARIABLE", "RowAudit", "RowFault"]

SAMPLED = 32
"""Rows of each request and index group whose checksum is looked at in a step; others in the next step."""

LOOK_STEPS = 8  # steps between two looks at what the device has found
MOST_REPORTS = 20


class Finding(IntEnum):
    """What can be wrong with a row given to attention."""

    CHANGED = 1
    POISON = 2


_WORDS = {
    Finding.CHANGED: "differs from what its page held when it was sealed",
    Finding.POISON: "is memory of a request that has ended",
}

# Words of the device's tally, int64: two of audit_rows, those of the checksums, poisoned rows; then the first finding.
_HOME_ROWS, _HOME_WRONG, _SUM_ROWS, _SUM_WRONG, _POISONED = range(5)
_FOUND = slice(5, 11)  # finding, layer, request slot, position, logical page, device row


class RowAudit:
    """Checks in the graph; the tally is on the device, `counters` reads an earlier asynchronous copy of it."""

    def __init__(self, runtime: HiSparseRuntime, enabled: bool) -> None:
        self._runtime, self._hot = runtime, runtime.hot
        self.pages: PageAudit | None = None
        if not enabled:
            return
        device = runtime.hot.page_table.device
        self.pages = PageAudit(runtime)
        self._tally = torch.zeros(_FOUND.stop, dtype=torch.int64, device=device)
        self._seen = torch.zeros(_FOUND.stop, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = torch.arange(SAMPLED, device=device) * max(runtime.top_k // SAMPLED, 1)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._next_look = 0
        self._num_reports = self._home_wrong = 0

    @classmethod
    def from_env(cls, runtime: HiSparseRuntime) -> RowAudit:
        return cls(runtime, os.environ.get(AUDIT_VARIABLE, "0") not in ("", "0"))

    # -- inside the graph ---------------------------------------------------------------------------------------------

    def check(
        self,
        leader_layer: int,
        rows: torch.Tensor,
        top_k: torch.Tensor,
        page_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        req_slots: torch.Tensor,
    ) -> None:
        """Look at the answers rows int32 [n, k] for the group of `leader_layer`; the other arguments are the resolver's."""
        if self.pages is None:
            return
        hot, num_rows = self._hot, rows.shape[0]
        page_rows, seq_lens = page_rows[:num_rows], seq_lens[:num_rows]
        host_bases, device_bases = hot.bases_of(leader_layer)
        audit_rows(
            rows=rows,
            top_k=top_k,
            page_rows=page_rows,
            seq_lens=seq_lens,
            num_real_rows=hot.num_real_rows,
            page_table=hot.page_table,
            host_bases=host_bases,
            device_bases=device_bases,
            row_bytes=hot.row_bytes,
            page_size=hot.page_size,
            counts=self._tally[:2],
        )
        is_real = torch.arange(num_rows, device=rows.device)[:, None] < hot.num_real_rows
        slots = req_slots[:num_rows].long()[:, None]
        self._check_poison(leader_layer, rows, top_k, page_rows, slots, is_real)
        columns = (self._columns + self._steps) % top_k.shape[1]
        self._check_sums(leader_layer, rows[:, columns], top_k[:, columns], page_rows, seq_lens, slots, is_real)
        if leader_layer == 0:
            self._steps += 1

    def _check_poison(
        self,
        layer: int,
        rows: torch.Tensor,
        top_k: torch.Tensor,
        page_rows: torch.Tensor,
        slots: torch.Tensor,
        is_real: torch.Tensor,
    ) -> None:
        first_words = self._runtime.pool.layer_rows(layer).view(torch.int64)[:, 0]
        poisoned = is_real & (rows >= 0) & (first_words[rows.clamp(min=0).long()] == POISON_WORD)
        self._tally[_POISONED] += poisoned.sum()
        self._note_first(poisoned, Finding.POISON, layer, slots, top_k, self._pages_of(top_k, page_rows), rows)

    def _pages_of(self, positions: torch.Tensor, page_rows: torch.Tensor) -> torch.Tensor:
        """Logical pages int64 of positions [n, c]; of an impossible position, some page of the row."""
        index = (positions.long() // self._hot.page_size).clamp(0, page_rows.shape[1] - 1)
        return page_rows.gather(1, index).long()

    def _check_sums(
        self,
        leader_layer: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        page_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        is_real: torch.Tensor,
    ) -> None:
        page_size, sums, weights = self._hot.page_size, self.pages.sums, self.pages.weights
        pages = self._pages_of(positions, page_rows)
        valid = is_real & (positions >= 0) & (positions < seq_lens[:, None]) & (rows >= 0)
        valid &= (pages > 0) & (pages * page_size < sums.shape[1])
        ids = torch.where(valid, pages * page_size + positions % page_size, 0)
        device_rows = rows.clamp(min=0).long()
        for layer in self._hot.groups.members[self._hot.groups.group_of[leader_layer]]:
            expected = sums[layer][ids]
            known = valid & (expected != 0)
            wrong = known & (expected != row_sums(self._runtime.pool.layer_rows(layer)[device_rows], weights))
            self._tally[_SUM_ROWS] += known.sum()
            self._tally[_SUM_WRONG] += wrong.sum()
            self._note_first(wrong, Finding.CHANGED, layer, slots, positions, pages, rows)

    def _note_first(
        self,
        found: torch.Tensor,
        finding: Finding,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        pages: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:
        """Keep the first of `found` [n, c], unless an earlier finding has not been reported yet."""
        at = (
            found.flatten().to(torch.int8).argmax().view(1)
        )  # of one element: an index without a dimension is waited for
        what = [torch.full_like(at, finding), torch.full_like(at, layer)]
        where = [values.expand(found.shape).flatten()[at].long() for values in (slots, positions, pages, rows)]
        entry = torch.cat([*what, *where])
        is_news = found.any() & (self._tally[_FOUND.start] == 0)
        self._tally[_FOUND] = torch.where(is_news, entry, self._tally[_FOUND])

    # -- between forwards ---------------------------------------------------------------------------------------------

    def forget_counts(self) -> None:
        """Graph capture has looked at rows that no request asked for: count from here."""
        if self.pages is not None:
            self._tally.zero_()

    def before_plan(self) -> None:
        """On the forward stream, ahead of a plan."""
        if self.pages is None:
            return
        self.pages.before_plan()
        if self._runtime.residency.step >= self._next_look:
            self._next_look = self._runtime.residency.step + LOOK_STEPS
            self._look()

    def while_idle(self) -> None:
        """No forward may come for long, and a landing may wait for poison. Without streams it waits for the next forward."""
        if self.pages is not None and self._copied is not None:
            self.before_plan()

    def after_plan(self, plan: StepPlan) -> None:
        if self.pages is not None:
            self.pages.after_plan(plan)

    def counters(self) -> dict[str, int]:
        """Rows looked at and wrong ones since start, as of an earlier call."""
        if self.pages is None:
            return {"audited_rows": 0, "mismatches": 0}
        seen = self._seen.tolist()
        self._look()
        return {
            "audited_rows": seen[_HOME_ROWS] + seen[_SUM_ROWS],
            "mismatches": seen[_HOME_WRONG] + seen[_SUM_WRONG] + seen[_POISONED],
        }

    def _look(self) -> None:
        """Log what an earlier copy has brought, and start the next; then the device may note the next finding."""
        if self._copied is not None and not self._copied.query():
            return
        for line in self._lines():
            self._num_reports += 1
            if self._num_reports <= MOST_REPORTS:
                logger.error("HiSparse audit: %s", line)
        with self.pages.on_forward_stream():
            self._seen.copy_(self._tally, non_blocking=True)
            self._tally[_FOUND] = 0
            if self._copied is not None:
                self._copied.record()

    def _lines(self) -> Iterator[str]:
        seen = self._seen.tolist()
        finding, layer, slot, position, page, row = seen[_FOUND]
        if finding:
            rid = self.pages.requests.get(slot, "unknown")
            yield (
                f"a row given to attention {_WORDS[Finding(finding)]}: request {rid} (slot {slot}), layer "
                f"{layer + self._runtime.pool.start_layer}, position {position}, logical page {page}, device row {row}; "
                f"history of the page: {self.pages.history(page)}"
            )
        elif seen[_HOME_WRONG] > self._home_wrong:
            slots = sorted(self._runtime.residency.hot_lease)
            requests = ", ".join(f"{self.pages.requests.get(slot, 'unknown')} (slot {slot})" for slot in slots)
            yield (
                f"{seen[_HOME_WRONG] - self._home_wrong} rows of hot buffers differ from their homes, none of them among the "
                f"sampled ones; requests with a hot buffer: {requests}"
            )
        self._home_wrong = seen[_HOME_WRONG]


class RowFault:
    """Replaces a share of the resolved rows by row 0, the pad page's, which holds zeros."""

    def __init__(self, share: float) -> None:
        self._period = round(1 / share) if share else 0

    @classmethod
    def from_env(cls, runtime: Any) -> RowFault:
        return cls(FaultPlan.from_env().zero_rows)

    def apply(self, rows: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        """Rows int32 [n, k], a new tensor where faults are planted: by a hash of the position, the same in every layer."""
        if not self._period:
            return rows
        chosen = (top_k.long() * 2654435761 >> 7) % self._period == 0
        return torch.where(chosen & (rows >= 0), torch.zeros_like(rows), rows)
