"""State of the resolver: what every hot slot holds and when it was last used, per index group and request slot.

Allocated by HotBuffers (transfer/hot_buffer.py), written by the resolver and by `reset` only. Addresses never change, so
captured graphs stay valid. The layout of the header is HeaderColumn in csrc/params.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_hisparse.kernels.row_counts import COLUMNS, CountRing, RowCounts, StepRates

HEADER_COLUMNS = 32
LEASE_GENERATION = 0
COUNTER_NAMES = ("entries_resident", "entries_hot", "rows_fetched", "entries_failed")  # header columns 4 to 7
FIRST_COUNTER = 4
ROW_ALIGNMENT = 16  # bytes: slots are read as vectors
BUCKET_ENTRIES = 8


def _padded(buffer_size: int) -> int:
    return -(-buffer_size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def table_entries(buffer_size: int) -> int:
    """Entries of the slot table of one request slot and group: a power of two, at least twice the slots."""
    slot_bits = max(1, (buffer_size - 1).bit_length())
    return 2 * BUCKET_ENTRIES << max(5, slot_bits - 3)


def table_words(buffer_size: int) -> int:
    """Words of four bytes of that table: the entries, and two bytes a slot that say where its row is entered."""
    return table_entries(buffer_size) + _padded(buffer_size) // 2


@dataclass(frozen=True, slots=True)
class HotGroup:
    """Views of one index group: tags int32 [num_slots, B], stamps uint8 [num_slots, B], header int32 [num_slots, 32].

    tags: logical id whose row the slot holds, -1 empty. stamps: turnover stamp of the last use. header: columns 0 to 2
    generations and clock, 3 slots that hold a row, 4 to 7 counters (resident entries, hot entries, fetched rows, failed entries; modulo 2**32).
    table int32 [num_slots, table_words(B)]: logical id -> slot, the resolver's own (csrc/slot_table.cuh).
    slot_pages int16 [num_slots, B], its bits unsigned, or None unless rows are evicted by score: page of the request that a
    held row is of.
    """

    tags: torch.Tensor
    stamps: torch.Tensor
    header: torch.Tensor
    table: torch.Tensor
    slot_pages: torch.Tensor | None = None


class HotGroupState:
    """State of `num_groups` index groups; `state[g]` is a HotGroup. With one group its views are attributes here too."""

    def __init__(
        self,
        tags: torch.Tensor,
        stamps: torch.Tensor,
        header: torch.Tensor,
        table: torch.Tensor,
        slot_pages: torch.Tensor | None = None,
        group_layers: Sequence[int] | None = None,
    ) -> None:
        pages = [None] * len(tags) if slot_pages is None else slot_pages
        self._groups = [HotGroup(*views) for views in zip(tags, stamps, header, table, pages, strict=True)]
        self._headers = header  # [num_groups, num_slots, 32]
        self._counts = CountRing(header, group_layers)

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        buffer_size: int,
        device: torch.device | str,
        num_groups: int = 1,
        *,
        evicts_by_score: bool = False,
        group_layers: Sequence[int] | None = None,
    ) -> HotGroupState:
        """Empty state of `num_slots` request slots with `buffer_size` rows each, in each of `num_groups` groups.

        evicts_by_score: `resolve` may be given scores. group_layers: layers of each group, one by default.
        """
        shape = (num_groups, num_slots, _padded(buffer_size))
        tags = torch.full(shape, -1, dtype=torch.int32, device=device)[..., :buffer_size]
        stamps = torch.zeros(shape, dtype=torch.uint8, device=device)[..., :buffer_size]
        header = torch.zeros((num_groups, num_slots, HEADER_COLUMNS), dtype=torch.int32, device=device)
        table = torch.full((num_groups, num_slots, table_words(buffer_size)), -1, dtype=torch.int32, device=device)
        pages = torch.zeros(shape, dtype=torch.int16, device=device)[..., :buffer_size] if evicts_by_score else None
        return cls(tags, stamps, header, table, pages, group_layers)

    @staticmethod
    def bytes(num_slots: int, buffer_size: int, *, evicts_by_score: bool = False) -> int:
        """Device bytes of one group."""
        bytes_per_slot = 4 + 1 + 2 * evicts_by_score
        return num_slots * (_padded(buffer_size) * bytes_per_slot + table_words(buffer_size) * 4 + HEADER_COLUMNS * 4)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, group: int) -> HotGroup:
        return self._groups[group]

    @property
    def tags(self) -> torch.Tensor:
        return self._only().tags

    @property
    def stamps(self) -> torch.Tensor:
        return self._only().stamps

    @property
    def header(self) -> torch.Tensor:
        return self._only().header

    @property
    def table(self) -> torch.Tensor:
        return self._only().table

    @property
    def slot_pages(self) -> torch.Tensor | None:
        return self._only().slot_pages

    def reset(self, slots: torch.Tensor) -> None:
        """Forget all tags of `slots` (int64 [n], same device) in every group; a few bytes, on the current stream, no sync.

        The next resolve of such a slot takes every hot row as empty. Counters go on. Repeated slots are fine.
        """
        generation = self._headers[:, :, LEASE_GENERATION]
        generation[:, slots] = generation[:, slots] + 1

    def forget_counts(self) -> None:
        """Start counting anew: graph capture resolves rows that no request asked for. On the current stream."""
        self._headers[..., FIRST_COUNTER : FIRST_COUNTER + len(COUNTER_NAMES)] = 0
        self._counts.restart()

    def before_forward(self, num_steps: int, period: int) -> None:
        """Ahead of a forward of so many decode steps, on its stream: samples the counts every `period` decode steps."""
        self._counts.before_forward(num_steps, period)

    def latest(self) -> RowCounts:
        """Counts of every slot as of the newest sample that has arrived; looks, and waits for nothing."""
        return self._counts.latest()

    def step_rates(self, window: int) -> StepRates | None:
        """Counts of every slot per decode step, over about the last `window` steps sampled; None before there are any."""
        return self._counts.rates(window)

    def counters(self) -> dict[str, int]:
        """Totals over groups and slots since start, as of an earlier sample: enqueues the next one and waits for nothing.

        The columns of row_counts.COLUMNS. Exact as long as no slot counts 2**31 between two samples that have arrived.
        """
        latest = self.latest()
        self._counts.sample()
        return {column: latest.total(column) for column in COLUMNS}

    def _only(self) -> HotGroup:
        if len(self._groups) != 1:
            raise TypeError(f"this state has {len(self._groups)} groups: index it")
        return self._groups[0]
