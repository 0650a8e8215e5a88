"""Goal: a scheduler whose border moves serves what it accepts, loses no row, and gives up no cached prefix without need.

Method: SGLang's scheduler on the CPU, whose pools lie on the twin's virtual memory; rows are judged by the model as they are read,
host copies run as late as they may.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_prefix_of_reference, assert_residency_sound
from harness.engine import Engine
from harness.hisparse import PAGE, engine_for, finish, small_chunks, submit
from harness.scenarios import random_life

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])


@pytest.fixture(autouse=True)
def _small_chunks() -> Iterator[None]:
    with small_chunks():
        yield


def elastic_engine(**changes: Any) -> Any:
    config = {"elastic_border": True, **changes.pop("config", {})}
    # A row of this model is no larger than an index key: few leaders make the border worth moving, as in a real one.
    return engine_for(config=config, num_layers=8, index_topk_freq=8, **changes)


def border(engine: Engine) -> Any:
    return engine.coordinator.border.border


def never_judge(engine: Engine) -> Any:
    """The border's, which hears of no prompt and so moves for whatever is cached."""
    place = border(engine)
    place.returns.note = lambda keys: None
    return place


@LOOPS
@pytest.mark.parametrize("mode", ["hybrid", "always_host"])
def test_from_one_end_to_the_other(mode: str, overlap: bool) -> None:
    """Goal: every request is right while memory moves under it. Method: waves of prompts until all logical pages are backed."""
    with elastic_engine(mode=mode, overlap=overlap, device_pages=40, ratio=3, hot_pages=2) as engine:
        steps, handles, places = never_judge(engine).steps, [], set()
        assert len(steps) > 4 and steps[0].device_pages == 40
        for wave in range(14):
            handles += submit(engine, [400, 460, 330], 60, seed=wave)
            for _ in range(40):
                engine.step()
                places.add(border(engine).ended)
                assert_residency_sound(engine)
        engine.run_until_idle()
        assert_outputs(handles)
        assert border(engine).is_at_end and len(places) > 3, (border(engine).begun, len(steps))
        assert engine.coordinator.residency.counters.pages_spilled > 0
        finish(engine)


@LOOPS
def test_the_cache_outlives_the_device_tokens_of_the_start(overlap: bool) -> None:
    """Goal: memory moves before prefixes are evicted. Method: more distinct prompts than logical pages have memory at start, one
    after the other; then each again, which must be found in the cache."""
    with elastic_engine(overlap=overlap, device_pages=32, ratio=3, hot_pages=2) as engine:
        first = border(engine).steps[0].logical_pages
        count = (2 * first) // 8
        assert count * 8 <= engine.coordinator.residency.limits.num_logical_pages
        for seed in range(count):
            submit(engine, [7 * PAGE + 5], 4, seed=seed)
            engine.run_until_idle()
        again = [submit(engine, [7 * PAGE + 5], 4, seed=seed)[0] for seed in range(count)]
        engine.run_until_idle()
        assert_outputs(again)
        assert [handle.cached_tokens for handle in again] == [7 * PAGE] * count
        assert border(engine).ended > 0
        finish(engine)


def pass_late(engine: Engine) -> None:
    """The forward stream has not passed a plan when it is asked about it for the first time."""
    place, seen = border(engine), [0]

    def has_vacated() -> bool:
        known, seen[0] = seen[0], place.begun
        return known == place.begun

    engine.coordinator.border.memory.has_vacated = has_vacated


def deferrals(engine: Engine) -> list[bool]:
    """What requests that ask whether they should wait for the border are answered from now on."""
    answers: list[bool] = []
    ask = border(engine).defers

    def defers(num_pages: int) -> bool:
        answers.append(ask(num_pages))
        return answers[-1]

    border(engine).defers = defers
    return answers


def test_a_burst_is_not_held_up() -> None:
    """Goal: prompts that come all at once seldom wait for memory to move. Method: a stream that passes a plan one iteration late; a
    prompt takes as many pages as a step gives, over two chunks; count answers that put a request off."""
    sizes = {"device_pages": 150, "ratio": 6, "hot_pages": 2, "max_running_requests": 24, "chunked_prefill_size": 8 * PAGE}
    with elastic_engine(**sizes) as engine:
        pass_late(engine)
        waits = deferrals(engine)
        handles = submit(engine, [16 * PAGE - 4] * 24, 30, seed=5)
        engine.run_until_idle()
        assert_outputs(handles)
        assert border(engine).ended > 8 and sum(waits) < 10, (border(engine).ended, sum(waits))
        finish(engine)


def play_turn(engine: Engine, histories: list[list[int]], added: int, new: int, seed: int) -> int:
    """One turn of conversations that go in step: each prompt is the history and `added` tokens. Returns iterations in which nothing ran,
    from the arrival of all until all are answered."""
    rng, runtime = np.random.default_rng(seed), engine.coordinator
    handles = [engine.submit(history + rng.integers(10, 1000, added).tolist(), new) for history in histories]
    launched, idle, begin = [0], 0, runtime.before_forward

    def before_forward() -> None:
        launched[0] += 1
        begin()

    runtime.before_forward = before_forward
    while not all(handle.finished for handle in handles):
        before = launched[0]
        engine.step()
        idle += launched[0] == before
        assert idle < 100, "requests wait, and nothing runs"
    del runtime.before_forward
    assert_outputs(handles)
    for history, handle in zip(histories, handles, strict=True):
        history[:] = [*handle.prompt, *handle.output]
    return idle


def test_turns_in_step_are_not_held_up() -> None:
    """Goal: no turn of conversations that go in step is held up, neither while the border moves nor near its end. Method: 32 of them bring
    it to its last places, then a flush and half as many; count iterations of each turn in which nothing runs, and put-offs."""
    sizes = {"device_pages": 115, "ratio": 4.33, "hot_pages": 2, "max_running_requests": 32, "chunked_prefill_size": 8 * PAGE}
    with elastic_engine(**sizes) as engine:
        pass_late(engine)
        waits, places, ended = deferrals(engine), [], 0
        for count, turns in ((32, 8), (16, 4)):
            waits.clear()
            histories: list[list[int]] = [[] for _ in range(count)]
            for turn in range(turns):
                idle = play_turn(engine, histories, 10 if turn else 700, 12, seed=100 * count + turn)
                # At the end of a turn the last launch is still to be processed; in between, batches of prompts end.
                assert idle <= 3, (count, turn, idle)
                places.append(border(engine).ended)
            assert sum(waits) < 10 if count == 32 else not any(waits), (count, sum(waits))
            engine.run_until_idle()
            engine.coordinator.settle()
            assert engine.flush()
            ended = ended or border(engine).ended
        steps = len(border(engine).steps)
        assert steps - 6 < ended < steps - 1 and len(set(places[:8])) > 1, places
        assert set(places[8:]) == {ended}, "half as many conversations fit in front of it"
        finish(engine)


def test_a_border_at_rest_costs_no_work() -> None:
    """Goal: decode steps are those of a fixed border while this one stands in the middle of its way. Method: requests with host-only
    pages decode; count what a move would do, and compare each plan with what the step itself has changed."""
    with elastic_engine(device_pages=60, ratio=4, hot_pages=2) as engine:
        residency, twin = engine.coordinator.residency, engine.coordinator.border.memory._memory
        handles = submit(engine, [12 * PAGE] * 5, 200, seed=3)
        while engine.scheduler.waiting_queue or border(engine).is_moving or not border(engine).ended:
            engine.step()
        engine.step(4)
        counts = {"make_room": 0, "asked": 0, "plans": 0}

        def counted(name: str, call: Any) -> Any:
            def count(*arguments: Any) -> Any:
                counts[name] += 1
                return call(*arguments)

            return count

        def take_plan(take: Any = residency.take_plan) -> Any:
            plan = take()
            counts["plans"] += not plan.is_empty
            assert not (plan.vacates or plan.relocations or plan.promotions or plan.leases)
            assert sum(target > 0 for _, target in plan.table) <= len(handles), "pages that requests have begun"
            return plan

        place = border(engine)
        place._make_room, place._agree = counted("make_room", place._make_room), counted("asked", place._agree)
        residency.take_plan = take_plan
        before, spilled = (place.ended, twin.num_maps, twin.num_unmaps), residency.counters.pages_spilled
        engine.step(PAGE)
        assert spilled and residency.hot_lease and 0 < place.ended < len(place.steps) - 1
        assert (place.ended, twin.num_maps, twin.num_unmaps) == before and place.begun == place.ended
        # What is left are pages that requests begin, and copies of full ones that are waited for: most steps have neither.
        assert counts["make_room"] == counts["asked"] == 0 < counts["plans"] < PAGE // 2, counts
        del residency.take_plan
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_decode_steps_that_wait(overlap: bool) -> None:
    """Goal: SGLang goes on after iterations without a decode step, whoever ends, comes or is aborted meanwhile. Method: two of
    three steps wait, by a rule of the test; every output, and the pools at the end."""
    with elastic_engine(overlap=overlap, device_pages=40, ratio=3, hot_pages=2) as engine:
        asked, waits = itertools.count(), []

        def waits_for(batch: Any, ask: Any = engine.coordinator.border.decode_waits) -> bool:
            assert not ask(batch), "nothing is short here"
            batch.filter_batch()
            waits.append(not batch.is_empty() and next(asked) % 3 > 0)
            return waits[-1]

        engine.coordinator.border.decode_waits = waits_for
        handles = submit(engine, [300, 200, 410], 25, seed=1)
        engine.step(20)
        aborted, *others = submit(engine, [150, 220], 70, seed=2)
        engine.step(15)
        engine.abort(aborted)
        engine.run_until_idle()
        assert_outputs([*handles, *others])
        assert sum(waits) > 50 and aborted.finish_reason == "abort"
        finish(engine)


@LOOPS
def test_home_and_away_again(overlap: bool) -> None:
    """Goal: a server that rests after a flush has its device tokens back, and serves on the whole way again. Method: waves of prompts
    until all logical pages are backed, flush, rest; requests that come while the border is on its way home."""
    with elastic_engine(overlap=overlap, device_pages=40, ratio=3, hot_pages=2) as engine:
        place = never_judge(engine)
        place.calm_looks, home = 20, place.steps[0]
        for turn in range(2):
            handles = []
            for wave in range(14):
                handles += submit(engine, [400, 460, 330], 30, seed=100 * turn + wave)
                engine.step(20)
            engine.run_until_idle()
            assert_outputs(handles)
            assert place.is_at_end and not place.is_moving
            engine.step(3 * place.calm_looks)
            assert place.is_at_end, "prefixes are cached"
            engine.coordinator.settle()
            assert engine.flush()
            for _ in range(3 * place.calm_looks):
                engine.step()
                assert_residency_sound(engine)
                if place.is_moving and turn:
                    break
            if not turn:
                assert place.ended == 0 and engine.coordinator.residency.device_pages.num_free == home.device_pages
        assert place.begun == 0, "on its way home"
        late = submit(engine, [12 * PAGE] * 4, 20, seed=7)
        engine.run_until_idle()
        assert_outputs(late)
        assert place.num_returns == 2
        finish(engine)


@LOOPS
@pytest.mark.parametrize("scratch", [0, None], ids=["resident", "streamed"])
def test_requests_around_every_capacity(scratch: int | None, overlap: bool) -> None:
    """Goal: I8, what validation accepts runs alone, wherever the border stands. Method: lengths around the least device pages,
    before and after the border has gone to its end."""
    config = {} if scratch is None else {"prefill_scratch_tokens": scratch}
    with elastic_engine(overlap=overlap, device_pages=24, ratio=3, hot_pages=2, config=config) as engine:
        longest = engine.scheduler.max_req_input_len
        least = never_judge(engine).steps[-1].device_pages * PAGE
        assert (longest <= least) == (scratch == 0)
        for turn in range(2):
            handles = []
            for length in (longest - PAGE, longest - 2, longest - 1, longest, longest + 1):
                handle = submit(engine, [length], 6, seed=length + turn)[0]
                engine.run_until_idle(max_steps=400)
                assert handle.finish_reason == ("length" if length < longest else "abort"), length
                handles.append(handle)
            assert_prefix_of_reference([handle for handle in handles if handle.finish_reason == "length"])
            for seed in range(30):
                submit(engine, [5 * PAGE], 4, seed=100 + seed)
                engine.run_until_idle(max_steps=400)
            assert border(engine).is_at_end
        finish(engine)


@LOOPS
@pytest.mark.parametrize("seed", range(6))
def test_random_lives(seed: int, overlap: bool) -> None:
    """Goal: aborts, retractions, pauses and flushes while memory moves. Method: seeded lives of fifty to a hundred events."""
    with elastic_engine(overlap=overlap, device_pages=30, ratio=2 + seed % 3, hot_pages=2, link_seed=seed) as engine:
        random_life(engine, seed=seed, num_events=70)
        assert border(engine).ended > 0
        engine.coordinator.settle()
        engine.run_until_idle()


def assert_usage_is_of_pages(engine: Engine) -> None:
    """What SGLang logs and balances by is what requests hold, whatever has no memory yet."""
    book, size = engine.coordinator.residency.book, engine.allocator.size
    stats = engine.scheduler.pool_stats_observer.get_pool_stats()
    held = (book.num_usable - book.num_free) * PAGE - engine.tree.evictable_size()
    assert (stats.full_num_used, stats.full_token_usage) == (held, held / size)
    told = engine.coordinator.get_token_stats()
    assert (told.host_tokens, told.host_token_usage) == ((book.num_usable - book.num_free) * PAGE, (book.num_usable - book.num_free) * PAGE / size)
    assert 0 <= told.device_token_usage <= 1


def test_the_count_of_tokens_stays_whole() -> None:
    """Goal: SGLang's own leak check holds with logical pages that have no memory yet, and its usage is right. Method: it runs after
    every step of this harness; here the parts are added up."""
    with elastic_engine(device_pages=32, ratio=3, hot_pages=2) as engine:
        for seed in range(6):
            submit(engine, [7 * PAGE + 5], 30, seed=seed)
            engine.step(10)
            allocator = engine.allocator
            book = engine.coordinator.residency.book
            assert allocator.unbacked_tokens == allocator.size - book.num_usable * PAGE
            assert_usage_is_of_pages(engine)
        engine.run_until_idle()
        assert_usage_is_of_pages(engine)
        parts = (engine.allocator.available_size(), engine.tree.evictable_size(), engine.tree.protected_size())
        assert sum(parts) == engine.allocator.size
        finish(engine)
