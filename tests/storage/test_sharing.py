"""Goal: pages are shared where prefixes are, and nowhere else. Method: engines over one folder, several requests at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_no_request_left, assert_outputs
from harness.hisparse import finish
from harness.scenarios import random_life

from .servers import PAGE, counts, prefilled, prompt, publish, run, serve, server, submit, units

PAGES = 10
PROMPT = prompt(PAGES * PAGE + 9)


def test_two_requests_that_want_the_same_pages_load_them_once(tmp_path: Path) -> None:
    """Goal: the second waits for the first's pages instead of reading them again. Method: three requests of one prefix at once."""
    with server(tmp_path) as engine:
        serve(engine, [PROMPT], new=2)
        publish(engine)
    with server(tmp_path) as engine:
        handles = [submit(engine, PROMPT + prompt(30 * turn, seed=turn), 4) for turn in range(1, 4)]
        run(engine)
        assert_outputs(handles)
        assert [handle.cached_tokens for handle in handles] == [PAGES * PAGE] * 3
        found = counts(engine)
        assert found["storage_pages_loaded"] == PAGES and found["storage_pages_corrupt"] == 0
        finish(engine)


def test_prefixes_that_part_on_the_way(tmp_path: Path) -> None:
    """Goal: what the tree holds is not read again. Method: two prompts share half their pages; one is in the tree already."""
    half = prompt(PAGES * PAGE, seed=1)
    first, second = half + prompt(PAGES * PAGE, seed=2), half + prompt(PAGES * PAGE, seed=3)
    with server(tmp_path, device_pages=48) as engine:
        serve(engine, [first, second], new=2)
        assert publish(engine) == 3 * PAGES
    with server(tmp_path, device_pages=48) as engine:
        handles = serve(engine, [first + [11]])
        handles += serve(engine, [second + [11]])
        assert_outputs(handles)
        assert [handle.cached_tokens for handle in handles] == [2 * PAGES * PAGE] * 2
        assert counts(engine)["storage_pages_loaded"] == 3 * PAGES
        finish(engine)


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_tenants_never_share_a_page(tmp_path: Path, field: str) -> None:
    """Goal: a salt keeps a tenant's pages apart in storage too. Method: the same prompt under one salt, another, and none, before
    and after a restart; each finds its own pages only."""
    with server(tmp_path) as engine:
        serve(engine, [PROMPT], new=2, **{field: "tenant-a"})
        assert publish(engine) == PAGES
    with server(tmp_path) as engine:
        others = serve(engine, [PROMPT], **{field: "tenant-b"}) + serve(engine, [PROMPT])
        assert [handle.cached_tokens for handle in others] == [0, 0] and counts(engine)["storage_pages_loaded"] == 0
        own = serve(engine, [PROMPT], **{field: "tenant-a"})
        assert own[0].cached_tokens == PAGES * PAGE
        assert_outputs(others + own)
        publish(engine)
        finish(engine)
    assert len(units(tmp_path)) == 3 * PAGES


def test_evicted_pages_come_back(tmp_path: Path) -> None:
    """Goal: storage holds more than the host. Method: prompts of three times the logical pages, in turn, twice; in the second round
    every prefix comes from storage and nothing but its last tokens is computed."""
    prompts = [prompt(8 * PAGE + 5, seed) for seed in range(9)]
    with server(tmp_path, device_pages=16, ratio=1.5) as engine:
        assert engine.allocator.size == 24 * PAGE
        for tokens in prompts:
            assert_outputs(serve(engine, [tokens], new=2))
            publish(engine)
        before = prefilled(engine)
        for tokens in prompts:
            (handle,) = serve(engine, [tokens], new=2)
            assert_outputs([handle])
            assert handle.cached_tokens == 8 * PAGE
        assert prefilled(engine) - before == len(prompts) * (5 + 1)
        assert counts(engine)["storage_pages_loaded"] > 40
        assert_no_request_left(engine)
        finish(engine)


def test_a_prompt_that_does_not_fit_beside_the_running_ones(tmp_path: Path) -> None:
    """Goal: a load never takes the pages that running requests need. Method: long decodes fill the logical pages while prompts from
    storage wait; nothing is retracted and every token is right."""
    with server(tmp_path, device_pages=24, ratio=1) as engine:
        serve(engine, [PROMPT], new=2)
        publish(engine)
    with server(tmp_path, device_pages=24, ratio=1) as engine:
        running = [submit(engine, prompt(5 * PAGE, seed), 150) for seed in range(1, 3)]
        engine.step(10)
        late = [submit(engine, PROMPT + [9 + turn], 10) for turn in range(1, 4)]
        run(engine, 60)
        assert_outputs(running + late)
        assert [handle.retractions for handle in running] == [0, 0]
        finish(engine)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_lives_over_one_folder(tmp_path: Path, seed: int) -> None:
    """Goal: whatever happens to requests, storage never gives a wrong row. Method: three servers live random lives in turn with the
    same prompts, tiny pools and a late link; the model judges every row."""
    rng = np.random.default_rng(seed)
    loaded = 0
    for _ in range(3):
        with server(tmp_path, device_pages=20, ratio=2, link_seed=int(rng.integers(100)), wait_seconds=0.5) as engine:
            handles = random_life(engine, seed=seed, num_events=40, max_prompt=700, max_new=60)
            run(engine, 60)
            assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
            found = counts(engine)
            assert found["storage_pages_corrupt"] == 0 and found["storage_errors"] == 0
            loaded += found["storage_pages_loaded"]
            publish(engine)
            finish(engine)
    assert loaded > 0
