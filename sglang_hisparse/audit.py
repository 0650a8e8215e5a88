"""Looking for wrong rows while a server runs, and planting them on purpose.

Both are off in production and cost nothing then; both run inside the captured graph, after the resolver. They are switched
by environment variables because they are tools of tests and soak runs, not settings of a service.

SGLANG_HISPARSE_AUDIT=1        every row that the resolver took from a hot buffer is compared, in the leader's layer, with its
                               home on the host; counted in `audited_rows` and `mismatches`.
SGLANG_HISPARSE_FAULT=zero_rows:0.01
                               this share of the selected positions is given to attention as the pad page's row; the other
                               faults of that variable are described in faults.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from sglang_hisparse.faults import FAULT_VARIABLE, FaultPlan
from sglang_hisparse.kernels.resolver import audit_rows

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

AUDIT_VARIABLE = "SGLANG_HISPARSE_AUDIT"
__all__ = ["AUDIT_VARIABLE", "FAULT_VARIABLE", "RowAudit", "RowFault"]


class RowAudit:
    """Counts [audited, mismatched] rows on the device; `counters` reads an earlier asynchronous copy."""

    def __init__(self, runtime: HiSparseRuntime, enabled: bool) -> None:
        self._hot = runtime.hot
        self._counts = torch.zeros(2, dtype=torch.int64, device=runtime.hot.page_table.device) if enabled else None
        on_gpu = runtime.hot.page_table.device.type == "cuda"
        self._seen = torch.zeros(2, dtype=torch.int64, pin_memory=on_gpu) if enabled else None

    @classmethod
    def from_env(cls, runtime: HiSparseRuntime) -> RowAudit:
        return cls(runtime, os.environ.get(AUDIT_VARIABLE, "0") not in ("", "0"))

    def check(
        self, leader_layer: int, rows: torch.Tensor, top_k: torch.Tensor, page_rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> None:
        """Compare rows int32 [n, k] with their homes; a tail or resident row has no other home and is passed over."""
        if self._counts is None:
            return
        hot = self._hot
        host_bases, device_bases = hot.bases_of(leader_layer)
        audit_rows(
            rows=rows,
            top_k=top_k,
            page_rows=page_rows[: rows.shape[0]],
            seq_lens=seq_lens[: rows.shape[0]],
            num_real_rows=hot.num_real_rows,
            page_table=hot.page_table,
            host_bases=host_bases,
            device_bases=device_bases,
            row_bytes=hot.row_bytes,
            page_size=hot.page_size,
            counts=self._counts,
        )

    def counters(self) -> dict[str, int]:
        if self._seen is None:
            return {"audited_rows": 0, "mismatches": 0}
        audited, mismatches = self._seen.tolist()
        self._seen.copy_(self._counts, non_blocking=True)
        return {"audited_rows": audited, "mismatches": mismatches}


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
