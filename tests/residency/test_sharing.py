"""Goal: the ledger charges shared pages once, never less than they need, and finds the cheapest choice of who is kept.

Method: forests of prefixes at random against all choices, one by one, whose pages are united by Python's sets; single cases by hand.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import BorderStep, ResidencyPolicy, sharing
from sglang_hisparse.residency.invariants import check
from sglang_hisparse.residency.sharing import Candidate, SharingPass, fits, least_committed_pages

HOT, TAIL = 3, 2
SMALLEST = HOT + TAIL + 1


@dataclass(slots=True)
class World:
    """Requests of a book whose prefixes are paths of one forest. `pages` and `growth` of each slot, by hand."""

    stage: Stage
    rng: random.Random

    @classmethod
    def draw(cls, seed: int) -> World:
        rng = random.Random(seed)
        world = cls(Stage(device=400, logical=900, slots=8, hot=HOT, page_size=4), rng)
        for slot in range(1, rng.randint(0, 5) + 1):
            world.add(slot)
        return world

    def prefix(self) -> list[int]:
        """Of sealed pages that a request has which is there."""
        book = self.stage.book
        live = np.flatnonzero(book.live).tolist()
        if not live or self.rng.random() < 0.2:
            return []
        slot = self.rng.choice(live)
        return self.stage.row(slot)[: self.rng.randint(0, int(book.sealed[slot]))]

    def add(self, slot: int) -> None:
        stage, rng, prefix = self.stage, self.rng, self.prefix()
        own = rng.randint(1, 8)
        prompt, final = len(prefix) + own, len(prefix) + own + rng.choice((0, 1, 5))
        bounded = rng.random() < 0.85
        form = {"bounded": bounded, "kept": bounded and rng.random() < 0.5}
        stage.coordinator.attach(slot, prefix, prompt_pages=prompt, final_pages=final, **form)
        stage.grow(slot, rng.randint(1, own))
        if rng.random() < 0.7 and (left := prompt - len(stage.row(slot))) >= 0:
            stage.grow(slot, left)
            stage.launch(slot, prompt)
            if rng.random() < 0.2:
                assert stage.coordinator.acquire_lease(slot)

    def charge(self, kept: set[int], candidates: list[Candidate]) -> int:
        """The sum, from nothing but the tables."""
        book, pages, total = self.stage.book, set(), 0
        for slot in np.flatnonzero(book.live).tolist():
            row = self.stage.row(slot)
            prefills, final = bool(book.prefilling[slot]), max(int(book.final_pages[slot]), len(row))
            if slot in kept:
                pages |= set(row)
                total += max(final, int(book.prompt_pages[slot]) + 1 if prefills else 0) - len(row)
                continue
            decoding = SMALLEST if book.leased[slot] else min(final, SMALLEST)
            total += max(decoding, int(book.prompt_pages[slot]) + 1) if prefills else decoding
        for one in candidates:
            pages |= set(one.prefix.tolist()) if one.kept else set()
            total += one.need - len(one.prefix) if one.kept else one.other
        return total + len(pages)

    def least(self, candidates: list[Candidate]) -> int:
        """Of all choices."""
        book = self.stage.book
        slots = [slot for slot in np.flatnonzero(book.live).tolist() if book.bounded[slot] and not book.leased[slot]]
        free, found = [one for one in candidates if one.is_free], []
        for choice in itertools.product((False, True), repeat=len(slots) + len(free)):
            for one, kept in zip(free, choice[len(slots) :], strict=True):
                one.kept = kept
            found.append(self.charge({slot for slot, kept in zip(slots, choice, strict=False) if kept}, candidates))
        return min(found)

    def candidate(self) -> Candidate:
        prefix, rng = np.asarray(self.prefix(), dtype=np.int64), self.rng
        prompt = len(prefix) + rng.randint(1, 8)
        need = max(prompt + 1, prompt + rng.choice((0, 1, 5)))
        return Candidate(prefix, need, max(prompt + 1, min(need, SMALLEST)), is_free=rng.random() < 0.85)

    def kept(self) -> set[int]:
        return set(np.flatnonzero(self.stage.book.kept).tolist())


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_the_sum_and_the_least_sum_are_those_of_all_choices(start: int) -> None:
    """Goal: what is charged is the union of what is kept, and no choice is cheaper than the one that is found. Method: brute force,
    with candidates beside the requests; a limit that just fits, and one page less."""
    differs = 0
    for seed in range(start, start + 100):
        world = World.draw(seed)
        book = world.stage.book
        assert book.committed_pages() == world.charge(world.kept(), [])
        least = world.least([])
        assert least_committed_pages(book) == least, seed
        differs += least < book.committed_pages()
        one_pass, taken = SharingPass(book), []
        for _ in range(world.rng.randint(1, 3)):
            one, before = world.candidate(), (world.kept(), [other.kept for other in taken])
            least = world.least([*taken, one])
            for other, kept in zip(taken, before[1], strict=True):
                other.kept = kept
            one.kept = False
            assert not one_pass.make_fit(one, least - 1), seed
            assert (world.kept(), [other.kept for other in taken]) == before, "a refusal changes nothing"
            assert one_pass.make_fit(one, least), seed
            one_pass.take(one)
            taken.append(one)
            assert one_pass.charged_pages() == world.charge(world.kept(), taken) == least
            check(world.stage.coordinator)
    assert differs > 8


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_candidates_see_what_those_before_them_have_paid(start: int) -> None:
    """Goal: the price of a kept candidate is what the union grows by. Method: passes of several, each kept or not at random."""
    cheaper = 0
    for seed in range(start, start + 100):
        world = World.draw(seed)
        one_pass, taken = SharingPass(world.stage.book), []
        for _ in range(5):
            one, before = world.candidate(), world.charge(world.kept(), taken)
            price = one_pass.price(one.prefix, one.need)
            one.kept = one.is_free and world.rng.random() < 0.7
            one_pass.take(one)
            taken.append(one)
            paid = price if one.kept else one.other
            assert world.charge(world.kept(), taken) - before == paid == one_pass.charged_pages() - before, seed
            cheaper += paid < one.need - 2
    assert cheaper > 20


def family(stage: Stage, count: int, shared: int, own: int, *, kept: bool = True) -> None:
    """`count` decoding requests, slots from 1 on."""
    prefix: list[int] = []
    for slot in range(1, count + 1):
        prompt = shared + own
        stage.coordinator.attach(slot, prefix, prompt_pages=prompt, final_pages=prompt + 1, bounded=True, kept=kept)
        stage.grow(slot, prompt - len(prefix))
        stage.launch(slot, prompt)
        prefix = stage.row(1)[:shared]


def test_a_page_is_paid_for_as_long_as_somebody_keeps_it() -> None:
    """Goal: what a payer leaves behind is charged to those who share it. Method: the first of three ends, then the second takes a
    lease; the sum is that of the pages all the while."""
    stage = Stage(device=60, logical=90, hot=HOT)
    family(stage, 3, 10, 1)
    for slot in (2, 3):
        stage.book.set_kept(slot, True)
    stage.book.set_kept(1, True)
    assert stage.book.committed_pages() == 10 + 3 * 2
    stage.finish(1, keep=10)
    assert stage.book.committed_pages() == 10 + 2 * 2
    stage.coordinator.acquire_lease(2)
    assert stage.book.committed_pages() == 10 + 2 + SMALLEST and stage.book.kept.sum() == 1
    stage.finish(3, keep=10)
    assert stage.book.committed_pages() == SMALLEST and not stage.book.keepers.any()
    check(stage.coordinator)


def test_who_gains_by_a_lease_is_kept_no_longer() -> None:
    """Goal: a prompt without sharers is charged as before once it decodes. Method: alone, and beside one that shares it."""
    stage = Stage(device=60, logical=90, hot=HOT)
    family(stage, 1, 10, 1)
    assert not stage.book.kept.any() and stage.book.committed_pages() == SMALLEST
    stage = Stage(device=60, logical=90, hot=HOT)
    prefix = stage.cache(3, 10)
    for slot in (1, 2):
        stage.coordinator.attach(slot, prefix, prompt_pages=11, final_pages=12, bounded=True, kept=True)
        stage.grow(slot, 1)
    for slot in (1, 2):
        stage.launch(slot, 11)
    assert stage.book.kept[1] and stage.book.kept[2] and stage.book.committed_pages() == 14


def test_who_comes_back_to_a_family_is_kept_again() -> None:
    """Goal: the ledger shrinks by it; admission is asked again, for others may be kept now. Method: of three that share ten pages one has
    a lease, and is promoted; beside nobody who is kept its lease ends and no charge changes."""
    for kept in (True, False):
        policy = ResidencyPolicy(watermark_low=0.0, watermark_high=0.0, promote_pages_per_step=8)
        stage = Stage(device=60, logical=90, hot=HOT, policy=policy)
        family(stage, 3, 10, 1)
        stage.coordinator.on_completed(stage.mirror_all())
        for slot in (1, 2):
            stage.book.set_kept(slot, kept)
        assert stage.coordinator.acquire_lease(3)
        assert stage.book.committed_pages() == (14 if kept else 2 * SMALLEST) + SMALLEST
        assert stage.book.take_settled() and not stage.book.take_settled(), "three prefills have ended"
        stage.policy.tick()
        assert stage.book.take_settled(), "a lease has ended"
        assert not stage.coordinator.hot_lease and stage.book.kept[3] == kept
        assert stage.book.committed_pages() == (16 if kept else 3 * SMALLEST)
        check(stage.coordinator)


def test_a_kept_request_has_no_lease_and_an_end() -> None:
    """Goal: only what can be promised is. Method: a request with a lease, and one that may outgrow its estimate."""
    stage = Stage(device=60, logical=90, hot=HOT)
    stage.extend(1, 4)
    with pytest.raises(InvariantError, match="I7"):
        stage.book.set_kept(1, True)
    stage.book.bounded[1] = True
    assert stage.coordinator.acquire_lease(1)
    with pytest.raises(InvariantError, match="I7"):
        stage.book.set_kept(1, True)


def test_rows_that_are_no_paths_are_not_charged_too_little() -> None:
    """Goal: the sum does not rest on the shape of prefixes. Method: rows that share pages behind different ones; whatever is chosen,
    the limit holds for the union."""
    rng, wrong = random.Random(1), 0
    for _ in range(300):
        stage = Stage(device=400, logical=900, slots=8, hot=HOT)
        pages = stage.cache(6, 12)
        for slot in range(1, 5):
            stage.coordinator.attach(slot, rng.sample(pages, 6), prompt_pages=7, final_pages=9, bounded=True, kept=True)
            stage.grow(slot, 1)
        before, limit = stage.book.kept.copy(), rng.randint(8, 40)
        if fits(stage.book, limit):
            assert stage.book.fresh_committed_pages() <= limit
        else:
            assert (stage.book.kept == before).all()
            wrong += least_committed_pages(stage.book) <= limit
    assert wrong > 3, "the last word has never been needed"


def test_pages_that_clusters_do_not_find_leave() -> None:
    """Goal: `make_room` reaches the ledger's sum whatever shape the rows have. Method: three rows, every two of which share two
    pages: no two of them gain by leases of one page, all three do."""
    stage = Stage(device=15, logical=40, slots=5, hot=1, tail=1)
    pages = stage.cache(4, 6)
    for slot, (first, second) in enumerate(((0, 2), (0, 4), (2, 4)), start=1):
        prefix = [*pages[first : first + 2], *pages[second : second + 2]]
        stage.coordinator.attach(slot, prefix, prompt_pages=5, final_pages=6)
        stage.grow(slot, 1)
        stage.launch(slot, 5)
    stage.mirror_all()
    assert stage.pages.num_free == 6 and stage.book.committed_pages() == 9
    assert not stage.policy._mix_best_request(7) and not stage.policy._mix_best_cluster(7)
    assert stage.policy.make_room(7) and len(stage.coordinator.hot_lease) == 3
    check(stage.coordinator)


def test_kept_pages_stay_where_leases_would_free_them() -> None:
    """Goal: no page leaves that a kept request relies on, nor is a lease given that is not charged. Method: a family whose sum fills
    the device; one page more is refused, and everybody is as before."""
    stage = Stage(device=18, logical=60, slots=6, hot=HOT)
    family(stage, 4, 10, 1)
    for slot in range(1, 5):
        stage.book.set_kept(slot, True)
    stage.mirror_all()
    assert stage.book.committed_pages() == 18 and stage.pages.num_free == 4
    assert stage.policy.make_room(4) and not stage.policy.make_room(5)
    assert not stage.coordinator.hot_lease and not (stage.book.host_counts(np.arange(6))).any()
    for slot in range(1, 5):
        stage.book.set_kept(slot, False)
    assert stage.policy.make_room(5) is False, "four leases cost more than the ten pages give"


def test_the_border_has_requests_kept_no_longer() -> None:
    """Goal: memory can move wherever leases would let it. Method: two that share twenty pages, kept; a place of the border at which
    only leases fit; a limit below everything changes nothing."""
    border = (BorderStep(40, 60), BorderStep(14, 90))
    stage = Stage(device=40, logical=90, hot=HOT, border=border)
    family(stage, 2, 20, 1)
    for slot in (1, 2):
        stage.book.set_kept(slot, True)
    assert stage.book.committed_pages() == 24 and least_committed_pages(stage.book) == 2 * SMALLEST
    assert not fits(stage.book, 11) and stage.book.kept.sum() == 2
    assert fits(stage.book, 14) and not stage.book.kept.any() and stage.book.committed_pages() == 12


def test_looks_are_kept_until_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: steps that only fill pages cost no look at all requests. Method: the search is counted; growth, then a move."""
    stage, looks = Stage(device=60, logical=90, hot=HOT), []
    family(stage, 3, 10, 1)
    search = sharing.cheapest
    monkeypatch.setattr(sharing, "cheapest", lambda *args: looks.append(1) or search(*args))
    for slot in (1, 2, 3):
        least_committed_pages(stage.book)
        stage.grow(slot, 1)
        stage.launch(slot, 12)
    assert len(looks) == 1
    stage.finish(3, keep=10)
    least_committed_pages(stage.book)
    assert len(looks) == 2
