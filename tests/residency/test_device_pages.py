"""Goal: a device page has one owner and none is lost (I2, I3). Method: direct calls, each refusal with its message."""

from __future__ import annotations

import pytest

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import DevicePages, Owner


def test_lease_and_release_return_to_empty() -> None:
    """Goal: what is leased comes back and is handed out again. Method: lease all, release all, count by owner."""
    pages = DevicePages(6)
    hot = pages.lease(2, Owner.HOT, 3)
    resident = pages.lease(4, Owner.RESIDENT, 9)
    assert sorted(hot + resident) == [1, 2, 3, 4, 5, 6]
    assert (pages.num_free, pages.count(Owner.HOT), pages.count(Owner.RESIDENT), pages.count(Owner.FREE)) == (
        0,
        2,
        4,
        0,
    )
    pages.release(hot, Owner.HOT, 3)
    pages.release(resident, Owner.RESIDENT)
    assert pages.num_free == pages.count(Owner.FREE) == 6
    assert sorted(pages.lease(6, Owner.HOT, 1)) == [1, 2, 3, 4, 5, 6]


def test_fresh_pool_hands_out_low_numbers_and_reuses_the_last() -> None:
    """Goal: one fixed order, so that ranks agree, and never the pad page. Method: lease, release, lease again."""
    pages = DevicePages(4)
    assert pages.lease(2, Owner.RESIDENT, 1) == [1, 2]
    pages.release([1], Owner.RESIDENT, 1)
    assert pages.lease(1, Owner.RESIDENT, 1) == [1]
    pages.clear()
    assert pages.lease(4, Owner.HOT, 1) == [1, 2, 3, 4]


def test_shortage_takes_nothing() -> None:
    """Goal: a refusal leaves the pool as it was (I7). Method: ask for one page more than there are, then for all."""
    pages = DevicePages(3)
    assert pages.lease(4, Owner.HOT, 1) is None
    assert pages.lease(0, Owner.HOT, 1) == []
    assert len(pages.lease(3, Owner.HOT, 1)) == 3


@pytest.mark.parametrize(
    ("owner", "owner_id"),
    [(Owner.HOT, 1), (Owner.RESIDENT, 2), (Owner.FREE, None)],
    ids=["wrong kind", "wrong id", "free"],
)
def test_only_the_owner_gives_back(owner: Owner, owner_id: int | None) -> None:
    """Goal: nobody else's page can be released (I2). Method: release with another kind and another id."""
    pages = DevicePages(2)
    page = pages.lease(1, Owner.RESIDENT, 1)
    with pytest.raises(InvariantError, match="I2"):
        pages.release(page, owner, owner_id)
    assert pages.num_free == 1


def test_double_release_is_refused() -> None:
    """Goal: a page cannot be free twice (I2). Method: release it twice."""
    pages = DevicePages(2)
    page = pages.lease(1, Owner.HOT, 1)
    pages.release(page, Owner.HOT, 1)
    with pytest.raises(InvariantError, match="FREE"):
        pages.release(page, Owner.HOT, 1)
    assert pages.num_free == 2


def test_only_a_resident_page_changes_hands() -> None:
    """Goal: re-homing moves resident pages only. Method: transfer a resident, a hot and a free page."""
    pages = DevicePages(3)
    (resident,), (hot,) = pages.lease(1, Owner.RESIDENT, 5), pages.lease(1, Owner.HOT, 1)
    pages.transfer(resident, 6)
    pages.release([resident], Owner.RESIDENT, 6)
    for page in (hot, resident):
        with pytest.raises(InvariantError, match="I2"):
            pages.transfer(page, 7)
