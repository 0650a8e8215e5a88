"""Goal: a logical page is freed exactly when nothing names or maps it. Method: a coordinator of ten pages."""

from __future__ import annotations

import pytest

from sglang_hisparse.replay.prefix_cache import PrefixCache
from sglang_hisparse.residency import DevicePages, ResidencyCoordinator, ResidencyLimits, ResidencyPolicy

A, B = ("conversation", 1), ("conversation", 2)


@pytest.fixture
def coordinator() -> ResidencyCoordinator:
    limits = ResidencyLimits(
        num_logical_pages=10, num_device_pages=10, num_slots=3, max_pages_per_slot=8, hot_pages=2, page_size=16
    )
    coordinator = ResidencyCoordinator(limits, ResidencyPolicy(), DevicePages(10), lambda transfers: [])
    coordinator.attach(1, [], final_pages=5, prompt_pages=5)
    coordinator.append(1, coordinator.book.allocate(5) or [])
    return coordinator


def finish(coordinator: ResidencyCoordinator, cache: PrefixCache, key: tuple[str, int], kept: int) -> list[int]:
    pages = coordinator.book.pages(1).tolist()
    rest = coordinator.unmap(1, kept, len(pages))
    cache.store(key, pages[:kept])
    cache.free_unused(rest)
    coordinator.release(1)
    return pages[:kept]


def test_kept_pages_outlive_their_request(coordinator: ResidencyCoordinator) -> None:
    """Goal: the cache keeps full pages, the rest is freed. Method: keep three of five, then drop them."""
    cache = PrefixCache(coordinator)
    pages = finish(coordinator, cache, A, 3)
    assert coordinator.book.num_free == 7
    assert list(cache.match(A)) == pages
    cache.drop(A)
    assert coordinator.book.num_free == coordinator.device_pages.num_free == 10


def test_shared_pages_stay_with_their_last_name(coordinator: ResidencyCoordinator) -> None:
    """Goal: entries may share pages. Method: two names for two pages, dropped one after the other, then a longer entry."""
    cache = PrefixCache(coordinator)
    pages = finish(coordinator, cache, A, 4)
    cache.store(B, pages[:2])
    cache.drop(A)
    assert coordinator.book.num_free == 8
    cache.store(B, pages[:1])
    assert coordinator.book.num_free == 9
    assert not cache.is_named(pages[1])


def test_logical_room_takes_the_oldest_entry_first(coordinator: ResidencyCoordinator) -> None:
    """Goal: use keeps an entry. Method: three entries, one used again, room for one more page than is free."""
    cache = PrefixCache(coordinator)
    pages = finish(coordinator, cache, A, 5)
    for number, page in enumerate(pages):
        cache.store(("conversation", 10 + number), [page])
    cache.drop(A)
    cache.match(("conversation", 10))
    assert cache.make_logical_room(6)
    assert cache.keys_by_use() == [("conversation", n) for n in (12, 13, 14, 10)]


def test_protected_pages_survive(coordinator: ResidencyCoordinator) -> None:
    """Goal: a prefix that is being admitted is not freed by its own admission. Method: all room is asked for meanwhile."""
    cache = PrefixCache(coordinator)
    pages = finish(coordinator, cache, A, 3)
    with cache.protect(pages[:2]):
        assert not cache.make_logical_room(10)
        assert coordinator.book.num_free == 8
    assert coordinator.book.num_free == 10
