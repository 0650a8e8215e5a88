"""Goal: a server keeps device tokens from prefixes that nobody asks for again, and prefixes for those who do; every row stays right.

Method: SGLang's scheduler on the CPU as in test_elastic.py; prompts that are sent once, conversations, and both.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_residency_sound
from harness.engine import Engine, Handle
from harness.hisparse import PAGE, engine_for, finish, small_chunks, submit
from harness.scenarios import random_life

from sglang_hisparse.memory.elastic import page_keys

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
SIZES = {"device_pages": 100, "ratio": 4, "hot_pages": 2, "max_running_requests": 4, "chunked_prefill_size": 8 * PAGE}


@pytest.fixture(autouse=True)
def _small_chunks() -> Iterator[None]:
    with small_chunks():
        yield


def elastic_engine(**changes: Any) -> Any:
    return engine_for(**{"config": {"elastic_border": True}, "num_layers": 8, "index_topk_freq": 8, **SIZES, **changes})


def border(engine: Engine) -> Any:
    """Its room for what is given up at once is as small as the pools are."""
    place = engine.coordinator.border.border
    place.give_up_pages = 8
    return place


def send_once(engine: Engine, count: int, *, at_once: int = 4, seed: int = 0) -> list[int]:
    """Prompts of 12 pages that nobody sends again, so many at a time. Returns the places where the border stood."""
    live: list[Handle] = []
    places, sent = [], 0
    while sent < count or live:
        while sent < count and len(live) < at_once:
            live += submit(engine, [12 * PAGE - 20], 30, seed=1000 * seed + sent)
            sent += 1
        engine.step()
        places.append(border(engine).ended)
        assert_residency_sound(engine)
        assert_outputs([handle for handle in live if handle.finished])
        live = [handle for handle in live if not handle.finished]
    return places


def play_turns(engine: Engine, histories: list[list[int]], turns: int, *, pause: int = 0) -> list[int]:
    """Conversations in step. Returns the tokens of each turn that had to be prefilled."""
    rng, prefilled = np.random.default_rng(5), []
    for _ in range(turns):
        handles = [engine.submit(history + rng.integers(10, 1000, 20 if history else 700).tolist(), 12) for history in histories]
        engine.run_until(lambda: all(handle.finished for handle in handles))  # noqa: B023
        assert_outputs(handles)
        histories[:] = [[*handle.prompt, *handle.output] for handle in handles]
        prefilled.append(sum(len(handle.prompt) - handle.cached_tokens for handle in handles))
        engine.step(pause)
    return prefilled


@LOOPS
def test_prompts_that_are_sent_once_leave_the_device_to_requests(overlap: bool) -> None:
    """Goal: device tokens that went to cached prefixes come back while requests run. Method: as many prompts as fill the last place, and
    as many again; places of the border, device pages."""
    with elastic_engine(overlap=overlap) as engine:
        place = border(engine)
        last = place.steps[-1].logical_pages
        places = send_once(engine, last // 12 + 1)
        assert place.returns.are_rare and max(places) > 10, max(places)
        places += send_once(engine, last // 24, seed=1)
        assert place.num_returns and places[-1] < max(places) // 4, (places[-1], max(places))
        assert engine.coordinator.residency.device_pages.num_usable == place.steps[places[-1]].device_pages
        counts = engine.coordinator.counters()
        assert (counts["border_returns"], counts["prefixes_return_rarely"]) == (place.num_returns, 1)
        finish(engine)


def test_a_queue_that_fills_the_cache_is_known_at_once() -> None:
    """Goal: the border does not set out for prefixes that will be pushed out anyway. Method: all prompts arrive in one step."""
    with elastic_engine() as engine:
        last = border(engine).steps[-1].logical_pages
        places = send_once(engine, last // 12, at_once=last)
        assert max(places) == 0 and engine.coordinator.residency.counters.pages_spilled
        finish(engine)


@LOOPS
def test_conversations_keep_their_histories(overlap: bool) -> None:
    """Goal: the border moves for conversations, and neither the next turn nor a pause takes it back. Method: more of them than fit the
    first place; tokens prefilled in each turn, with pauses between."""
    with elastic_engine(overlap=overlap) as engine:
        place, histories = border(engine), [[] for _ in range(22)]
        place.calm_looks = place.watch_looks = 20
        prefilled = play_turns(engine, histories, 4, pause=60)
        assert prefilled[0] == 22 * 700 and max(prefilled[1:]) < 22 * 2 * PAGE, prefilled
        assert place.ended > 10 and not place.num_returns and not place.returns.are_rare
        finish(engine)


@LOOPS
def test_conversations_after_prompts_that_were_sent_once(overlap: bool) -> None:
    """Goal: they prefill one turn twice, no more. Method: a window of other prompts first; tokens prefilled in each turn."""
    with elastic_engine(overlap=overlap) as engine:
        place, histories = border(engine), [[] for _ in range(22)]
        send_once(engine, 2 * place.steps[-1].logical_pages // 12)
        assert place.returns.are_rare and not place.ended
        prefilled = play_turns(engine, histories, 4)
        assert prefilled[0] == 22 * 700 and prefilled[1] > 10 * 700, "what did not fit the first place was given up"
        assert max(prefilled[2:]) < 22 * 2 * PAGE and not place.returns.are_rare, prefilled
        finish(engine)


@LOOPS
def test_a_flush_begins_anew(overlap: bool) -> None:
    """Goal: what was before a flush says nothing about what comes after. Method: prompts sent once, a flush, conversations."""
    with elastic_engine(overlap=overlap) as engine:
        place = border(engine)
        send_once(engine, place.steps[-1].logical_pages // 12 + 1)
        engine.run_until_idle()
        engine.coordinator.settle()
        assert place.returns.are_rare and engine.flush()
        prefilled = play_turns(engine, [[] for _ in range(22)], 3)
        assert prefilled[0] == 22 * 700 and max(prefilled[1:]) < 22 * 2 * PAGE, prefilled
        finish(engine)


@LOOPS
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_while_the_verdict_changes(seed: int, overlap: bool) -> None:
    """Goal: shared prefixes, aborts, retractions and flushes while cached prefixes are given up for the way back. Method: seeded lives;
    the verdict turns at random before forwards, watches are short and few pages are given up at once."""
    sizes = {"device_pages": 30, "ratio": 2 + seed % 3, "max_running_requests": 8, "link_seed": seed}
    with elastic_engine(overlap=overlap, **sizes) as engine:
        place, rng, returned = border(engine), np.random.default_rng(seed), 0
        place.watch_looks, place.give_up_pages, given_up = 4, 4, []
        look, give_up = place.look, place._cached.give_up

        def turning_look() -> None:
            place.returns.are_rare = bool(rng.random() < 0.5) if rng.random() < 0.1 else place.returns.are_rare
            look()

        place.look = turning_look
        place._cached.give_up = lambda count: (given_up.append(count), give_up(count))
        random_life(engine, seed=seed, num_events=70)
        returned = place.num_returns
        engine.coordinator.settle()
        engine.run_until_idle()
        assert returned and len(given_up) > 5, (returned, len(given_up))


def test_without_a_prefix_cache() -> None:
    """Goal: nothing asks a cache that is not there. Method: the radix cache off, more tokens than the first place has."""
    with elastic_engine(radix=False, max_running_requests=8) as engine:
        handles = submit(engine, [14 * PAGE] * 12, 20)
        engine.run_until_idle()
        assert_outputs(handles)
        assert not border(engine).returns._touched
        assert engine.flush()


def test_what_is_noted_of_a_request() -> None:
    """Goal: each arrival counts once, whatever becomes of it. Method: whole pages of prompts, of a retracted request, with a salt."""
    with elastic_engine() as engine:
        noted: list[list[int]] = []
        border(engine).returns.note = lambda keys: noted.append(list(keys))
        handles = submit(engine, [3 * PAGE + 5, 2 * PAGE], 60)
        engine.run_until(lambda: engine.num_running() == 2)
        engine.step(4)
        assert engine.retract()
        engine.run_until_idle()
        assert sum(handle.retractions for handle in handles) and len(noted) == 2
        handle = handles[0]
        assert noted[0] == list(page_keys(handle.prompt, PAGE, (None, None)))
        assert len(noted[0]) == len({*noted[0]}) == 3
        assert not {*noted[0]} & {*page_keys(handle.prompt, PAGE, (None, "tenant"))}
        other = [*handle.prompt[: 2 * PAGE], 11, *handle.prompt[2 * PAGE + 1 :]]
        assert [a == b for a, b in zip(noted[0], page_keys(other, PAGE, (None, None)), strict=True)] == [True, True, False]
        engine.coordinator.border.note_arrival(SimpleNamespace(retracted_stain=True))
        assert len(noted) == 2


def test_refused_requests_are_no_prompts() -> None:
    """Goal: what is turned away says nothing about what the cache will see. Method: a queue for one, alone and with priorities, where the
    later request takes the place of the first; priorities that are not allowed; a prompt that is too long."""
    for changes, priorities, noted_of, left in (
        ({"max_queued_requests": 1}, (None, None), [0], [0]),
        ({"max_queued_requests": 1, "enable_priority_scheduling": True}, (1, 2), [0, 1], [1]),
        ({"max_queued_requests": 1, "enable_priority_scheduling": True}, (2, 1), [0], [0]),
        ({"abort_on_priority_when_disabled": True}, (None, 1), [0], [0]),
    ):
        with elastic_engine(**changes) as engine:
            noted: list[list[int]] = []
            border(engine).returns.note = lambda keys: noted.append(list(keys))  # noqa: B023
            handles = submit(engine, [3 * PAGE, 2 * PAGE], 5)
            for message, priority in zip(engine._inbox, priorities, strict=True):
                message.priority = priority
            engine.run_until_idle()
            assert noted == [list(page_keys(handles[index].prompt, PAGE, (None, None))) for index in noted_of], changes
            assert [index for index, handle in enumerate(handles) if handle.finish_reason != "abort"] == left
            submit(engine, [engine.scheduler.max_req_input_len + PAGE], 5)
            engine.run_until_idle()
            assert not any(noted[len(noted_of) :])
