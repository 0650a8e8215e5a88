"""A coordinator with a hand-driven mirror link, and the few calls in which tests speak.

Owns nothing but convenience: every method is one or two public calls of the coordinator, in the runtime's order.
Shared by tests/residency and tests/sim; makes no check of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hisparse.residency import (
    BorderStep,
    DevicePages,
    PageState,
    ResidencyCoordinator,
    ResidencyLimits,
    ResidencyPolicy,
    SpillPolicy,
)
from sglang_hisparse.residency.types import PageTransfer


class Stage:
    """`auto_ack`: the link acknowledges copies as enqueued at once; else the test calls `on_enqueued`."""

    def __init__(
        self,
        *,
        device: int = 12,
        logical: int = 24,
        slots: int = 5,
        hot: int = 2,
        page_size: int = 4,
        tail: int = 2,
        auto_ack: bool = True,
        policy: ResidencyPolicy | None = None,
        border: tuple[BorderStep, ...] = (),
    ) -> None:
        self.limits = ResidencyLimits(
            logical, device, slots, max(logical, device + 2), hot, page_size=page_size, tail_pages=tail, border=border
        )
        self.sent: list[PageTransfer] = []
        self.auto_ack = auto_ack
        self.pages = DevicePages(device)
        calm = ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=0)
        self.coordinator = ResidencyCoordinator(self.limits, policy or calm, self.pages, self._sink)
        self.policy = SpillPolicy(self.coordinator)
        self.book = self.coordinator.book

    def _sink(self, transfers: list[PageTransfer]) -> list[int]:
        self.sent += transfers
        return [transfer.transfer_id for transfer in transfers] if self.auto_ack else []

    def extend(
        self, slot: int, num_pages: int, *, prefix: Sequence[int] = (), launch: bool = True, ends: bool = True
    ) -> list[int]:
        """A new request of `num_pages` whole pages, `prefix` among them; `launch`: its prefill forward runs too."""
        self.coordinator.attach(slot, list(prefix), final_pages=num_pages)
        self.grow(slot, num_pages - len(prefix))
        if launch:
            self.launch(slot, num_pages, ends=ends)
        return self.row(slot)

    def grow(self, slot: int, count: int) -> list[int]:
        pages = self.book.allocate(count)
        assert pages is not None and self.coordinator.append(slot, pages)
        return pages

    def launch(self, slot: int, num_pages: int, *, rows: int = 0, ends: bool = True) -> None:
        """A forward that brings the slot to `num_pages` full pages and `rows` rows more."""
        self.coordinator.note_launch([slot], [num_pages * self.limits.page_size + rows], [ends])

    def mirror_all(self) -> list[int]:
        """Copy everything that is DIRTY; returns the transfer ids."""
        before = len(self.sent)
        self.coordinator.mirror(self.coordinator.mirror_backlog(1_000))
        return [transfer.transfer_id for transfer in self.sent[before:]]

    def finish(self, slot: int, keep: int = 0) -> list[int]:
        """The request ends; its first `keep` pages stay with the tree, the others are freed."""
        freed = self.coordinator.unmap(slot, keep, len(self.row(slot)))
        self.coordinator.free(freed)
        self.coordinator.release(slot)
        return freed

    def cache(self, slot: int, num_pages: int) -> list[int]:
        """A finished request leaves `num_pages` pages in the tree; returns them."""
        pages = self.extend(slot, num_pages)
        self.finish(slot, keep=num_pages)
        return pages

    def row(self, slot: int) -> list[int]:
        return self.book.pages(slot).tolist()

    def states(self, pages: Sequence[int]) -> list[PageState]:
        return [PageState(int(self.book.state[page])) for page in pages]
