"""Goal: a device page has one owner and none is lost (I2, I3, I10). Method: direct calls, each refusal with its message."""

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


def test_pages_above_the_border_are_nobodys() -> None:
    """Goal: I3 with a border: free, resident, hot and withheld pages are all. Method: withhold, vacate, release, clear."""
    pages = DevicePages(8)
    (first,), hot = pages.lease(1, Owner.RESIDENT, 5), pages.lease(6, Owner.HOT, 1)
    pages.release(hot[:4], Owner.HOT, 1)
    assert pages.withhold(5) == hot[4:] == [6, 7]
    assert (pages.num_usable, pages.num_free, pages.count(Owner.WITHHELD)) == (5, 4, 1)
    taken = pages.vacate(6)
    assert taken in (2, 3, 4, 5) and pages.owner[taken] == Owner.HOT and pages.owner_id[taken] == 1
    pages.release([7], Owner.HOT, 1)
    assert (pages.num_free, pages.count(Owner.WITHHELD), pages.count(Owner.HOT)) == (3, 3, 1)
    assert pages.lease(4, Owner.HOT, 2) is None
    pages.clear()
    assert sorted(pages.lease(5, Owner.HOT, 3)) == [1, 2, 3, 4, 5] and pages.num_free == 0
    assert pages.count(Owner.WITHHELD) == 3 and first == 1


def test_the_border_of_device_pages_is_guarded() -> None:
    """Goal: I2 and I7 at the border. Method: raise it, vacate below it, a free page, and with nothing free."""
    pages = DevicePages(4)
    pages.lease(4, Owner.RESIDENT, 1)
    assert pages.withhold(3) == [4]
    for limit in (0, 4):
        with pytest.raises(InvariantError, match="I3"):
            pages.withhold(limit)
    with pytest.raises(InvariantError, match="nothing to vacate"):
        pages.vacate(3)
    with pytest.raises(InvariantError, match="I7"):
        pages.vacate(4)
    pages.release([4], Owner.RESIDENT, 1)
    with pytest.raises(InvariantError, match="WITHHELD"):
        pages.vacate(4)
