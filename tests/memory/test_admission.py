"""Goal: a request that pushes pages off the GPU starts when that raises the throughput, on all ranks alike, and never starves.

Method: the rule as a pure function, the model on figures of known truth, two ranks, the budget and the books of a small world.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from admission_server import Clock, FakeLink
from hypothesis import given
from hypothesis import strategies as st
from runtime_world import PAGE, Sizes, World, make_world

from sglang_hisparse import admission_view
from sglang_hisparse.admission import (
    CAUTION,
    PATIENCE_ROUNDS,
    PRIOR_MISSES,
    QUIET_ROUNDS,
    ROUND_STEPS,
    STALE_ROUNDS,
    UNMEASURED_ROUNDS,
    AdmissionGate,
    Pool,
    StepFigures,
    StepModel,
    worth_admitting,
)
from sglang_hisparse.admission_view import gate_for, pool_of, share_of, time_link
from sglang_hisparse.kernels.row_counts import RowCounts
from sglang_hisparse.memory.budget import HiSparsePrefillBudget

POSITIVE = st.floats(1e-6, 10.0)


# ---- the rule --------------------------------------------------------------------------------------------------------


@given(num_running=st.integers(0, 500), step=POSITIVE, added=st.floats(0.0, 10.0))
def test_the_rule_is_the_throughput(num_running: int, step: float, added: float) -> None:
    """Goal: yes means more tokens per second, no means not. Method: both throughputs, away from equality."""
    before, after = num_running / step, (num_running + 1) / (step + added)
    if abs(after - before) > 1e-9 * after:
        assert worth_admitting(num_running, step, added) == (after > before)


@given(num_running=st.integers(0, 500), step=POSITIVE, added=POSITIVE, more=POSITIVE, margin=st.floats(0.0, 0.5))
def test_the_rule_is_monotone(num_running: int, step: float, added: float, more: float, margin: float) -> None:
    """Goal: dearer is never better, margins point the right way, nothing keeps out the first. Method: ordered pairs."""
    assert worth_admitting(0, step, added)
    assert worth_admitting(num_running, step, added) or not worth_admitting(num_running, step, added + more)
    assert worth_admitting(num_running, step, added, margin=margin) or not worth_admitting(num_running, step, added)
    assert not worth_admitting(num_running, step, added, margin=-margin) or worth_admitting(num_running, step, added)


# ---- the model -------------------------------------------------------------------------------------------------------


def pool(**changes: int) -> Pool:
    values = {"num_running": 12, "device_pages": 3000, "hot_pages": 64, "demand_pages": 3000, "host_pages": 0}
    return Pool(**{**values, **changes})


def test_the_model_finds_the_truth() -> None:
    """Goal: compute, slope and cost of a page are measured. Method: rounds of 8 to 40 requests with known costs."""
    link, base, slope, page_seconds = FakeLink(), 2.2e-3, 40e-6, 0.2e-6
    model, figures = StepModel(link), StepFigures()
    for step in range(60):
        running = 8 + 8 * (step % 5)
        now = pool(num_running=running, demand_pages=250 * running, host_pages=max(0, 250 * running - 2500))
        seconds = base + slope * running + page_seconds * now.host_pages
        for _ in range(8):
            model.note_spacing(seconds, running)
        for _ in range(ROUND_STEPS):
            link.step(page_seconds * now.host_pages * link.bytes_per_second)
        figures = model.end_round(now)
    assert figures.per_host_page == pytest.approx(page_seconds, rel=0.05)
    assert figures.per_request == pytest.approx(slope, rel=0.15)
    assert figures.step(20, 1000) == pytest.approx(base + 20 * slope + 1000 * page_seconds, rel=0.05)


def test_without_fetches_the_published_miss_rate_decides() -> None:
    """Goal: the first request that pushes pages out is judged too. Method: rounds in which nothing was on the host."""
    link = FakeLink()
    model = StepModel(link)
    for _ in range(5):
        for _ in range(8):
            model.note_spacing(2.6e-3, 12)
        figures = model.end_round(pool())
    assert figures.per_host_page * 250 == pytest.approx(link.request_bytes / link.bytes_per_second)
    assert 0 < figures.per_request < 2.6e-3 / 12


def test_few_spacings_are_no_measurement() -> None:
    """Goal: rounds full of prefills teach nothing about steps. Method: a round with three spacings."""
    model = StepModel(FakeLink())
    for _ in range(3):
        model.note_spacing(1.0, 5)
    assert not model.end_round(pool()).known


# ---- the gate --------------------------------------------------------------------------------------------------------


def gate_with(figures: StepFigures, now: Pool) -> AdmissionGate:
    """A gate whose figures are given, however many rounds pass."""
    gate = AdmissionGate(lambda: now, None, lambda _: (figures.compute, figures.requests, figures.per_request, figures.per_host_page), Clock())  # fmt: skip
    run_round(gate)
    return gate


def run_round(gate: AdmissionGate) -> None:
    for _ in range(ROUND_STEPS):
        gate.note_decode(12)
        gate.tick()


DEAR = StepFigures(compute=2.6e-3, requests=12.0, per_request=40e-6, per_host_page=10e-6)
CHEAP = StepFigures(compute=2.6e-3, requests=12.0, per_request=40e-6, per_host_page=0.1e-6)


def test_what_fits_and_what_is_alone_always_starts() -> None:
    """Goal: the gate only concerns requests that push pages out of others. Method: dear fetches, and both exceptions."""
    gate = gate_with(DEAR, pool(demand_pages=2700))
    assert gate.allows(gate.look(), 300) and not gate.allows(gate.look(), 301)
    assert gate.allows(pool(num_running=0, demand_pages=0), 5000)
    assert gate.allows(gate.look(), 150, promised_pages=150) and not gate.allows(gate.look(), 151, promised_pages=150)
    assert not gate.allows(pool(num_running=0, demand_pages=0), 2000, promised_pages=2000, promised_requests=1)


def test_before_anything_was_measured_one_waits_for_the_first_rounds() -> None:
    """Goal: no verdict without figures, and no wait without end for them. Method: a gate that is told nothing, round by round."""
    gate = AdmissionGate(lambda: pool(), None, lambda _: (0.0,) * 4, Clock())
    assert not gate.allows(gate.look(), 3000)
    for _ in range(UNMEASURED_ROUNDS):
        assert not gate.allows(gate.look(), 3000) and not gate.closed
        run_round(gate)
        assert gate.take_news()
    assert gate.allows(gate.look(), 3000) and not gate.closed
    assert gate_with(CHEAP, pool()).allows(pool(), 250), "measured in the first round"


def test_the_verdict_follows_the_cost() -> None:
    """Goal: dear fetches queue, cheap ones do not. Method: the same request under two figures."""
    assert not gate_with(DEAR, pool()).allows(pool(), 250)
    assert gate_with(CHEAP, pool()).allows(pool(), 250)


def test_the_gate_does_not_flutter(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: hysteresis, and one line for each change. Method: a cost inside the margin, before and after a refusal."""
    caplog.set_level(logging.INFO)
    border = StepFigures(2.4e-3, 12.0, 0.0, 2.4e-3 / 12 / (250 + 64))
    gate = gate_with(border, pool())
    assert gate.allows(gate.look(), 250) and not gate.closed
    assert not gate.allows(gate.look(), 320) and not gate.allows(gate.look(), 320) and gate.closed
    assert not gate.allows(gate.look(), 250), "inside the margin a closed gate stays closed"
    assert gate.allows(gate.look(), 200) and not gate.closed
    assert len(caplog.messages) == 2 and gate.waits == 3


def test_the_scheduler_asks_again_and_silence_opens() -> None:
    """Goal: a waiting request hears of new figures; a gate that nobody waits at opens. Method: rounds after a refusal."""
    gate = gate_with(DEAR, pool())
    assert not gate.take_news() and not gate.allows(gate.look(), 250)
    assert not gate.take_news()
    run_round(gate)
    assert gate.take_news() and not gate.take_news()
    for _ in range(QUIET_ROUNDS):
        assert gate.closed
        run_round(gate)
    assert not gate.closed


@pytest.mark.parametrize(
    ("new_pages", "host_pages", "patience"), [(250, 0, STALE_ROUNDS), (250, 900, None), (4000, 900, PATIENCE_ROUNDS)]
)
def test_patience_ends(new_pages: int, host_pages: int, patience: int | None) -> None:
    """Goal: nobody starves behind a stale estimate or a device too small for him. Method: many rounds of refusals."""
    gate = gate_with(DEAR, pool(host_pages=host_pages, demand_pages=3000 + host_pages))
    rounds = 0
    while not gate.allows(gate.look(), new_pages) and rounds < 4 * STALE_ROUNDS:
        run_round(gate)
        rounds += 1
    assert rounds == (4 * STALE_ROUNDS if patience is None else patience)
    if patience is not None:
        assert not gate.allows(gate.look(), new_pages), "one is let through, not all"


def test_figures_are_believed_so_far_only() -> None:
    """Goal: a few cheap pages do not open the gate for a flood. Method: cheap figures, a burst in one pass, round by round."""
    books = pool()
    # Worth it up to 48 requests, but not if a page cost CAUTION times as much.
    gate = gate_with(StepFigures(compute=2.6e-3, requests=12.0, per_request=40e-6, per_host_page=0.4e-6), books)
    running, admitted = 12, []
    while running < 48 and len(admitted) < 20:
        count, now = 0, gate.look()
        while gate.allows(now, 250, promised_pages=250 * count, promised_requests=count) and running + count < 48:
            count += 1
        running += count
        admitted.append(count)
        books = pool(num_running=running, demand_pages=250 * running, host_pages=250 * running - 3000)
        gate._pool = lambda books=books: books
        run_round(gate)
        run_round(gate)
    assert admitted[0] == 1 and admitted == sorted(admitted[:-1]) + admitted[-1:] and 4 <= len(admitted) <= 8, admitted
    assert not gate.closed, "a gate that waits for figures is not closed"


@pytest.mark.parametrize(
    ("per_host_page", "known", "started"),
    [(0.05e-6, 1.0, 40), (0.5e-6 / CAUTION, 1.0, 8), (0.4e-6, 1.0, 1), (0.02e-6, 0.0, 40), (0.5e-6 * PRIOR_MISSES, 0.0, 8), (0.17e-6, 0.0, 1)],
)  # fmt: skip
def test_what_is_worth_it_by_far_starts_at_once(per_host_page: float, known: float, started: int) -> None:
    """Goal: nobody waits for figures that would have to be very wrong. Method: a burst with little or nothing known of host-only
    pages, at costs of which two are worked out by hand: 12 + c requests times (40 us + 314 pages * 0.5 us) against 2,600 us +
    40 c + 250 c pages * 0.5 us, which is met from c = 8 on."""
    gate, count = gate_with(StepFigures(2.6e-3, 12.0, 40e-6, per_host_page), pool()), 0
    gate._pages_known = known
    while count < 40 and gate.allows(gate.look(), 250, promised_pages=250 * count, promised_requests=count):
        count += 1
    assert count == started and not gate.closed


# ---- ranks -----------------------------------------------------------------------------------------------------------


@dataclass
class Channel:
    """Rank 0 passes its figures in, rank 1 takes them out at the same step, or the test fails."""

    sent: list[Sequence[float]] = field(default_factory=list)

    def first(self, figures: Sequence[float] | None) -> Sequence[float]:
        assert figures is not None
        self.sent.append(figures)
        return figures

    def second(self, figures: Sequence[float] | None) -> Sequence[float]:
        assert figures is None and self.sent, "rank 1 took part in a round that rank 0 has not ended"
        return self.sent.pop(0)


def test_two_ranks_decide_alike_though_their_clocks_differ() -> None:
    """Goal: R30. Method: two gates, one with a model, clocks of their own; the same random calls; equal answers, in step."""
    import random

    draw, channel, books = random.Random(3), Channel(), pool()
    clocks = [Clock(), Clock()]
    link = FakeLink()
    gates = [
        AdmissionGate(lambda: books, StepModel(link), channel.first, clocks[0]),
        AdmissionGate(lambda: books, None, channel.second, clocks[1]),
    ]
    answers: list[list[bool]] = [[], []]
    for _ in range(40 * ROUND_STEPS):
        running, extends = draw.randint(8, 30), draw.random() < 0.05
        demand = 250 * running
        books = pool(num_running=running, demand_pages=demand, host_pages=max(0, demand - 2800))
        link.step(books.host_pages * draw.uniform(0.5, 4.0) * 50e3)
        for rank, gate in enumerate(gates):
            clocks[rank].now += draw.uniform(2e-3, 6e-3)
            if extends:
                gate.note_extend()
            else:
                gate.note_decode(running)
            gate.tick()
            answers[rank].append(gate.allows(gate.look(), 250))
            answers[rank].append(gate.take_news())
    assert answers[0] == answers[1] and gates[0].figures == gates[1].figures and gates[0].figures.known
    assert 100 < sum(answers[0]) < len(answers[0]) - 100, "one answer to everything proves nothing"
    assert not channel.sent


RANK = """
import sys, torch
from sglang_hisparse.admission_view import share_of
from sglang_hisparse.ranks import is_first
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
group = torch.distributed.new_group([0, 1], backend="gloo")
share, share_many = share_of(group), share_of(group, 300)
for round in range(3):
    many = share_many([i / (7 + round) for i in range(300)] if is_first(group) else None)
    assert many == [i / (7 + round) for i in range(300)]
    print(*share((0.1 + round, 2.0, 1 / 3, 1e-9) if is_first(group) else None), flush=True)
# Gloo's threads end the process with an error where the interpreter ends under them.
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_the_first_ranks_figures_reach_all_bit_by_bit(tmp_path: Path) -> None:
    """Goal: what ranks decide by is equal to the last bit. Method: two processes over gloo, three rounds of the gate's figures
    and of one for each of many slots."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed[0] == printed[1] and printed[0].split()[:4] == ["0.1", "2.0", repr(1 / 3), "1e-09"]
    assert len(printed[0].splitlines()) == 3


def test_a_group_of_one_needs_no_exchange() -> None:
    """Goal: a server on one GPU sends nothing. Method: the exchange of no group returns what it was given."""
    assert share_of(None)((1.0, 2.0, 3.0, 4.0)) == (1.0, 2.0, 3.0, 4.0)


# ---- the budget and the books ----------------------------------------------------------------------------------------


def dear_gate(world: World) -> AdmissionGate:
    """A gate of the world's own books to which every page beyond the device is too dear."""
    gate = AdmissionGate(lambda: pool_of(world.residency), None, lambda _: (1e-3, 1.0, 0.0, 1.0), Clock())
    run_round(gate)
    world.runtime.gate = gate
    return gate


def asked(budget: HiSparsePrefillBudget, tokens: int) -> bool:
    arguments: dict[str, Any] = {"extend_input_len": tokens, "max_new_tokens": 8, "chunk_limit": None}
    allowed = budget.check_prefill(total_tokens=tokens, input_tokens=tokens, swa_host_hit_length=0, **arguments)[0]
    assert budget.can_allocate_prefill(paged_input=tokens, **arguments) == allowed
    return allowed


def test_the_budget_asks_the_gate() -> None:
    """Goal: both forms of admission are gated, cached pages and shared prefixes are not charged. Method: 24 device pages."""
    with make_world(Sizes(device_pages=24)) as world:
        first = world.start(10 * PAGE, seed=1)
        world.finish(world.start(8 * PAGE, seed=2))
        gate = dear_gate(world)
        budget = world.allocator.create_prefill_budget(world.tree)
        room = 24 - pool_of(world.residency).demand_pages
        assert room in (13, 14), "the pages of the finished request are only cached"
        assert asked(budget, (room - 1) * PAGE) and gate.waits == 0
        assert not asked(budget, room * PAGE) and gate.waits == 2
        world.runtime.gate = None
        assert asked(world.allocator.create_prefill_budget(world.tree), room * PAGE)
        world.finish(first)


def test_admitted_requests_of_a_pass_count() -> None:
    """Goal: two that fit alone do not both fit. Method: one pass, the first is reserved before the second is asked about."""
    with make_world(Sizes(device_pages=24, hot_pages=2)) as world:
        first = world.start(4 * PAGE, seed=1)
        dear_gate(world)
        budget = world.allocator.create_prefill_budget(world.tree)
        assert asked(budget, 9 * PAGE)
        budget.reserve(9 * PAGE, 8)
        assert not asked(budget, 9 * PAGE) and asked(budget, 7 * PAGE)
        world.finish(first)


def test_a_prefix_in_use_is_not_charged_again() -> None:
    """Goal: sharing is seen. Method: a prompt whose prefix a running request holds, and one whose prefix is only cached."""
    with make_world(Sizes(device_pages=24)) as world:
        shared = world.start(10 * PAGE, seed=1)
        world.finish(world.start(10 * PAGE, seed=2))
        dear_gate(world)
        for seed, fits in ((1, True), (2, False)):
            budget = world.allocator.create_prefill_budget(world.tree)
            client = world.client(world.prompt(10 * PAGE, seed=seed) + world.prompt(6 * PAGE, seed=9))
            client.req.init_next_round_input(world.tree)
            lock = world.tree.lock(client.req.last_node)
            assert asked(budget, len(client.req.origin_input_ids) - client.req.prefix_len) == fits
            world.tree.unlock(lock)
        world.finish(shared)


def test_the_books_are_what_the_gate_sees() -> None:
    """Goal: demand counts used pages once, prompts still to come, and nothing cached. Method: a shared and a chunked one."""
    with make_world(Sizes(device_pages=24)) as world:
        first = world.start(6 * PAGE, seed=1)
        second = world.start(6 * PAGE, seed=1)
        chunked = world.client(world.prompt(8 * PAGE, seed=3))
        world.extend(chunked, tokens=2 * PAGE)
        world.publish(chunked)
        seen = pool_of(world.residency)
        used = len({*world.pages(first), *world.pages(second), *world.pages(chunked)})
        assert (seen.num_running, seen.demand_pages, seen.host_pages) == (3, used + 6, 0)
        assert (seen.device_pages, seen.hot_pages) == (24, 2)
        world.extend(chunked)
        world.publish(chunked)
        mixed = world.go_mixed(chunked)
        assert pool_of(world.residency).host_pages == len(mixed) // PAGE > 0
        for client in (first, second, chunked):
            world.finish(client)
        assert pool_of(world.residency).demand_pages == 0


def test_the_link_is_timed_without_a_trace() -> None:
    """Goal: the trial gives a speed and changes no row that matters. Method: time it on an empty world, look at the pad page."""
    with make_world() as world:
        assert time_link(world.runtime) > 1e6
        assert not world.pool.layer_rows(0)[:PAGE].any() and world.residency.device_pages.num_free == 24
        client = world.start(5 * PAGE)
        assert world.wrong_rows(client) == 0
        world.finish(client)


@pytest.mark.parametrize("word", ["latency", "throughput"])
def test_no_gate_where_none_is_wanted(word: str) -> None:
    """Goal: `latency` is today's behaviour, a CPU pool has no link. Method: gates of worlds on the CPU."""
    with make_world(admission=word) as world:
        assert gate_for(world.runtime) is None and world.runtime.gate is None
        elsewhere = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        if word == "latency":
            assert gate_for(SimpleNamespace(worker=elsewhere)) is None


def test_the_gate_ends_the_rounds_of_the_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a GPU server's book has the resolver's misses. Method: the gate of a pool that says it is a GPU's, planted counts,
    rounds with and without host-only pages."""
    with make_world(admission="throughput") as world:
        rows, steps, on_host = np.zeros((len(world.residency.book.lives), 5), dtype=np.int64), iter((32, 64, 96, 128)), [1]
        monkeypatch.setattr(admission_view, "time_link", lambda _: 1e9)
        monkeypatch.setattr(admission_view, "LinkProbe", lambda device, speed: SimpleNamespace(begin=lambda: None, bytes_per_second=lambda: speed))
        monkeypatch.setattr(admission_view, "pool_of", lambda _: pool(host_pages=on_host[0]))
        with monkeypatch.context() as patch:
            patch.setattr(world.runtime.worker, "device", SimpleNamespace(type="cuda"))
            gate = gate_for(world.runtime)
        assert gate is not None
        slot = world.start(5 * PAGE).slot

        def count() -> RowCounts:
            return RowCounts(step, rows.copy())

        monkeypatch.setattr(world.runtime.hot, "latest_counts", count)
        for step in steps:
            rows[slot] += (0, 0, 32, 0, 64)  # two layers in the group
            on_host[0] = step < 128
            run_round(gate)
            assert world.residency.book.misses[slot] == (2.0 if step == 96 else 0.0), step
