"""What must be true of an engine's pools, asked from outside.

Called by tests between steps. They read and change nothing; a violation raises AssertionError with figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .engine import Engine, Handle


def assert_outputs(handles: list[Handle]) -> None:
    """Every handle ended by length with exactly the reference's tokens."""
    for handle in handles:
        assert handle.finish_reason == "length", f"{handle.rid}: {handle.finish_reason}"
        assert handle.output == handle.history.output(handle.max_new_tokens), f"{handle.rid}: wrong tokens"


def assert_prefix_of_reference(handles: list[Handle]) -> None:
    """What was streamed before an abort is right as far as it goes."""
    for handle in handles:
        assert handle.output == handle.history.output(len(handle.output)), f"{handle.rid}: wrong tokens"


def assert_residency_sound(engine: Engine) -> None:
    """I2, I3 and the page book's own counts hold now, and no free had to wait for the device."""
    problems = engine.coordinator.self_check()
    assert not problems, "; ".join(problems)


def assert_no_request_left(engine: Engine) -> None:
    """No request: no lease, no hold, no user; every resident page belongs to the radix tree and to nothing else."""
    runtime = engine.coordinator
    book, pages = runtime.residency.book, runtime.residency.device_pages
    assert not book.live.any() and not book.leased.any()
    assert not runtime.residency.hot_lease
    for counts in (book.users, book.unleased, book.holds):
        assert not counts.any(), np.flatnonzero(counts)
    cached = book.num_usable - book.num_free
    assert cached * engine.allocator.page_size == engine.tree.evictable_size()
    resident = int(np.count_nonzero(book.device_page))
    assert pages.num_free + resident == pages.num_usable
    assert_residency_sound(engine)


def assert_pools_empty(engine: Engine) -> None:
    """After a flush: every logical and device page is free, no copy is under way, no error was counted."""
    runtime = engine.coordinator
    assert_no_request_left(engine)
    assert runtime.residency.book.num_free == runtime.residency.book.num_usable
    assert runtime.residency.device_pages.num_free == runtime.residency.device_pages.num_usable
    assert engine.allocator.available_size() + engine.allocator.unbacked_tokens == engine.allocator.size
    assert not runtime.has_ongoing_staging()
    assert engine.req_to_token_pool.available_size() == engine.req_to_token_pool.size


def used_host_tier(engine: Engine) -> dict[str, Any]:
    """The counters that say whether a run went through the host tier; asserts that no row was refused or wrong."""
    engine.coordinator.counters()  # the resolver's counts are those of the call before
    counters = engine.coordinator.counters()
    assert counters["errors"] == 0, counters
    return counters
