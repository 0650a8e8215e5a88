"""Goal: the protocol bugs that others had, and the traps of running inside SGLang, do not happen here.

Method: one scripted scene each on a coordinator and the modelled GPU, with the order of the two streams written out.
Each test names the bug of the public record, or the trap (by its number in the integration review), that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from residency.stage import Stage

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import PageState, Residency
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.types import PageTransfer
from sim.gpu_model import ForwardItem, GpuModel, Violation

P = 4  # page size of every scene


class Scene(Stage):
    """A Stage whose copies and plans reach a modelled GPU; nothing runs there before `forward()` or `copy()`."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.gpu = GpuModel(self.limits)
        self.tokens: dict[int, list[int]] = {}
        self.coordinator._mirror_sink = self._send

    def _send(self, transfers: list[PageTransfer]) -> list[int]:
        for transfer in transfers:
            self.gpu.enqueue(transfer)
        return self._sink(transfers)

    def run(
        self, slot: int, start: int, end: int, *, tokens: int, reads: Sequence[int] = (), ends: bool = True
    ) -> None:
        """Launch a forward that writes positions [start, end) with tokens `tokens + position`; it does not run yet."""
        content = [tokens + position for position in range(200)]
        is_prefill = bool(self.book.prefilling[slot])
        self.gpu.apply(self.coordinator.take_plan())
        self.coordinator.check_step([slot])
        self.gpu.launch([ForwardItem(slot, content, tuple(self.row(slot)), start, end, tuple(reads), is_prefill)])
        self.coordinator.note_launch([slot], [end], [ends])

    def prefill(self, slot: int, num_pages: int, *, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        """A request of whole pages, launched, not run; reads all that it has."""
        pages = self.extend(slot, num_pages, prefix=prefix, launch=False)
        self.run(slot, len(prefix) * P, num_pages * P, tokens=tokens, reads=range(num_pages * P))
        return pages

    def forward(self) -> None:
        self.gpu.run_until(self.gpu.launched)

    def copy(self) -> bool:
        return self.gpu._step_copy()

    def spill_tail_excepted(self, slot: int) -> list[int]:
        """The slot goes mixed: everything beyond its tail leaves."""
        self.mirror_all()
        assert self.coordinator.acquire_lease(slot)
        pages = self.row(slot)[: -self.limits.tail_pages]
        self.coordinator.spill(pages)
        return pages


# -- the public record -------------------------------------------------------------------------------------------------


def test_page_without_host_copy_never_becomes_host_only() -> None:
    """vllm#56158: decode pages were never copied, and later fetched. Method: drop the mirror step; nothing may
    spill."""
    scene = Scene(device=8, auto_ack=False)
    scene._send = None  # type: ignore[assignment,method-assign]
    scene.coordinator._mirror_sink = lambda transfers: []
    scene.prefill(1, 8, tokens=1_000)
    assert not scene.policy.make_room(1)
    assert scene.coordinator.counters.pages_spilled == 0
    with pytest.raises(InvariantError, match="I1"):
        scene.coordinator.spill(scene.row(1)[:1])


@pytest.mark.parametrize("steps", range(1, 10))
def test_retraction_keeps_what_was_written(steps: int) -> None:
    """sglang#40729: retraction dropped state before it was saved. Method: retract after each step, resume, compare
    rows."""
    scene = Scene(device=12)
    scene.prefill(1, 3, tokens=1_000)
    length = 3 * P
    for _ in range(steps):
        if length == len(scene.row(1)) * P:
            scene.grow(1, 1)
        scene.run(1, length, length + 1, tokens=1_000, reads=[0, length])
        length += 1
    scene.policy.tick()
    scene.spill_tail_excepted(1)
    kept = scene.row(1)[: length // P]
    scene.finish(1, keep=len(kept))
    check(scene.coordinator)
    assert scene.coordinator.hot_lease == {} and len(kept) == length // P
    scene.book.hold(kept, +1)
    assert scene.coordinator.promote([page for page in kept if scene.book.is_host_only(page)])
    scene.book.hold(kept, -1)
    scene.prefill(2, len(kept) + 1, tokens=1_000, prefix=kept)
    scene.forward()


def test_late_write_of_a_previous_owner_never_reaches_a_reader() -> None:
    """sglang#35049: pages were reused while the old write was under way. Method: abort under a copy, reuse ids and
    device pages last in first out, run the old copy late."""
    scene = Scene(device=8)
    old = scene.prefill(1, 1, tokens=1_000)
    scene.forward()
    scene.mirror_all()
    scene.finish(1)
    assert not scene.coordinator.is_landing_target(old[0])
    new = scene.prefill(2, 1, tokens=2_000)
    assert new == old
    scene.forward()
    scene.mirror_all()
    scene.finish(2, keep=1)
    scene.coordinator.spill(new)
    scene.coordinator.promote(new)
    scene.extend(3, 2, prefix=new, launch=False)
    scene.run(3, P, 2 * P, tokens=2_000, reads=range(P))
    scene.forward()
    while scene.copy():
        pass
    scene.coordinator.on_completed([transfer.transfer_id for transfer in scene.sent])
    assert scene.coordinator.is_landing_target(new[0])
    check(scene.coordinator)


def test_decode_without_hot_state_is_refused() -> None:
    """sglang#27258: a path skipped admission and read without hot state. Method: end a lease that is needed; no
    forward."""
    scene = Scene()
    scene.prefill(1, 5, tokens=1_000)
    scene.spill_tail_excepted(1)
    scene.coordinator.release_lease(1)
    with pytest.raises(InvariantError, match="R19"):
        scene.coordinator.check_step([1])
    scene.grow(1, 1)
    scene.gpu.apply(scene.coordinator.take_plan())
    scene.gpu.launch([ForwardItem(1, list(range(1_000, 1_200)), tuple(scene.row(1)), 5 * P, 5 * P + 1, (0,), False)])
    with pytest.raises(Violation, match="R19"):
        scene.gpu.drain()


def test_host_and_device_pages_are_told_apart() -> None:
    """sglang#31482: host page numbers were used on the device. Method: reverse the device's free list, so that no
    number means the same page on both sides; spill, fetch, promote and compare."""
    scene = Scene(device=12, logical=24)
    scene.pages._free.reverse()
    pages = scene.prefill(1, 6, tokens=1_000)
    assert all(scene.book.device_page[page] != page for page in pages)
    scene.spill_tail_excepted(1)
    scene.grow(1, 1)
    scene.run(1, 6 * P, 6 * P + 1, tokens=1_000, reads=[0, 5, 9])
    scene.run(1, 6 * P + 1, 6 * P + 2, tokens=1_000, reads=[0, 5, 14])
    scene.forward()
    assert scene.gpu.num_reads["host"] == 4 and scene.gpu.num_reads["hot"] == 2
    assert scene.coordinator.promote(pages[:2])
    scene.run(1, 6 * P + 2, 6 * P + 3, tokens=1_000, reads=[0, 5, 14])
    scene.forward()
    check(scene.coordinator)


# -- traps of the review -----------------------------------------------------------------------------------------------


def test_a_launched_forward_keeps_its_table() -> None:
    """Trap 2: free, dedup and finish write under a running step. Method: launch, then finish and reuse; only then
    run."""
    scene = Scene(device=8)
    scene.prefill(1, 3, tokens=1_000)
    scene.grow(1, 1)
    scene.run(1, 3 * P, 3 * P + 1, tokens=1_000, reads=range(3 * P))
    scene.finish(1)
    other = scene.extend(2, 4, launch=False)
    scene.run(2, 0, 4 * P, tokens=2_000, reads=range(4 * P))
    scene.forward()
    assert len(other) == 4
    check(scene.coordinator)


def test_the_next_writer_waits_for_the_copy() -> None:
    """Trap 3: release at enqueue forgets who comes next. Method: release a page under its copy, give it away, and try
    to run the new writer before the copy."""
    scene = Scene(device=4)
    cached = scene.prefill(1, 2, tokens=1_000)
    scene.forward()
    scene.finish(1, keep=2)
    assert scene.policy.make_room(4)
    pages = scene.extend(2, 4, launch=False)
    scene.run(2, 0, 4 * P, tokens=2_000, reads=range(4 * P))
    assert not scene.gpu._step_forward(), "the wait comes first"
    scene.forward()
    assert scene.gpu.host[cached[0] * P] == 1_000
    scene.mirror_all()
    scene.finish(2, keep=4)
    scene.coordinator.spill(pages[:2])
    assert scene.coordinator.promote(cached)
    scene.extend(3, 2, prefix=cached, launch=False)
    scene.run(3, 2 * P, 2 * P, tokens=1_000, reads=range(2 * P))
    scene.forward()


def test_kept_pages_of_a_retracted_request_can_leave_at_once() -> None:
    """Trap 4: what retraction keeps stayed resident, so that nothing was gained. Method: retract on a full device,
    make room."""
    scene = Scene(device=6)
    pages = scene.prefill(1, 6, tokens=1_000)
    assert not scene.policy.make_room(3)
    scene.finish(1, keep=6)
    assert scene.policy.make_room(6)
    assert scene.states(pages) == [PageState.HOST] * 6


def test_committed_is_not_written() -> None:
    """Trap 6: `kv_committed_len` runs one step ahead. Method: a page whose last row is only announced is not copied;
    once its forward is launched, the copy waits for it, whichever stream is asked first."""
    scene = Scene()
    scene.prefill(1, 1, tokens=1_000)
    scene.grow(1, 1)
    scene.run(1, P, 2 * P - 1, tokens=1_000)
    assert scene.row(1)[1] not in scene.coordinator.mirror_backlog(9), "one row is missing"
    scene.run(1, 2 * P - 1, 2 * P, tokens=1_000)
    scene.mirror_all()
    assert not scene.copy(), "the copy waits for the forward that writes the last row"
    scene.forward()
    while scene.copy():
        pass
    page = scene.row(1)[1]
    assert scene.gpu.host[page * P : page * P + P] == [1_000 + position for position in range(P, 2 * P)]


def test_a_page_finished_in_flight_stays_whole_in_the_cache() -> None:
    """Trap 6: the tree is given a row that the extra step still writes. Method: finish under the extra step; another
    request reads the cached page, after a spill and a promotion."""
    scene = Scene(device=8)
    scene.prefill(1, 1, tokens=1_000)
    scene.grow(1, 1)
    scene.run(1, P, 2 * P - 1, tokens=1_000)
    scene.run(1, 2 * P - 1, 2 * P, tokens=1_000)
    pages = scene.row(1)
    scene.finish(1, keep=2)
    scene.mirror_all()
    scene.coordinator.spill(pages)
    scene.coordinator.promote(pages)
    scene.extend(2, 3, prefix=pages, launch=False)
    scene.run(2, 2 * P, 3 * P, tokens=1_000, reads=range(3 * P))
    scene.forward()


def test_prefixes_of_a_batch_stay_while_room_is_made() -> None:
    """Trap 7: making room for one request spilled the prefix of another. Method: hold both prefixes, ask for too
    much."""
    scene = Scene(device=6)
    first = scene.prefill(1, 2, tokens=1_000)
    scene.finish(1, keep=2)
    second = scene.prefill(2, 2, tokens=2_000)
    scene.finish(2, keep=2)
    scene.book.hold(first + second, +1)
    assert not scene.policy.make_room(4)
    assert PageState.HOST not in scene.states(first + second)
    scene.book.hold(first + second, -1)
    assert scene.policy.make_room(4)
    check(scene.coordinator)


def test_full_request_is_not_stripped_by_its_neighbour() -> None:
    """Trap 8a: spilling a shared page for one user leaves the other with host-only rows and no lease. Method:
    pressure on two users of one prefix; both decode afterwards."""
    scene = Scene(device=12, slots=4)
    prefix = scene.prefill(3, 6, tokens=1_000)
    scene.finish(3, keep=6)
    scene.prefill(1, 9, tokens=1_000, prefix=prefix)
    scene.prefill(2, 9, tokens=1_000, prefix=prefix)
    assert scene.policy.make_room(2)
    for slot in (1, 2):
        scene.grow(slot, 1)
        scene.run(slot, 9 * P, 9 * P + 1, tokens=1_000, reads=[0, 9, 30])
    scene.forward()
    assert scene.gpu.num_reads["host"] >= 2
    check(scene.coordinator)


def test_dedup_against_a_host_only_page() -> None:
    """Trap 8b: after dedup the request reads a host-only page as data. Method: two equal prompts; the first is cached
    and spilled while the second is in its next chunk."""
    scene = Scene(device=8)
    tree = scene.prefill(1, 2, tokens=1_000)
    pages = scene.extend(2, 2, launch=False)
    scene.run(2, 0, 2 * P, tokens=1_000, ends=False)
    scene.finish(1, keep=2)
    assert scene.policy.make_room(6)
    assert scene.states(tree) == [PageState.HOST] * 2
    scene.coordinator.free(scene.coordinator.replace(2, 0, tree))
    scene.grow(2, 1)
    scene.run(2, 2 * P, 3 * P, tokens=1_000, reads=range(3 * P))
    scene.forward()
    assert scene.coordinator.residency(2) is Residency.FULL and scene.row(2)[:2] == tree != pages
    check(scene.coordinator)


def test_a_slot_comes_back_clean() -> None:
    """Trap 16: slots are reused at once, by whoever comes. Method: release twice under the extra step, next request
    in the same slot with the same pages and no lease."""
    scene = Scene(device=10)
    scene.prefill(1, 5, tokens=1_000)
    scene.spill_tail_excepted(1)
    scene.grow(1, 1)
    scene.run(1, 5 * P, 5 * P + 1, tokens=1_000, reads=[0, 4])
    scene.finish(1)
    scene.coordinator.release(1)
    assert scene.coordinator.hot_lease == {} and scene.pages.num_free == 10 and scene.book.num_free == 24
    scene.prefill(1, 6, tokens=2_000)
    scene.grow(1, 1)
    scene.run(1, 6 * P, 6 * P + 1, tokens=2_000, reads=[0, 4, 20])
    scene.forward()
    check(scene.coordinator)


def test_flush_under_copies() -> None:
    """Trap 17: a flush while copies are under way. Method: not idle before, drained, then old acknowledgements
    arrive."""
    scene = Scene(device=8)
    scene.prefill(1, 4, tokens=1_000)
    ids = scene.mirror_all()
    assert scene.coordinator.has_transfers, "not idle: a host copy is under way"
    scene.finish(1, keep=4)
    scene.gpu.drain()
    scene.coordinator.clear()
    scene.gpu.forget_all()
    pages = scene.prefill(1, 4, tokens=2_000)
    scene.coordinator.on_completed(ids)
    scene.coordinator.on_enqueued(ids)
    assert scene.states(pages) == [PageState.DIRTY] * 4 and scene.coordinator.counters.stale_acknowledgements == 8
    scene.forward()
    check(scene.coordinator)
