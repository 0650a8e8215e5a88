"""Hot buffers: the GPU state of the resolver, one set of tables for each index group.

Owned by the runtime. The resolver kernel is the only writer of tags and replacement state; the transfer worker writes
leases, on the forward stream, between forwards. Addresses never change, so captured graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hisparse.kernels.resolver import HotGroupState, resolve, translate_pages
from sglang_hisparse.kernels.row_counts import RowCounts, StepRates
from sglang_hisparse.transfer.index_scores import IndexScores

SAMPLE_PERIOD = 8  #: decode steps from one sample of the device's counts to the next
RATE_WINDOW = 32


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Index groups of this rank's layers, counted from 0: `members[g]` is the leader of group g, then its followers."""

    members: tuple[tuple[int, ...], ...]
    group_of: tuple[int, ...]  #: layer -> group

    @classmethod
    def from_reuse_flags(cls, reuses_top_k: Sequence[bool] | None, num_layers: int) -> GroupTable:
        """From SGLang's per-layer flags "reuses the top-k of the layer before"; None: every layer leads itself."""
        flags = list(reuses_top_k or [False] * num_layers)
        if len(flags) != num_layers or flags[0]:
            raise ValueError(
                f"{len(flags)} top-k flags (first: {flags[:1]}) for {num_layers} layers; the first layer must lead"
            )
        members: list[list[int]] = []
        for layer, reuses in enumerate(flags):
            if reuses:
                members[-1].append(layer)
            else:
                members.append([layer])
        group_of = [group for group, layers in enumerate(members) for _ in layers]
        return cls(tuple(map(tuple, members)), tuple(group_of))

    def is_leader(self, layer: int) -> bool:
        return self.members[self.group_of[layer]][0] == layer


class RealRows:
    """`num_real_reqs` to SGLang, which fills it twice a decode step, nearly always with what it holds: that costs no launch.

    rows int32 [1], on the device; nobody else may write it.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._count: int | None = None

    def fill_(self, count: int) -> None:
        """The rows below `count` are requests, for what is launched next on this stream."""
        if count == self._count:
            return
        # Inside a capture it is the graph that fills, whenever it is replayed.
        captured = self._rows.is_cuda and torch.cuda.is_current_stream_capturing()
        self._count = None if captured else count
        self._rows.fill_(count)


class HotBuffers:
    """State of all groups for `num_slots` request slots of `buffer_size` rows, and the output of the last resolve.

    hot_pages int32 [num_slots, buffer_size / page_size]: device pages of each slot's lease, 0: none. scores: where the
    indexer's scores arrive, None unless they say which rows leave.
    """

    def __init__(
        self,
        *,
        groups: GroupTable,
        num_slots: int,
        buffer_size: int,
        page_size: int,
        top_k: int,
        max_pages: int,
        row_bytes: int,
        page_table: torch.Tensor,
        host_bases: torch.Tensor,
        device_bases: torch.Tensor,
        evicts_by_score: bool = False,
    ) -> None:
        device = page_table.device
        self.scores = IndexScores() if evicts_by_score else None
        self.groups = groups
        self.page_size, self.row_bytes, self.page_table = page_size, row_bytes, page_table
        self.host_bases, self.device_bases = host_bases.to(device), device_bases.to(device)
        self.hot_pages = torch.zeros((num_slots, buffer_size // page_size), dtype=torch.int32, device=device)
        self.num_real_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.state = HotGroupState.allocate(
            num_slots,
            buffer_size,
            device,
            num_groups=len(groups.members),
            evicts_by_score=evicts_by_score,
            group_layers=[len(layers) for layers in groups.members],
        )
        self._decode_steps = 0  # noted since the last forward
        # Written by the first group of a forward, read by all: logical pages are translated once a step, not once a layer.
        self._translated_pages = torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device)
        self._out = torch.full((num_slots, top_k), -1, dtype=torch.int32, device=device)
        self._group_bases = [
            (self.host_bases[list(layers)].contiguous(), self.device_bases[list(layers)].contiguous())
            for layers in groups.members
        ]

    def resolve(
        self,
        leader_layer: int,
        top_k_result: torch.Tensor,
        page_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Resolve and fetch for the group of `leader_layer`; see kernels/resolver.py for shapes. Returns `rows(n)`."""
        group = self.groups.group_of[leader_layer]
        host_bases, device_bases = self._group_bases[group]
        num_rows = top_k_result.shape[0]
        translated = self._translated_pages[:num_rows, : page_rows.shape[1]]
        if group == 0:
            translate_pages(page_rows[:num_rows], self.page_table, translated)
        resolve(
            top_k=top_k_result,
            page_rows=translated,
            seq_lens=seq_lens[:num_rows],
            req_slots=req_pool_indices[:num_rows],
            num_real_rows=self.num_real_rows,
            page_table=self.page_table,
            hot_pages=self.hot_pages,
            group=self.state[group],
            host_bases=host_bases,
            device_bases=device_bases,
            row_bytes=self.row_bytes,
            page_size=self.page_size,
            out=self.rows(num_rows),
            translated_pages=True,
            # Its blocks take their places while the kernel ahead ends, and wait for that end before they read anything.
            overlap_launch=True,
            scores=None if self.scores is None else self.scores.take(leader_layer),
        )
        return self.rows(num_rows)

    def bases_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device addresses int64 [layers of its group], leader first."""
        return self._group_bases[self.groups.group_of[layer]]

    def rows(self, num_rows: int) -> torch.Tensor:
        """Output int32 [num_rows, top_k] of the last `resolve`."""
        return self._out[:num_rows]

    def reset(self, slots: torch.Tensor) -> None:
        """Forget all hot rows of `slots` (int64, on the device), in every group; ordered on the current stream."""
        self.state.reset(slots)

    def forget_counts(self) -> None:
        """Graph capture has resolved rows that no request asked for: count from here."""
        self.state.forget_counts()

    def note_decode(self) -> None:
        """The next forward is a decode step."""
        self._decode_steps += 1

    def before_forward(self) -> None:
        """On the forward stream, ahead of a forward: every SAMPLE_PERIOD decode steps the device's counts are sampled."""
        self.state.before_forward(self._decode_steps, SAMPLE_PERIOD)
        self._decode_steps = 0

    def latest_counts(self) -> RowCounts:
        """Rows resolved since start, request slot by slot, and the decode step up to which they are counted.

        A slot's counts go on when a request leaves it: subtract what they were when the next one took it.
        """
        return self.state.latest()

    def step_rates(self, window: int = RATE_WINDOW) -> StepRates | None:
        """Rows per decode step, mean of about the last `window` steps whose counts have arrived, for each slot and in total.

        `step_rates().total("rows_fetched")` is what the whole batch fetched per step, summed over index groups;
        `of_slots("rows_fetched")` float64 [num_slots] says which requests fetched it; `total("layer_rows_fetched") *
        row_bytes` are the bytes that took over the link. None until two samples have arrived; a slot that changed its
        request inside the window shows a mixture. Waits for nothing, so it lags by one or two samples.
        """
        return self.state.step_rates(window)

    def counters(self) -> dict[str, int]:
        """Rows resolved since start, summed over groups and slots, as last sampled; enqueues the next sample."""
        return self.state.counters()
