"""Goal: the harness sees a broken protocol. Method: break one rule at a time in a running engine, expect the alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.engine import Engine, make_scheduler
from harness.fake_model import WrongRowError
from harness.scenarios import random_life

# Outputs long enough that pages written while decoding leave the tail.
LIFE = {"seed": 11, "num_events": 100, "max_new": 300}
CONFIG = {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4}


def forget_waits(engine: Engine) -> None:
    """I6: forwards no longer wait for the host writes that they depend on."""
    from dataclasses import replace

    worker = engine.coordinator.worker
    apply = worker.apply
    worker.apply = lambda plan: apply(replace(plan, wait_transfer_id=0))


def write_table_at_free(engine: Engine) -> None:
    """R5: a free reaches the page table at once, under the forward that still reads it."""
    residency, table = engine.coordinator.residency, engine.allocator.page_table
    free = residency.free

    def free_now(pages: Any) -> None:
        pages = list(pages)
        free(pages)
        table[pages] = 0

    residency.free = free_now


def keep_hot_tags(engine: Engine) -> None:
    """I4: a slot's next lease still believes in the hot rows of its last one."""
    engine.coordinator.worker.hot_state.reset = lambda slots: None


def seal_too_early(engine: Engine) -> None:
    """R8: a page counts as sealed one page before it is full."""
    residency = engine.coordinator.residency
    note_launch = residency.note_launch

    def note(slots: Any, seq_lens: Any, ends: Any) -> None:
        note_launch(slots, [length + engine.allocator.page_size for length in seq_lens], ends)

    residency.note_launch = note


def lose_promotions(engine: Engine) -> None:
    """A promoted page becomes resident without its bytes."""
    from dataclasses import replace

    worker = engine.coordinator.worker
    apply = worker.apply
    worker.apply = lambda plan: apply(replace(plan, promotions=()))


def share_a_device_page(engine: Engine) -> None:
    """I2: the device pool hands out pages that have an owner."""
    pages = engine.coordinator.residency.device_pages
    lease = pages.lease

    def lease_twice(count: int, *args: Any) -> Any:
        got = lease(count, *args)
        return got if got is None or len(got) < 2 else [got[0]] * len(got)

    pages.lease = lease_twice


@pytest.mark.parametrize(
    "damage",
    [forget_waits, write_table_at_free, keep_hot_tags, seal_too_early, lose_promotions, share_a_device_page],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_noticed(damage: Callable[[Engine], None]) -> None:
    """Goal: each rule is really looked at. Method: the same life passes whole and fails with the rule broken."""
    with make_scheduler(CONFIG, device_tokens=1536, overlap=True, index_topk_freq=2, link_seed=5) as engine:
        damage(engine)
        with pytest.raises(WrongRowError):
            random_life(engine, **LIFE)


def test_same_life_passes_whole() -> None:
    """Goal: the alarms above come from the damage. Method: the undamaged engine lives the same life."""
    with make_scheduler(CONFIG, device_tokens=1536, overlap=True, index_topk_freq=2, link_seed=5) as engine:
        handles = random_life(engine, **LIFE)
        assert all(handle.finished for handle in handles)
        assert engine.coordinator.residency.counters.pages_promoted > 0
        assert engine.link is not None and engine.link.num_waited > 0


def test_decisions_do_not_depend_on_copy_timing() -> None:
    """Goal: ranks agree without talking (R30). Method: links of three speeds; pools and tables equal step by step."""
    traces = [_trace(link_seed) for link_seed in (None, 1, 2)]
    assert traces[0] == traces[1] == traces[2]
    assert traces[0][-1][2] > 20  # pages were spilled


def _trace(link_seed: int | None) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(2)
    shared = rng.integers(10, 1000, 300).tolist()
    trace = []
    with make_scheduler(CONFIG, device_tokens=2048, overlap=True, index_topk_freq=2, link_seed=link_seed) as engine:
        for _ in range(60):
            if rng.random() < 0.25:
                own = rng.integers(10, 1000, int(rng.integers(1, 600))).tolist()
                engine.submit(shared[: int(rng.integers(1, 300))] + own, int(rng.integers(5, 80)))
            if rng.random() < 0.03:
                engine.retract()
            engine.step(2)
            residency = engine.coordinator.residency
            table = engine.allocator.page_table.numpy().tobytes()
            spilled = residency.counters.pages_spilled
            trace.append((residency.device_pages.num_free, residency.book.num_free, spilled, table))
        engine.run_until_idle()
    return trace
