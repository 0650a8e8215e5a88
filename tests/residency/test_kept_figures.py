"""Goal: figures that are kept between two steps cost nothing while nothing moves, and are never older than the last move.

Method: decode steps that only fill pages, with the looks at all pages counted; changes whose note is suppressed, which the check
of invariants must name. test_stateful.py holds kept figures against fresh ones after every call of random sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import ResidencyPolicy, SpillPolicy
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.page_book import PageBook


def mixed_stage() -> Stage:
    """Slot 1 of eight pages holds a lease and has three of them on the host; slot 2 has three, all resident; two device pages are
    free, too few for slot 1. Slot 3 is about to be prefilled."""
    policy = ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=1)
    stage = Stage(device=12, logical=40, policy=policy)
    pages = stage.extend(1, 8)
    stage.coordinator.on_completed(stage.mirror_all())
    assert stage.coordinator.acquire_lease(1)
    stage.coordinator.spill(pages[:3])
    stage.extend(2, 3)
    stage.coordinator.attach(3, [], prompt_pages=9, final_pages=1)
    return stage


class CountingPolicy(SpillPolicy):
    """Counts its looks at every page."""

    looks = 0

    def _is_unused(self) -> np.ndarray:
        self.looks += 1
        return super()._is_unused()


def test_steps_that_only_fill_pages_look_at_nothing() -> None:
    """Goal: the cost of a decode step does not grow with the pool. Method: forty steps of one request whose neighbour waits for
    room to come back; a look for the first step, none for those that fill pages, one more after a move."""
    stage = mixed_stage()
    policy = CountingPolicy(stage.coordinator)
    policy.tick()
    assert policy.looks == 1
    stage.book.final_pages[2] = 20  # as estimated when it was attached
    moves = stage.book.moves
    for rows in range(1, 41):
        if rows % stage.limits.page_size == 1 and rows < 9:
            stage.grow(2, 1)
        stage.coordinator.check_step([1, 2])
        stage.coordinator.note_launch([1, 2], [32, 12 + min(rows, 8)], [True, True])
        stage.coordinator.on_completed(stage.mirror_all())
        policy.tick()
    assert policy.looks == 1 and stage.book.moves == moves, "nothing has moved"
    assert stage.book.num_pages[2] == 5 and len(stage.sent) > 9, "pages were filled and copied all the while"
    stage.finish(2)
    policy.tick()
    assert policy.looks > 1 and stage.book.host_pages(1) == 2, "there is room: a page comes back"


CHANGES: dict[str, Callable[[Stage], object]] = {
    "spill": lambda stage: stage.coordinator.spill(stage.row(1)[3:5]),
    "promote": lambda stage: stage.coordinator.promote(stage.row(1)[:1]),
    "unmap": lambda stage: stage.coordinator.unmap(1, 0, 2),
    "replace": lambda stage: stage.coordinator.replace(1, 0, [stage.row(2)[0]]),
    "lease": lambda stage: stage.coordinator.acquire_lease(2),
    "end": lambda stage: stage.finish(2),
    "growth": lambda stage: stage.grow(2, 1),
    "prefilled": lambda stage: stage.launch(3, 0),
}


def keep_figures(stage: Stage) -> None:
    stage.book.host_counts(np.arange(stage.limits.num_slots))
    stage.book.committed_pages()


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noted(change: str) -> None:
    """Goal: no figure is older than the last move. Method: every kind of change by itself, between two looks."""
    stage = mixed_stage()
    keep_figures(stage)
    CHANGES[change](stage)
    check_kept(stage)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_without_a_note_is_caught(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the check would find a forgotten note. Method: the same changes, whose notes are lost."""
    stage = mixed_stage()
    keep_figures(stage)
    now = stage.book.moves
    monkeypatch.setattr(PageBook, "moves", property(lambda book: now, lambda book, value: None), raising=False)
    CHANGES[change](stage)
    with pytest.raises(InvariantError, match="without a move|committed pages are not"):
        check_kept(stage)


def waiting_stage(**changes: object) -> tuple[Stage, list[int]]:
    """Slot 1 could come back if the three cached pages, which nobody uses, may leave for it."""
    policy = ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=1)
    stage = Stage(device=12, logical=40, policy=policy, **changes)
    pages = stage.extend(1, 8)
    copies = stage.mirror_all()
    stage.coordinator.on_enqueued(copies)
    stage.coordinator.on_completed(copies)
    assert stage.coordinator.acquire_lease(1)
    stage.coordinator.spill(pages[:3])
    return stage, stage.cache(2, 3)


def test_a_cached_page_that_can_leave_makes_room() -> None:
    """Goal: the policy hears of it. Method: copies that are acknowledged later, ticks before and after."""
    stage, _ = waiting_stage(auto_ack=False)
    stage.policy.tick()
    stage.policy.tick()
    assert stage.book.host_pages(1) == 3
    stage.coordinator.on_enqueued([transfer.transfer_id for transfer in stage.sent[-3:]])
    stage.policy.tick()
    assert stage.book.host_pages(1) == 2


def test_a_cached_page_that_is_let_go_makes_room() -> None:
    """Goal: the policy hears of it. Method: pages held as the prefix of a batch, then given up."""
    stage, cached = waiting_stage()
    stage.book.hold(cached, +1)
    stage.policy.tick()
    assert stage.book.host_pages(1) == 3
    stage.book.hold(cached, -1)
    stage.policy.tick()
    assert stage.book.host_pages(1) == 2


def check_kept(stage: Stage) -> None:
    """The part of the check that concerns kept figures; some changes above are only half of a transaction."""
    from sglang_hisparse.residency import invariants

    invariants._check_kept_figures(stage.book)


def test_kept_figures_are_part_of_the_check() -> None:
    """Goal: the simulator and an idle server look at them too. Method: a kept count that is wrong, through the public check."""
    stage = mixed_stage()
    stage.book.host_counts(np.array([1]))
    check(stage.coordinator)
    stage.book._host_counts[1] += 1
    with pytest.raises(InvariantError, match="R19.*without a move"):
        check(stage.coordinator)
