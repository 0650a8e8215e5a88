"""Decode steps that are not looked at: they are those that change no page, and a scheduler decides nothing else for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from harness.engine import Engine
from harness.fake_model import WrongRowError
from harness.hisparse import engine_for, finish, submit

from sglang_hisparse.memory.decode_steps import DecodeSteps


def batch_of(lengths: list[int]) -> Any:
    """As SGLang's decode batch looks before its next tokens are allocated."""
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=length)) for length in lengths]
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int64)
    return SimpleNamespace(req_pool_indices_cpu=slots, seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64), reqs=reqs)


def one_step(steps: DecodeSteps, batch: Any) -> Any:
    """Allocate as SGLang does: lengths of the requests first, those of the batch after it."""
    steps.begin(batch)
    for req in batch.reqs:
        req.kv.kv_allocated_len += 1
    launch = steps.end(batch)
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    return launch


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), page=st.sampled_from([2, 4, 64]))
@settings(deadline=None)
def test_quiet_steps_are_those_that_change_no_page(lengths: list[int], page: int) -> None:
    """Goal: no step that begins or fills a page is quiet, and after the first one of a batch every other one is. Method: the rule
    row by row, for 140 steps of any lengths."""
    steps, batch = DecodeSteps(page, 8), batch_of(lengths)
    for number in range(140):
        before = batch.seq_lens_cpu.tolist()
        launch = one_step(steps, batch)
        changes = any(length % page == 0 or (length + 1) % page == 0 for length in before)
        assert not (steps.is_quiet and changes), (number, before)
        assert launch.changes_pages is not steps.is_quiet and not launch.is_extend
        if launch.changes_pages:
            assert launch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() and launch.prefill_ends.all()
        assert steps.slots.tolist() == batch.req_pool_indices_cpu.tolist()
        if number and not changes:
            # The step after one that fills a page begins one; the one after that has been looked at.
            assert steps.is_quiet


def test_another_batch_is_looked_at() -> None:
    """Goal: what was known of one batch is not taken for another. Method: the same slots in a new tensor, requests that leave and
    come, a token that was allocated elsewhere, no request at all."""
    steps, batch = DecodeSteps(64, 8), batch_of([5, 9])
    assert one_step(steps, batch).changes_pages and not one_step(steps, batch).changes_pages
    batch.req_pool_indices_cpu = batch.req_pool_indices_cpu.clone()
    assert one_step(steps, batch).changes_pages and not one_step(steps, batch).changes_pages
    keep = [1]
    batch.req_pool_indices_cpu, batch.seq_lens_cpu = batch.req_pool_indices_cpu[keep], batch.seq_lens_cpu[keep]
    batch.reqs = batch.reqs[1:]
    assert one_step(steps, batch).slots.tolist() == [2]
    batch.reqs[0].kv.kv_allocated_len += 1
    assert one_step(steps, batch).changes_pages and not one_step(steps, batch).changes_pages
    empty = batch_of([])
    assert one_step(steps, empty).changes_pages and one_step(steps, empty).changes_pages
    assert one_step(steps, batch).changes_pages


def test_a_batch_whose_allocation_failed_is_looked_at_again() -> None:
    """Goal: what is known of the batch before is not taken for one that was begun and not ended. Method: a batch of equal first
    length, whose second request fills its page, begun twice."""
    steps, other = DecodeSteps(64, 8), batch_of([5, 63])
    for _ in range(2):
        one_step(steps, batch := batch_of([5, 9]))
    other.reqs[0].kv.kv_allocated_len = batch.reqs[0].kv.kv_allocated_len
    steps.begin(other)
    assert not steps.is_quiet
    assert one_step(steps, other).changes_pages


class Decisions:
    """What one scheduler has told the worker, in order, and how many of its decode steps were quiet."""

    def __init__(self, engine: Engine) -> None:
        self.plans: list[Any] = []
        self.quiet = self.steps = 0
        runtime = engine.coordinator
        end, apply, mirror = runtime.end_decode, runtime.worker.apply, runtime.worker.mirror

        def end_decode(batch: Any) -> None:
            self.steps += 1
            self.quiet += runtime.decode_steps.is_quiet
            end(batch)

        def record(kind: str, call: Any, what: Any) -> Any:
            self.plans.append((kind, runtime.residency.step, str(what)))
            return call(what)

        runtime.end_decode = end_decode
        runtime.worker.apply = lambda plan: record("plan", apply, plan)
        runtime.worker.mirror = lambda transfers: record("mirror", mirror, transfers)


def decisions_of(lengths: list[int], *, is_quiet: bool, overlap: bool, new: int = 150) -> tuple[Decisions, list[list[int]]]:
    """Waves of requests under pressure. is_quiet: as built; else every step is looked at."""
    with engine_for(overlap=overlap, device_pages=24, ratio=4, hot_pages=2) as engine:
        if not is_quiet:
            steps = engine.coordinator.decode_steps
            begin = steps.begin
            steps.begin = lambda batch: (setattr(steps, "_num_quiet", 0), begin(batch))
        decisions, handles = Decisions(engine), []
        for wave in range(2):
            handles += submit(engine, lengths, new, seed=wave)
            engine.step(60)
        finish(engine)
        return decisions, [handle.output for handle in handles]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
@pytest.mark.parametrize("lengths", [[500], [400, 413, 389, 120]], ids=["alone", "several"])
def test_a_scheduler_decides_the_same(lengths: list[int], overlap: bool) -> None:
    """Goal: leaving steps out changes nothing but time. Method: SGLang's scheduler under pressure, with and without; every plan and
    every host copy before every forward, and every answer."""
    ours, answers = decisions_of(lengths, is_quiet=True, overlap=overlap)
    looked, expected = decisions_of(lengths, is_quiet=False, overlap=overlap)
    assert ours.plans == looked.plans and answers == expected
    assert ours.steps == looked.steps and looked.quiet == 0
    assert ours.quiet > (0.9 if len(lengths) == 1 else 0.4) * ours.steps, (ours.quiet, ours.steps)


def test_a_step_too_many_is_found() -> None:
    """Goal: the harness sees a page that was filled or begun unseen. Method: two quiet steps more than there are."""
    with engine_for(device_pages=24, ratio=4, hot_pages=2) as engine:
        steps, end = engine.coordinator.decode_steps, engine.coordinator.decode_steps.end

        def one_more(batch: Any) -> Any:
            was_quiet, launch = steps.is_quiet, end(batch)
            steps._num_quiet += 0 if was_quiet else 2
            return launch

        steps.end = one_more
        submit(engine, [500], 150)
        with pytest.raises(WrongRowError, match="index-K|row"):
            finish(engine)
