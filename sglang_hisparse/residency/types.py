"""Vocabulary of the residency protocol: page states, plans and acknowledgements.

Everything here is plain data. The coordinator makes plans, the transfer worker executes them and answers with
acknowledgements; no object of this module decides anything or touches memory.

Numbers: a *logical page* is `logical id // page_size`, a *device page* names `page_size` rows of every layer's KV buffer,
a *slot* is SGLang's `req_pool_idx`. Page 0 of both kinds is the pad page and never has an owner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NewType

import numpy as np

LogicalPage = NewType("LogicalPage", int)
DevicePage = NewType("DevicePage", int)
Slot = NewType("Slot", int)

PAD_PAGE = 0
NO_TRANSFER = 0


class PageState(IntEnum):
    """State of one logical page; see the diagram in ARCHITECTURE.md, section "Page states"."""

    FREE = 0  #: no owner
    OPEN = 1  #: resident, rows still to be written
    DIRTY = 2  #: resident and sealed, no host copy planned
    MIRRORING = 3  #: resident and sealed, a host copy is planned or on its way
    CLEAN = 4  #: resident and sealed, the host copy is complete
    HOST = 5  #: host copy only


RESIDENT_STATES = (PageState.OPEN, PageState.DIRTY, PageState.MIRRORING, PageState.CLEAN)


class Residency(Enum):
    """Where a running request's KV lives: an attribute of the request, derived from its pages."""

    FULL = "full"
    MIXED = "mixed"
    NONE = "none"


class ResidencyMode(Enum):
    """`residency` of the configuration: pages stay on the GPU while they fit, or leave it as soon as they are mirrored."""

    HYBRID = "hybrid"
    ALWAYS_HOST = "always_host"


class Mirroring(Enum):
    """`mirroring` of the configuration: sealed pages are copied as they are sealed, or when device pages run short."""

    EAGER = "eager"
    ON_PRESSURE = "on_pressure"


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """Copy one sealed page, all layers, from the device to its home on the host."""

    transfer_id: int
    logical_page: int
    device_page: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copy one host-only page, all layers, to a device page, before the next forward."""

    logical_page: int
    device_page: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """Copy one device page, all layers, to another one, before the next forward: the first is about to lose its memory."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """`slot` now holds `device_pages` as its hot buffer; empty: it holds none. Its hot rows are forgotten either way."""

    slot: int
    device_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the worker does on the forward stream before the next forward, in this order.

    1. wait for the host-write event of transfer `wait_transfer_id` (0: none): every page released since the last plan
       was mirrored by this transfer or an earlier one, so later writers of its device page, and readers of its host rows,
       come after the copy;
    2. copy `relocations`, then run `promotions`;
    3. write `table` (logical page, device page or 0) into the page table and apply `leases`;
    4. if it `vacates`, mark this point of the stream: once it is reached, nothing touches a withheld device page any more.
    """

    step: int
    wait_transfer_id: int
    promotions: tuple[Promotion, ...]
    table: tuple[tuple[int, int], ...]
    leases: tuple[LeaseChange, ...]
    relocations: tuple[Relocation, ...] = ()
    vacates: bool = False

    @property
    def is_empty(self) -> bool:
        return not (
            self.wait_transfer_id or self.promotions or self.table or self.leases or self.relocations or self.vacates
        )


@dataclass(frozen=True, slots=True, eq=False)
class StreamPlan:
    """Pages that one extend reads, by where they are; numpy int arrays [n], no page twice.

    Its attention finds them in the scratch of transfer/prefix_stream.py instead of the pool. The host rows of `host_pages`
    are complete, or being written by copies that the forward stream has been told to wait for.
    """

    host_pages: np.ndarray  #: logical pages without a device page
    resident_pages: np.ndarray  #: logical pages
    device_pages: np.ndarray  #: the device page of each of them
    union: bool = False  #: only the rows of `host_pages` that attention selects are read

    @property
    def num_pages(self) -> int:
        return len(self.host_pages) + len(self.resident_pages)


@dataclass(frozen=True, slots=True)
class StreamWindow:
    """Consecutive requests of one extend whose pages the scratch holds at once; `first` and `last`: their new tokens are
    first..last-1 of the batch.

    One request that is all on the device and too large for the scratch reads the pool instead: `plan` is None then.
    """

    plan: StreamPlan | None
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BorderStep:
    """Where the border between KV and index-K may stand: pages 1..n of either kind have memory then."""

    device_pages: int
    logical_pages: int


@dataclass(frozen=True, slots=True)
class ResidencyLimits:
    """Sizes that never change during the life of a coordinator. All counts are pages unless the name says otherwise."""

    num_logical_pages: int  #: logical pages 1..num_logical_pages exist
    num_device_pages: int  #: device pages 1..num_device_pages exist
    num_slots: int  #: request slots 0..num_slots-1; slot 0 is SGLang's padding row
    max_pages_per_slot: int
    hot_pages: int  #: pages of one hot lease, device_buffer_size / page_size
    page_size: int = 64
    tail_pages: int = 2  #: newest pages of a running request that never leave the device
    border: tuple[BorderStep, ...] = ()  #: from all device pages to all logical ones; empty: a border that does not move

    @property
    def steps(self) -> tuple[BorderStep, ...]:
        """Places of the border, the first at start; device pages fall and logical pages rise from one to the next."""
        return self.border or (BorderStep(self.num_device_pages, self.num_logical_pages),)

    @property
    def least_device_pages(self) -> int:
        """Device pages that remain wherever the border goes: what a request accepted for good may count on."""
        return self.steps[-1].device_pages

    @property
    def smallest_pages(self) -> int:
        """Device pages of a long decoding request when all that can leave has left: hot lease, tail, one to grow into."""
        return self.hot_pages + self.tail_pages + 1


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """The knobs of `--hisparse-config` that decide when pages move. Watermarks are fractions of the device pages."""

    mode: ResidencyMode = ResidencyMode.HYBRID
    mirroring: Mirroring = Mirroring.EAGER
    watermark_low: float = 0.02
    watermark_high: float = 0.06
    mirror_pages_per_step: int = 512
    promote_pages_per_step: int = 128
    mirror_lag_steps: int = 32  #: a forward waits for host copies enqueued this many forwards ago, so that they never pile up

    def watermark_pages(self, num_device_pages: int) -> tuple[int, int]:
        """(low, high) in pages of such a pool, rounded up, so that a small pool has a watermark too."""
        return math.ceil(self.watermark_low * num_device_pages), math.ceil(self.watermark_high * num_device_pages)


@dataclass(slots=True)
class ResidencyCounters:
    """Counted since start, never reset."""

    pages_mirrored: int = 0
    pages_spilled: int = 0
    pages_promoted: int = 0
    leases_acquired: int = 0
    leases_released: int = 0
    pages_rehomed: int = 0
    pages_relocated: int = 0  #: moved below the border between KV and index-K
    stale_acknowledgements: int = 0
    refusals: int = 0
    retractions_avoided: int = 0  #: shortages of running requests that spilling has met; counted by the runtime
    copies_failed: int = 0
