"""Goal: prompts longer than the device, and short extends of prefixes on the host, read right rows and disturb nobody.

Method: SGLang's scheduler with HiSparse on the CPU, 32 device pages, host copies as late as allowed; every extend reads every
position of its requests in every layer, through the scratch where it is streamed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang")

from harness.checks import (
    assert_outputs,
    assert_residency_sound,
    used_host_tier,
)
from harness.engine import Engine, Handle
from harness.fake_model import WrongRowError
from harness.hisparse import PAGE, engine_for, finish, submit

from sglang_hisparse.capacity import PrefillRule
from sglang_hisparse.transfer.prefix_stream import PrefixStream

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
DEVICE_PAGES = 32
THREE_POOLS = 3 * DEVICE_PAGES * PAGE


@pytest.fixture(autouse=True)
def nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes here are short: unions are chosen as if none of their pages arrived behind a layer."""
    monkeypatch.setattr(PrefillRule, "hidden_rows", lambda *_: 0)


def streaming_engine(*, scratch: int = 8192, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Logical tokens six times the device's; chunks of four pages, unless told otherwise."""
    changes.setdefault("ratio", 6)
    settings = {"prefill_scratch_tokens": scratch, "watermark_low": 0.0, "watermark_high": 0.0, **(config or {})}
    return engine_for(device_pages=DEVICE_PAGES, config=settings, **changes)


def chunk_of(engine: Engine, handle: Handle) -> int:
    """How many tokens of the prompt the launched chunks have written; 0 before the first and after the last."""
    chunked = engine.scheduler.chunked_req
    return chunked.kv.kv_allocated_len if chunked is not None and chunked.rid == handle.rid and chunked.kv.holds_kv else 0


def streamed(engine: Engine) -> dict[str, int]:
    counters = used_host_tier(engine)
    return {name: counters[name] for name in counters if name.startswith("streamed_")}


@pytest.mark.parametrize(
    ("mode", "radix", "overlap"),
    [("hybrid", True, False), ("hybrid", True, True), ("hybrid", False, True), ("always_host", True, True)],
)
def test_a_prompt_of_three_pools(mode: str, radix: bool, overlap: bool) -> None:
    """Goal: it is prefilled and decodes. Method: 96 pages of prompt on 32 device pages; then a second turn, whose prefix is a
    hit on the host and is streamed too."""
    with streaming_engine(mode=mode, radix=radix, overlap=overlap, chunked_prefill_size=512) as engine:
        first = submit(engine, [THREE_POOLS], 20)[0]
        engine.run_until_idle()
        assert_outputs([first])
        cost = streamed(engine)
        assert cost["streamed_extends"] >= 12 - DEVICE_PAGES // 8
        assert engine.model.counters.rows_read_streamed > 4 * THREE_POOLS
        again = engine.submit([*first.prompt, *first.output, 11, 12, 13], 12)
        engine.run_until_idle()
        assert_outputs([again])
        assert again.cached_tokens == (THREE_POOLS if radix else 0)
        finish(engine)


@LOOPS
def test_beside_running_decodes(overlap: bool) -> None:
    """Goal: a streamed prompt needs a lease and a chunk of the device, and takes no more. Method: four requests decode with
    pages of their own while a prompt of two pools is prefilled between their steps."""
    with streaming_engine(overlap=overlap) as engine:
        handles = submit(engine, [300, 420, 350], 90)
        engine.run_until(lambda: min(len(handle.output) for handle in handles) >= 3)
        long = submit(engine, [2 * DEVICE_PAGES * PAGE + 7], 20, seed=3)[0]
        engine.run_until(lambda: chunk_of(engine, long) > 1024)
        assert engine.num_running() > 0, "the prompt did not wait for the others to end"
        assert_residency_sound(engine)
        engine.run_until_idle()
        assert_outputs([*handles, long])
        assert streamed(engine)["streamed_host_bytes"] > 0
        finish(engine)


@pytest.mark.parametrize("written", range(0, 3 * 1024, 512))
def test_abort_in_every_chunk(written: int) -> None:
    """Goal: a streamed prefill can end at any chunk. Method: the client leaves after each of six; another request goes on."""
    with streaming_engine(overlap=written % 1024 == 0, chunked_prefill_size=512) as engine:
        other = submit(engine, [500], 40)[0]
        engine.run_until(lambda: len(other.output) >= 2)
        long = submit(engine, [THREE_POOLS], 10, seed=3)[0]
        engine.run_until(lambda: chunk_of(engine, long) > written)
        engine.abort(long)
        engine.step(2)
        assert_residency_sound(engine)
        engine.run_until_idle()
        assert long.finish_reason == "abort"
        assert_outputs([other])
        finish(engine)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_between_chunks(mode: str) -> None:
    """Goal: an interrupted prefill goes on, or begins again over what is cached. Method: pause after a few chunks, resume."""
    with streaming_engine(chunked_prefill_size=512) as engine:
        long = submit(engine, [THREE_POOLS], 10)[0]
        engine.run_until(lambda: chunk_of(engine, long) > 2048)
        engine.pause(mode)
        assert_residency_sound(engine)
        engine.resume()
        engine.run_until_idle()
        assert_outputs([long])
        finish(engine)


def test_retracted_while_decoding() -> None:
    """Goal: a request longer than the device survives a retraction. Method: force one; its pages are found on the host."""
    with streaming_engine(chunked_prefill_size=512) as engine:
        handles = submit(engine, [THREE_POOLS, 400], 40)
        engine.run_until(lambda: len(handles[0].output) >= 5)
        retracted = engine.retract()
        engine.run_until_idle()
        assert retracted >= 1
        assert_outputs(handles)
        finish(engine)


@LOOPS
def test_two_at_once(overlap: bool) -> None:
    """Goal: neither waits for the other's pages for ever. Method: two prompts of two pools each, and short ones around them."""
    with streaming_engine(overlap=overlap, chunked_prefill_size=512) as engine:
        handles = submit(engine, [2 * DEVICE_PAGES * PAGE, 200, 2 * DEVICE_PAGES * PAGE + 65, 300], 15)
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
@pytest.mark.parametrize(("prompt", "unions"), [(1100, 0), (1073, 1)])
def test_a_short_extend_promotes_nothing_and_spills_nobody(overlap: bool, prompt: int, unions: int) -> None:
    """Goal: a turn over a prefix on the host leaves the device to the others. Method: a history leaves the device, two
    requests fill it, the history's next turn arrives: no page comes back for it, none of theirs leaves; a turn with many
    new tokens brings the history back. With 35 new tokens all rows come, with 8 the selected ones."""
    config = {"promote_mib_per_step": 0, "stream_extend_tokens": 128, "union_extend_tokens": 20}
    with streaming_engine(overlap=overlap, config=config) as engine:
        history = submit(engine, [prompt], 20)[0]
        engine.run_until_idle()
        others = submit(engine, [700, 700], 60, seed=5)
        engine.run_until(lambda: min(len(handle.output) for handle in others) >= 2)
        before = used_host_tier(engine)
        again = engine.submit([*history.prompt, *history.output, 5, 6, 7], 10)
        engine.run_until(lambda: again.finished)
        after = used_host_tier(engine)
        assert again.cached_tokens == 1088
        assert after["pages_promoted"] == before["pages_promoted"]
        assert after["streamed_extends"] > before["streamed_extends"]
        assert after["streamed_unions"] - before["streamed_unions"] == unions
        engine.run_until_idle()
        assert_outputs([history, *others, again])
        long_turn = engine.submit([*again.prompt, *again.output, *range(20, 320)], 5)
        engine.run_until_idle()
        assert_outputs([long_turn])
        finish(engine)


def test_a_hit_has_index_keys_for_all_of_its_rows() -> None:
    """Goal: index-K reaches as far as KV, wherever the rows lie. Method: the next turn of a history on the host; its one extend
    reads an index entry of every position in every leading layer, and a row in every layer."""
    with streaming_engine(overlap=False) as engine:
        history = submit(engine, [1100], 20)[0]
        engine.run_until_idle()
        assert engine.coordinator.make_room(DEVICE_PAGES)
        again = engine.submit([*history.prompt, *history.output, 5, 6, 7], 1)
        read = engine.model.counters
        before = (read.index_entries_read, read.rows_read_streamed)
        engine.run_until(lambda: again.finished)
        num_leaders, num_layers, length = 2, 4, len(again.prompt)
        assert sum(engine.model.leader_layers) == num_leaders and again.cached_tokens == 1088
        assert read.index_entries_read - before[0] == num_leaders * length
        assert read.rows_read_streamed - before[1] == num_layers * length
        assert_outputs([history, again])
        finish(engine)


def test_the_old_limit_without_a_scratch() -> None:
    """Goal: 0 switches it off. Method: the limits of both engines."""
    limits = []
    for scratch in (0, 8192):
        with streaming_engine(scratch=scratch) as engine:
            limits.append(engine.scheduler.max_req_input_len)
            assert (engine.coordinator.extends.stream is None) == (scratch == 0)
    assert limits[0] == (DEVICE_PAGES - 2) * PAGE - 5 < THREE_POOLS < limits[1]


# ---- the checks bite -------------------------------------------------------------------------------------------------


def half_overwritten_early(stream: PrefixStream) -> None:
    original = stream.begin

    def begin(plan: Any) -> None:
        original(plan)
        stream._fetch(2)

    stream.begin = begin


def new_rows_left_out(stream: PrefixStream) -> None:
    original = stream.begin

    def begin(plan: Any) -> None:
        original(plan)
        (pages,) = stream._extend.windows
        for layer in range(stream.num_layers):
            stream._copy(layer, layer, stream._device_bases, pages.device_pages, pages.resident_targets)
        stream._extend.windows = [replace(pages, device_pages=pages.device_pages[:0], value=pages.host_targets)]

    stream.begin = begin


def table_kept(stream: PrefixStream) -> None:
    original = stream.begin

    def begin(plan: Any) -> None:
        before = stream.table.clone()
        original(plan)
        if before.any():
            stream.table.copy_(before)

    stream.begin = begin


@pytest.mark.parametrize("plant", [half_overwritten_early, new_rows_left_out, table_kept], ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Any) -> None:
    """Goal: the judge sees what streaming can do wrong. Method: plant one bug; a long prompt must fail."""
    with streaming_engine(chunked_prefill_size=512) as engine:
        plant(engine.coordinator.extends.stream)
        submit(engine, [THREE_POOLS], 5)
        with pytest.raises(WrongRowError):
            engine.run_until_idle()


def test_a_missing_wait_is_caught() -> None:
    """Goal: a stream that reads a host row before its copy has landed is seen (I6). Method: plans that wait for nothing."""
    with streaming_engine(chunked_prefill_size=512) as engine:
        link = engine.coordinator.worker
        link.apply = without_wait(link.apply)
        submit(engine, [THREE_POOLS], 5)
        with pytest.raises(WrongRowError):
            engine.run_until_idle()


def without_wait(apply: Any) -> Any:
    from dataclasses import replace

    return lambda plan: apply(replace(plan, wait_transfer_id=0))


