"""Goal: a batch reads more pages than the scratch holds, and still only right rows. Method: SGLang's scheduler with HiSparse on the
CPU; histories lie on the host, their next turns arrive together, each of them as long as the scratch; attention reads every position
of every request, window by window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_residency_sound, used_host_tier
from harness.engine import Engine, Handle
from harness.fake_model import WrongRowError
from harness.hisparse import PAGE, engine_for, finish, submit

from sglang_hisparse.capacity import PrefillRule
from sglang_hisparse.transfer.prefix_stream import PrefixStream

DEVICE_PAGES = 40
SCRATCH = 20 * PAGE


@pytest.fixture(autouse=True)
def pages_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes here are short; no union of rows instead of their pages."""
    monkeypatch.setattr(PrefillRule, "fetches_union", lambda *_: False)


def windowed_engine(**changes: Any) -> Any:
    """Pages come back for nobody; turns of up to 128 new tokens are streamed."""
    config = {
        "prefill_scratch_tokens": SCRATCH, "stream_extend_tokens": 128, "promote_mib_per_step": 0,
        "watermark_low": 0.0, "watermark_high": 0.0,
    }  # fmt: skip
    return engine_for(device_pages=DEVICE_PAGES, ratio=6, config=config, **changes)


def histories_on_host(engine: Engine, lengths: list[int]) -> list[Handle]:
    handles = submit(engine, lengths, 12)
    engine.run_until_idle()
    assert engine.coordinator.make_room(DEVICE_PAGES)
    return handles


def next_turns(engine: Engine, histories: list[Handle], output: int = 8) -> list[Handle]:
    return [
        engine.submit([*history.prompt, *history.output, *range(20 + number, 30 + 2 * number)], output)
        for number, history in enumerate(histories)
    ]


def counts(engine: Engine) -> tuple[int, int]:
    """Streamed extends, and the windows of those that had several."""
    counters = used_host_tier(engine)
    return counters["streamed_extends"], counters["streamed_windows"]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
def test_next_turns_of_many_in_one_extend(overlap: bool) -> None:
    """Goal: turns that arrive together are prefilled together. Method: four histories of 16 to 18 pages, a scratch of 20."""
    with windowed_engine(overlap=overlap) as engine:
        histories = histories_on_host(engine, [1000, 1100, 1050, 1080])
        before = counts(engine)
        turns = next_turns(engine, histories)
        engine.run_until(lambda: all(turn.output for turn in turns))
        extends, windows = (after - start for after, start in zip(counts(engine), before, strict=True))
        assert extends == 1 and windows == 4 == engine.model.counters.windows_read // engine.model.num_layers
        assert_residency_sound(engine)
        engine.run_until_idle()
        assert_outputs(turns)
        assert all(turn.cached_tokens >= 960 for turn in turns)
        finish(engine)


def test_small_ones_share_a_window_and_a_large_resident_one_has_its_own() -> None:
    """Goal: windows hold as much as fits; who is all on the device and larger than the scratch reads the pool. Method: short
    histories on the host, and a fresh prompt of 24 pages in the same batch."""
    with windowed_engine() as engine:
        histories = histories_on_host(engine, [500, 1200, 400])
        before = counts(engine)
        turns = next_turns(engine, histories[:2])
        large = submit(engine, [24 * PAGE - 9], 8, seed=9)[0]
        turns += next_turns(engine, histories[2:])
        engine.run_until_idle()
        assert_outputs([*turns, large])
        extends, windows = (after - start for after, start in zip(counts(engine), before, strict=True))
        assert extends >= 1 and windows >= 2
        finish(engine)


def test_few_new_tokens_fetch_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: each window fetches pages or selected rows by its own new tokens. Method: turns of 13, 14 and 16 new
    tokens, rows up to 14."""
    monkeypatch.setattr(PrefillRule, "fetches_union", lambda rule, new_tokens, host_rows: new_tokens <= 14)
    with windowed_engine() as engine:
        histories = histories_on_host(engine, [1015, 1143, 1080])
        before = used_host_tier(engine)
        turns = next_turns(engine, histories)
        engine.run_until_idle()
        assert_outputs(turns)
        gained = {name: count - before[name] for name, count in used_host_tier(engine).items()}
        new = [len(turn.prompt) - turn.cached_tokens for turn in turns]
        assert gained["streamed_windows"] == 3 and gained["streamed_unions"] == sum(count <= 14 for count in new)
        assert 0 < gained["streamed_unions"] < 3, new
        finish(engine)


def test_one_at_a_time_where_attention_cannot_be_cut() -> None:
    """Goal: another prefill backend streams as many as the scratch holds. Method: the rule without windows, the same load."""
    with windowed_engine() as engine:
        engine.coordinator.extends.rule = replace(engine.coordinator.extends.rule, has_windows=False)
        histories = histories_on_host(engine, [1000, 1100, 1050])
        before = counts(engine)
        turns = next_turns(engine, histories)
        engine.run_until_idle()
        assert_outputs(turns)
        assert [after - start for after, start in zip(counts(engine), before, strict=True)] == [3, 0]
        finish(engine)


@pytest.mark.parametrize("looks", [True, False])
def test_a_turn_over_a_resident_prefix_does_not_wait_for_a_whole_prefix(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what the ledger cannot promise to keep on the device is streamed at need, not put off until others end. Method: four
    histories on the host, a fifth of 12 pages on a device of 40; its next turn comes last. A rule that does not look at the
    ledger lets it wait."""
    if not looks:
        original = PrefillRule.decide
        monkeypatch.setattr(PrefillRule, "decide", lambda rule, *args, **given: original(rule, *args, **given | {"free_pages": None}))
    with windowed_engine(overlap=False) as engine:
        histories = histories_on_host(engine, [900, 910, 920, 930])
        histories += submit(engine, [12 * PAGE - 20], 12, seed=7)
        engine.run_until_idle()
        turns = next_turns(engine, histories, 30)
        engine.run_until(lambda: len(turns[0].output) >= 4)
        assert [bool(turn.output) for turn in turns] == [True] * 4 + [looks]
        assert_residency_sound(engine)
        engine.run_until_idle()
        assert_outputs(turns)
        finish(engine)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_abort_of_one_of_the_batch(at: int) -> None:
    """Goal: the others go on. Method: the client of each of three turns leaves right after their extend."""
    with windowed_engine() as engine:
        turns = next_turns(engine, histories_on_host(engine, [1000, 1100, 1050]), 20)
        engine.run_until(lambda: all(turn.output for turn in turns))
        engine.abort(turns[at])
        engine.run_until_idle()
        assert_outputs([turn for turn in turns if turn is not turns[at]])
        assert turns[at].finish_reason == "abort"
        finish(engine)


# ---- the checks bite -------------------------------------------------------------------------------------------------


def half_overwritten_early(stream: PrefixStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half is fetched into before its reader was launched."""
    original = stream._stage_next

    def stage_next() -> None:
        original()
        if stream.windows:
            stream._fetch(stream._extend.staged + 2)

    monkeypatch.setattr(stream, "_stage_next", stage_next)


def table_of_the_first_window(stream: PrefixStream, monkeypatch: pytest.MonkeyPatch) -> None:
    original = stream._show
    monkeypatch.setattr(stream, "_show", lambda pages: original(stream._extend.windows[0] if stream.windows else pages))


def windows_cut_one_token_late(stream: PrefixStream, monkeypatch: pytest.MonkeyPatch) -> None:
    original = stream.begin_windows

    def begin(windows: Any) -> None:
        original(windows)
        stream._extend.spans = [(first + 11, last + 11) for first, last in stream._extend.spans]

    monkeypatch.setattr(stream, "begin_windows", begin)


@pytest.mark.parametrize(
    "plant", [half_overwritten_early, table_of_the_first_window, windows_cut_one_token_late], ids=lambda plant: plant.__name__
)
def test_planted_bug_is_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the judge sees what windows can do wrong. Method: plant one bug; turns that come together must fail."""
    with windowed_engine() as engine:
        histories = histories_on_host(engine, [1000, 1100, 1050])
        plant(engine.coordinator.extends.stream, monkeypatch)
        next_turns(engine, histories)
        with pytest.raises(WrongRowError):
            engine.run_until_idle()
