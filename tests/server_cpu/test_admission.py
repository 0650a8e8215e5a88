"""Goal: the admission gate queues and never starves, and nothing else changes. Method: SGLang's scheduler, dear and cheap fetches."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from dataclasses import astuple

from harness.checks import assert_outputs
from harness.engine import Engine
from harness.hisparse import PAGE, engine_for, finish, submit

from sglang_hisparse.admission import ROUND_STEPS, AdmissionGate, StepFigures
from sglang_hisparse.admission_view import pool_of

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
DEAR = StepFigures(compute=1e-3, requests=2.0, per_request=0.0, per_host_page=1.0)
CHEAP = StepFigures(compute=1e-3, requests=2.0, per_request=0.0, per_host_page=1e-9)
# Three of them fill the device; the fourth fits when the others can shrink, and then they must.
PROMPTS = [500, 620, 560, 600, 610, 520]


def plant_gate(engine: Engine, figures: StepFigures) -> AdmissionGate:
    """A gate that believes `figures` from the start and is told nothing else."""
    residency = engine.coordinator.residency
    gate = AdmissionGate(lambda: pool_of(residency), None, lambda _: astuple(figures), lambda: 0.0)
    gate.figures = figures
    engine.coordinator.gate = gate
    return gate


def run(engine: Engine) -> int:
    """Run to the end; returns the most requests that held pages at once."""
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, int(engine.coordinator.residency.book.live.sum()))
    engine.run_until_idle()
    return most


@LOOPS
def test_dear_fetches_queue_and_cheap_ones_do_not(overlap: bool) -> None:
    """Goal: the verdict reaches the scheduler. Method: six requests where three fit, under both figures."""
    seen = []
    for figures in (DEAR, CHEAP):
        with engine_for(overlap=overlap) as engine:
            gate = plant_gate(engine, figures)
            handles = submit(engine, PROMPTS, 45)
            most = run(engine)
            assert_outputs(handles)
            assert not any(handle.retractions for handle in handles)
            seen.append((most, engine.coordinator.residency.counters.leases_acquired, gate.waits > 0))
            finish(engine)
    (dear, dear_leases, dear_waits), (cheap, cheap_leases, _) = seen
    assert dear <= 3 < cheap and dear_leases == 0 < cheap_leases and dear_waits


@LOOPS
def test_cached_pages_do_not_close_the_gate(overlap: bool) -> None:
    """Goal: a device full of pages that nobody uses is empty. Method: dear fetches; waves of requests, one after the other."""
    with engine_for(overlap=overlap) as engine:
        gate = plant_gate(engine, DEAR)
        handles = []
        for seed in range(3):
            handles += submit(engine, [500, 620, 560], 5, seed=seed)
            run(engine)
        assert_outputs(handles)
        assert engine.coordinator.residency.counters.pages_spilled > 10 and gate.waits == 0
        finish(engine)


@LOOPS
def test_a_waiting_request_is_asked_about_again(overlap: bool) -> None:
    """Goal: new figures let a waiting request in while all others go on. Method: dear ones, then cheap ones, nobody ends."""
    with engine_for(overlap=overlap, context_length=4096) as engine:
        gate = plant_gate(engine, DEAR)
        handles = submit(engine, PROMPTS[:4], 40 + 5 * ROUND_STEPS)
        engine.run_until(lambda: gate.waits > 0)
        gate._share = lambda _: astuple(CHEAP)
        engine.run_until(lambda: engine.find(handles[3]).kv.holds_kv, max_steps=4 * ROUND_STEPS)
        assert not any(handle.finished for handle in handles)
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_the_longest_request_runs_behind_a_closed_gate(overlap: bool) -> None:
    """Goal: I8 holds with a gate. Method: dear fetches; a request of almost the whole device behind two short ones."""
    with engine_for(overlap=overlap) as engine:
        plant_gate(engine, DEAR)
        longest = min(engine.scheduler.max_req_input_len - 1, 29 * PAGE)
        handles = submit(engine, [300, 300], 30) + submit(engine, [longest], 8, seed=1) + submit(engine, [100], 8, seed=2)
        run(engine)
        assert_outputs(handles)
        finish(engine)
