"""Goal: chunks go from KV to index-K and back, and no byte of what stays, no chunk and no call gets lost on the way.

Method: `ElasticMemory` alone, of a small shape, over the twin's virtual memory, where a place without memory faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_hisparse.elastic_layout import ElasticShape
from sglang_hisparse.errors import ConfigError, HiSparseError
from sglang_hisparse.memory import elastic
from sglang_hisparse.memory.elastic import ElasticMemory
from sglang_hisparse.memory.virtual_memory import HostTwin
from sglang_hisparse.residency import Progress

SHAPE = ElasticShape(
    device_pages=19, logical_pages=59, page_bytes=30 * 1024, index_page_bytes=10 * 1024, num_layers=6, num_leaders=4
)
CHUNK = 100 * 1024


@pytest.fixture
def moving() -> Iterator[ElasticMemory]:
    """Memory of SHAPE: the border stands at (19, 19), (15, 29), (12, 49), (9, 59)."""
    memory = ElasticMemory(HostTwin(CHUNK), SHAPE)
    yield memory
    memory.close()


def run(memory: ElasticMemory, old: int, new: int) -> None:
    memory.begin(old, new)
    while memory.progress() != Progress.MOVED:
        memory.advance()


def test_every_step_backs_what_it_says(moving: ElasticMemory) -> None:
    """Goal: pages below the border have memory, on both sides, and keep their bytes. Method: fill all of them at each step."""
    for number, step in enumerate(moving.steps):
        for layer, rows in enumerate(moving.kv()):
            rows[: (step.device_pages + 1) * SHAPE.page_bytes].fill_(layer + 1)
        for leader, keys in enumerate(moving.index()):
            keys[: (step.logical_pages + 1) * SHAPE.index_page_bytes].fill_(leader + 101)
        if number + 1 < len(moving.steps):
            run(moving, number, number + 1)
        for layer, rows in enumerate(moving.kv()):
            after = moving.steps[min(number + 1, len(moving.steps) - 1)].device_pages
            assert (rows[: (after + 1) * SHAPE.page_bytes] == layer + 1).all()
        for leader, keys in enumerate(moving.index()):
            assert (keys[: (step.logical_pages + 1) * SHAPE.index_page_bytes] == leader + 101).all()
    assert moving.steps[-1].logical_pages == 59


def test_new_index_keys_are_zero(moving: ElasticMemory) -> None:
    """Goal: old KV is never read as index-K. Method: KV full of ones; the keys behind the border after each step."""
    for rows in moving.kv():
        rows.fill_(255)
    for number, (before, after) in enumerate(zip(moving.steps, moving.steps[1:], strict=False)):
        run(moving, number, number + 1)
        begin, end = ((step.logical_pages + 1) * SHAPE.index_page_bytes for step in (before, after))
        assert all(not keys[begin:end].any() for keys in moving.index())


def test_no_memory_appears_or_gets_lost(moving: ElasticMemory) -> None:
    """Goal: physical memory is what it was at start, at every step. Method: count handles and mapped places."""
    twin, at_start = moving._memory, moving._memory.num_handles
    mapped = sum(held.num_mapped for held in (*moving._kv, *moving._index))
    for number in range(len(moving.steps) - 1):
        run(moving, number, number + 1)
        assert twin.num_handles == at_start
        assert sum(held.num_mapped for held in (*moving._kv, *moving._index)) + len(moving._spare) == mapped
    assert len(moving._spare) == 3 * 6 - 4 * 4 == 2


def test_the_way_back_and_the_way_again(moving: ElasticMemory) -> None:
    """Goal: from any place all memory comes back to KV, empty, and what stays keeps its bytes. Method: each place in turn; old index-K
    and KV full of ones."""
    twin, at_start, (first, *_) = moving._memory, moving._memory.num_handles, moving.steps
    for number, step in enumerate(moving.steps[1:], start=1):
        run(moving, 0, number)
        for tensor, pages, size in (
            *((rows, step.device_pages, SHAPE.page_bytes) for rows in moving.kv()),
            *((keys, step.logical_pages, SHAPE.index_page_bytes) for keys in moving.index()),
        ):
            tensor[: (pages + 1) * size].fill_(255)
        run(moving, number, 0)
        assert twin.num_handles == at_start and not moving._spare
        for rows in moving.kv():
            assert (rows[: (step.device_pages + 1) * SHAPE.page_bytes] == 255).all()
            whole = -(-(step.device_pages + 1) * SHAPE.page_bytes // CHUNK) * CHUNK
            assert rows.numel() == (first.device_pages + 1) * SHAPE.page_bytes and not rows[whole:].any()
        for keys in moving.index():
            assert (keys[: (first.logical_pages + 1) * SHAPE.index_page_bytes] == 255).all()


def test_several_steps_in_bounded_calls(moving: ElasticMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one iteration moves few chunks. Method: five driver calls a tick; count them; nothing is MOVED before the last."""
    monkeypatch.setattr(elastic, "CALLS_PER_TICK", 5)
    twin = moving._memory
    moving.begin(0, 2)
    seen = []
    while moving.progress() == Progress.VACATED:
        before = twin.num_maps + twin.num_unmaps
        moving.advance()
        seen.append(twin.num_maps + twin.num_unmaps - before)
    assert seen == [5] * 4 + [4] and sum(seen) == 2 * 6 + 3 * 4


def test_a_move_waits_for_the_stream(moving: ElasticMemory) -> None:
    """Goal: BEGUN until the forward stream has passed the plan. Method: an answer of no, then yes."""
    moving.has_vacated = lambda: False
    moving.begin(0, 1)
    assert moving.progress() == Progress.BEGUN
    moving.has_vacated = lambda: True
    assert moving.progress() == Progress.VACATED


def test_a_refusal_stops_the_border_for_good(moving: ElasticMemory, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a driver that refuses costs one move and is said once. Method: refuse to map; no handle is lost."""
    twin, handles = moving._memory, moving._memory.num_handles

    def refuse(*arguments: int) -> None:
        raise HiSparseError("no more")

    original, twin.map = twin.map, refuse
    moving.begin(0, 1)
    for _ in range(3):
        moving.advance()
    twin.map = original
    moving.advance()
    assert moving.progress() == Progress.VACATED and twin.num_handles == handles
    assert [record.message for record in caplog.records if "stays where it is" in record.message] == [
        "HiSparse: the border between KV and index-K stays where it is from now on: no more"
    ]


def test_a_pool_that_cannot_reach_its_end_is_refused() -> None:
    """Goal: logical pages that could never have memory are no capacity. Method: more of them than all KV could back."""
    wide = ElasticShape(19, 1000, 30 * 1024, 10 * 1024, 6, 4)
    with pytest.raises(ConfigError, match=r"holds index-K of \d+ pages, not of 1000"):
        ElasticMemory(HostTwin(CHUNK), wide)


def test_refused_memory_is_given_back() -> None:
    """Goal: a failed start leaves nothing. Method: the twin runs out after some ranges."""
    twin, made = HostTwin(CHUNK), []
    create = twin.create

    def limited(num_bytes: int) -> int:
        if len(made) == 9:
            raise HiSparseError("out of memory")
        made.append(num_bytes)
        return create(num_bytes)

    twin.create = limited  # type: ignore[method-assign]
    with pytest.raises(HiSparseError, match="out of memory"):
        ElasticMemory(twin, SHAPE)
    assert twin.num_handles == 0
