"""Goal: pages filled from storage enter the protocol as any host-only page. Method: a coordinator without a device."""

from __future__ import annotations

import pytest

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import DevicePages, PageState, ResidencyCoordinator, ResidencyLimits, ResidencyPolicy
from sglang_hisparse.residency.invariants import check


def coordinator() -> ResidencyCoordinator:
    limits = ResidencyLimits(num_logical_pages=16, num_device_pages=8, num_slots=3, max_pages_per_slot=16, hot_pages=2)
    return ResidencyCoordinator(
        limits, ResidencyPolicy(), DevicePages(8), lambda transfers: [t.transfer_id for t in transfers]
    )


def test_an_adopted_page_is_host_only_and_can_be_promoted_and_freed() -> None:
    """Goal: nothing treats it in a way of its own. Method: adopt, promote one, free all; the invariants hold throughout."""
    residency = coordinator()
    pages = residency.book.allocate(3)
    residency.adopt(pages)
    check(residency)
    assert [residency.book.state[page] for page in pages] == [PageState.HOST] * 3
    assert residency.promote(pages[:1])
    plan = residency.take_plan()
    assert [promotion.logical_page for promotion in plan.promotions] == pages[:1]
    residency.free(pages)
    check(residency)
    assert residency.book.num_free == 16 and residency.device_pages.num_free == 8


def test_only_allocated_pages_without_a_pending_write_are_adopted() -> None:
    """Goal: R7. Method: adopt a page twice, and one onto which its former owner's copy may still land."""
    residency = coordinator()
    pages = residency.book.allocate(1)
    residency.adopt(pages)
    with pytest.raises(InvariantError, match="HOST and cannot be adopted"):
        residency.adopt(pages)
    (page,) = residency.book.allocate(1)
    residency.attach(1, [], final_pages=2, prompt_pages=1)
    assert residency.append(1, [page])
    residency.note_launch([1], [64], [False])
    residency.mirror([page])
    residency.unmap(1, 0, 1)
    residency.free([page])
    residency.release(1)
    assert residency.book.allocate(1) == [page]
    with pytest.raises(InvariantError, match="cannot be adopted"):
        residency.adopt([page])


def test_a_page_changes_its_generation_with_its_owner() -> None:
    """Goal: a reader on another thread can tell that a page has ended. Method: free, flush, and neither."""
    residency = coordinator()
    (page,) = residency.book.allocate(1)
    residency.adopt([page])
    before = int(residency.book.generation[page])
    residency.promote([page])
    assert residency.book.generation[page] == before
    residency.free([page])
    assert residency.book.generation[page] == before + 1
    residency.clear()
    assert residency.book.generation[page] > before + 1
