"""Tests of the agent benchmark without a GPU: a fake server that caches prefixes answers, the rest is arithmetic."""

import json
import pathlib
import shlex
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import bench_agent
import fake_sglang
from serving import agent, results
from serving.client import Reply


def _bench(folder: pathlib.Path, *extra: str) -> int:
    if not (folder / "site").exists():
        (folder / "arguments").write_text(shlex.join(fake_sglang.arguments(folder)))
    return bench_agent.main([
        str(folder / "model"), "--out", str(folder / "out"), "--logs", str(folder / "logs"), "--scale", "0.003",
        "--turns", "3", "--conversations", "1,3", "--identity", "2,2", "--time-limit", "100",
        *shlex.split((folder / "arguments").read_text()), *extra,
    ])  # fmt: skip


def _document(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "agent_h200.json").read_text())


def test_shape_of_the_trace() -> None:
    """Goal: the published trace, scaled, with pages counted. Method: figures by hand."""
    shape = agent.Shape.scaled(0.25)
    assert (shape.turns, shape.first, shape.later, shape.output) == (13, 18540, 188, 55)
    assert shape.final_tokens == 21568  # 18,540 + 12 x 188 + 13 x 55 = 21,511, in pages of 64


def test_prompts_hold_what_came_before() -> None:
    """Goal: a turn's prompt is the last one, its answer, and new tokens. Method: two turns by hand."""
    one, other = agent.conversations(2, agent.Shape(2, 5, 3, 1), 9)
    first = one.ask()
    one.hear([7, 8])
    assert len(first) == 5 and one.ask() == [*first, 7, 8, *one.additions[1]] and len(one.additions[1]) == 3
    assert other.additions != one.additions
    assert agent.conversations(1, agent.Shape(2, 5, 3, 1), 9)[0].additions == one.additions


def test_figures_of_a_turn() -> None:
    """Goal: median TTFT and its spread, throughput over the whole turn, tokens not cached. Method: three replies made by hand."""
    replies = [
        Reply([1] * 4, start, [start + ttft, start + 4], [1, 4], prompt_tokens=100, cached_tokens=cached)
        for start, ttft, cached in ((0.0, 1.0, 64), (0.0, 3.0, 0), (2.0, 2.0, 96))
    ]
    assert agent.condense(replies) == agent.Turn(2.0, 12 / 6, 36 + 100 + 4, 1.0, 3.0)


def _row(system: str, turn: int, ttft_s: float, speed: float, count: int = 16) -> dict[str, Any]:
    values = (count, turn, system, ttft_s, speed, 10)
    return dict(zip(results.AGENT_KEYS, values, strict=True))


def test_totals_and_ratios_compare_the_turns_that_all_have() -> None:
    """Goal: a system that was cut short distorts nothing. Method: rows by hand, one system without its last turn."""
    rows = [_row("ours", 1, 1, 100), _row("ours", 2, 0.1, 200), _row("ours", 3, 9.0, 1)]
    rows += [_row("plain", 1, 1, 100), _row("plain", 2, 0.2, 50), _row("plain", 3, 9, 1)]
    rows += [_row("builtin", 1, 1, 50), _row("builtin", 2, 0.8, 80)]
    rows += [_row("ours", 1, 1, 100, count=1)]
    whole = {(one["conversations"], one["system"]): one for one in agent.totals(rows, {16: 10, 1: 10})}
    assert whole[16, "ours"]["turns"] == 3 and whole[16, "builtin"]["turns"] == 2
    assert whole[16, "builtin"]["output_tok_s"] == pytest.approx(320 / (160 / 50 + 160 / 80), abs=0.1)
    assert whole[16, "plain"]["ttft_s_later"] == pytest.approx(4.6) and whole[1, "ours"]["ttft_s_later"] is None
    (ratio,) = agent.ratios(rows, {16: 10, 1: 10})
    assert (ratio["conversations"], ratio["turns"], ratio["best_other"]) == (16, 2, "plain")
    assert ratio["ttft_over_ours"] == {"plain": 2.0, "builtin": 8.0}
    assert ratio["throughput_over_best_other"] == pytest.approx((320 / 2.4) / (320 / 4.8), abs=0.01)
    rows += [_row("ours_elastic", 1, 1, 400), _row("ours_elastic", 2, 0.05, 800)]
    first, second = agent.ratios(rows, {16: 10, 1: 10})
    assert first == ratio and second["system"] == "ours_elastic" and second["best_other"] == "plain"
    assert second["ttft_over_ours"] == {"plain": 4.0, "builtin": 16.0}


def test_agreement_names_the_first_difference() -> None:
    """Goal: one wrong answer is found. Method: equal transcripts, then one answer changed, then one missing."""

    def group() -> list[agent.Conversation]:
        return [agent.Conversation([], answers=[[1, 2], [3]]), agent.Conversation([], answers=[[4], [5]])]

    assert agent.agreement(group(), group()) == {"answers": 4, "identical": 4, "first_difference": None}
    changed = group()
    changed[1].answers[0] = [9]
    del changed[0].answers[1]
    assert agent.agreement(group(), changed) == {"answers": 3, "identical": 2, "first_difference": [2, 1]}


def test_benchmark_end_to_end_on_fake_servers(tmp_path: pathlib.Path) -> None:
    """Goal: rows in the issue's form for four systems, prefixes found where there is a cache, tokens compared with plain; what servers
    hold once they are warm is not collected while they are measured.
    Method: fake servers started all at once, two calls, the second carrying on the file of the first."""
    assert _bench(tmp_path) == 0
    document = _document(tmp_path)
    rows = {(row["conversations"], row["turn"], row["system"]): row for row in document["rows"]}
    assert len(rows) == 2 * 3 * 4 and all(tuple(row) == results.AGENT_KEYS for row in rows.values())
    for system in bench_agent.DEFAULT_SYSTEMS:  # 2 turns of 2 conversations and 12 prompts
        assert (tmp_path / "logs" / f"agent-{system}.log").read_text().splitlines() == ["gc frozen after 16 requests"]
    assert list(document["settings"]) == ["1", "3"]
    shape = document["settings"]["3"]["shape"]
    assert shape == {"turns": 3, "first": 222, "later": 2, "output": 1}
    assert rows[3, 1, "ours"]["prefilled_tokens"] == 3 * 222
    assert rows[3, 2, "ours"]["prefilled_tokens"] == 3 * 3 == rows[3, 2, "plain_hicache"]["prefilled_tokens"]
    assert rows[3, 2, "builtin"]["prefilled_tokens"] == 3 * 225
    assert {one["conversations"] for one in document["ratios"]} == {1, 3}
    cases = {(one["case"], one["system"]): one for one in document["identity"]}
    assert cases["2 conversations in turn, one request at a time", "ours"]["identical"] == 4
    assert cases["1 at once", "ours"]["identical"] == 3 and document["failures"] == []
    assert _bench(tmp_path, "--conversations", "2", "--identity", "0,0") == 0
    assert len(_document(tmp_path)["rows"]) == 36 and len(_document(tmp_path)["identity"]) == 10


def test_scales_live_side_by_side_and_a_number_measured_anew_begins_anew(tmp_path: pathlib.Path) -> None:
    """Goal: rows of one number of conversations have one setting, others stay. Method: calls of other scales and systems."""
    few = ("--systems", "ours,plain", "--identity", "0,0")
    assert _bench(tmp_path, *few) == 0
    assert _bench(tmp_path, *few, "--conversations", "2", "--scale", "0.02", "--ratio", "3") == 0
    document = _document(tmp_path)
    settings = document["settings"]
    assert list(settings) == ["1", "2", "3"]
    assert {count: (one["scale"], one["ratio"], one["shape"]["output"]) for count, one in settings.items()} == {
        "1": (0.003, 7, 1), "2": (0.02, 3, 4), "3": (0.003, 7, 1),
    }  # fmt: skip
    assert "--scale 0.02" in settings["2"]["command"] and settings["3"]["pools"].keys() == bench_agent.SYSTEMS.keys()
    assert len(document["rows"]) == 3 * 3 * 2 and {one["conversations"] for one in document["ratios"]} == {1, 2, 3}
    # Answers of four tokens, not of one, make the time of three turns.
    (total,) = (one for one in document["totals"] if (one["conversations"], one["system"]) == (2, "plain"))
    speeds = [row["output_tok_s"] for row in document["rows"] if (row["conversations"], row["system"]) == (2, "plain")]
    assert total["wall_s"] == pytest.approx(sum(2 * 4 / speed for speed in speeds), abs=0.006)
    # The same setting: another system is added. Another one: what 3 had goes, with its answers' agreement.
    more = ("--identity", "0,0", "--conversations", "3", "--systems")
    assert _bench(tmp_path, *more, "builtin") == 0
    kept = {(row["conversations"], row["system"]) for row in _document(tmp_path)["rows"]}
    assert {system for count, system in kept if count == 3} == {"ours", "plain", "builtin"}
    assert _bench(tmp_path, *more, "plain", "--scale", "0.004", "--base", str(tmp_path / "none.json")) == 0
    document = _document(tmp_path)
    kept = {(row["conversations"], row["system"]) for row in document["rows"]}
    assert kept == {(1, "ours"), (1, "plain"), (2, "ours"), (2, "plain"), (3, "plain")}
    assert {one["case"] for one in document["identity"]} == {"1 at once", "2 at once"} == set(document["counters"])
    assert [document["settings"][count]["scale"] for count in "123"] == [0.003, 0.02, 0.004]


def test_a_base_without_settings_is_refused(tmp_path: pathlib.Path) -> None:
    """Goal: rows of an unknown setting are not carried over. Method: a file of the older form as base."""
    results.write_json(tmp_path / "old.json", {"setting": {"scale": 1}, "rows": [_row("ours", 1, 1, 1)]})
    assert _bench(tmp_path, "--base", str(tmp_path / "old.json")) == 2
    assert not (tmp_path / "out").exists()


def test_the_committed_file_says_how_each_number_was_made() -> None:
    """Goal: no row without a setting, and totals that follow from it. Method: the committed result file."""
    path = pathlib.Path(bench_agent.__file__).parent / "results" / "agent_h200.json"
    document = json.loads(path.read_text())
    counts = {row["conversations"] for row in document["rows"]}
    assert set(document["settings"]) == {str(count) for count in counts}
    for count, setting in document["settings"].items():
        args = bench_agent.parse_arguments(shlex.split(setting["command"])[2:])
        assert (args.scale, args.ratio) == (setting["scale"], setting["ratio"]) and int(count) in args.conversations
        assert agent.Shape.scaled(setting["scale"], setting["shape"]["turns"]) == agent.Shape(**setting["shape"]), count
    assert document["totals"] == agent.totals(document["rows"], agent.outputs_of(document))
    assert document["ratios"] == agent.ratios(document["rows"], agent.outputs_of(document))


def test_wrong_tokens_and_lack_of_time_show(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the comparison can fail, and a call without time keeps what it has. Method: a server that errs; no seconds."""
    monkeypatch.setenv("FAKE_WRONG_AFTER", "0")
    assert _bench(tmp_path, "--conversations", "1") == 0
    cases = {(one["case"], one["system"]): one for one in _document(tmp_path)["identity"]}
    assert cases["1 at once", "ours"]["first_difference"] == [1, 1]
    assert cases["1 at once", "builtin"]["first_difference"] is None
    assert _bench(tmp_path, "--conversations", "8", "--time-limit", "16") == 3
    assert {row["conversations"] for row in _document(tmp_path)["rows"]} == {1}


def test_memory_limits_are_those_that_are_stated(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """Goal: each server gets its system's limits. Method: the commands of a dry run."""
    assert bench_agent.main([str(tmp_path), "--out", str(tmp_path), "--commit", "abc", "--dry-run"]) == 0
    lines = {word: line for line in capsys.readouterr().out.splitlines() for word in ("--enable-hier", "--disable-radix")
             if word in line}  # fmt: skip
    assert (
        "--max-total-tokens 112000" in lines["--enable-hier"] and "--max-total-tokens 69248" in lines["--disable-radix"]
    )
    ratio = float(lines["--enable-hier"].split("--hicache-ratio ")[1].split()[0])
    assert 112_000 * ratio == pytest.approx(7 * 69_248, abs=100)


def test_the_elastic_border_begins_with_plains_tokens(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """Goal: both of ours have equal memory and equal logical tokens. Method: the commands and pools of a dry run."""
    assert _bench(tmp_path, "--systems", "ours,ours_elastic", "--plain-tokens", "64000", "--dry-run") == 0
    fixed, elastic, _ = capsys.readouterr().out.splitlines()
    assert "--max-total-tokens 64000" in elastic and '"elastic_border": true' in elastic
    assert "--max-total-tokens 64000" not in fixed and '"elastic_border": false' in fixed
    pools = bench_agent.pools_of(bench_agent.parse_arguments([str(tmp_path), "--out", str(tmp_path), "--commit", "x"]))
    assert pools["ours"].logical_tokens == pools["ours_elastic"].logical_tokens
    assert pools["ours"].gpu_bytes == pools["ours_elastic"].gpu_bytes


def test_picture(tmp_path: pathlib.Path) -> None:
    """Goal: a result can be drawn, an empty one is refused. Method: rows by hand, through the command line."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [_row(system, turn, 0.1 * turn, 100) for system in ("ours", "plain") for turn in (1, 2)]
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({"rows": rows, "totals": agent.totals(rows, {16: 10})}))
    assert bench_agent.main(["--plot", str(path)]) == 0
    assert (tmp_path / "agent.png").read_bytes()[:4] == b"\x89PNG"
    path.write_text(json.dumps({"rows": [], "totals": []}))
    with pytest.raises(ValueError, match="no rows"):
        bench_agent.main(["--plot", str(path)])


def test_restart_finds_what_was_stored(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: prefill after a restart is bounded by what is new, and a server that forgets fails. Method: a fake server that
    keeps its cache in the storage folder, or does not."""
    restart = ("--restart", '{"storage_backend": "file"}', "--restart-after", "1", "--restart-settle", "0.3")
    monkeypatch.setattr(bench_agent.agent_restart, "COUNTERS_SECONDS", 0.0)
    assert _bench(tmp_path, "--conversations", "2", *restart) == 0
    found = _document(tmp_path)["restart"]
    assert found["found"] and found["stored_bytes"] > 0
    assert [row["turn"] for row in found["turns_before"]] == [1] and [row["turn"] for row in found["turns_after"]] == [
        2,
        3,
    ]
    assert found["turns_after"][0]["prefilled_tokens"] == 2 * 3 and found["turns_after"][0]["prompt_tokens"] == 2 * 225
    assert found["agreement_with_plain"] == {"answers": 6, "identical": 6, "first_difference": None}
    monkeypatch.setenv("FAKE_FORGETS", "1")
    assert _bench(tmp_path, "--conversations", "2", *restart) == 1
    assert _document(tmp_path)["restart"]["turns_after"][0]["prefilled_tokens"] == 2 * 225


def test_a_restart_needs_both_servers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: a server that does not start is named, instead of a later failure. Method: the fake of plain SGLang dies at start."""
    monkeypatch.setenv("FAKE_BROKEN", "plain")
    restart = ("--restart", '{"storage_backend": "file"}', "--restart-after", "1", "--restart-settle", "0.3")
    assert _bench(tmp_path, "--conversations", "2", *restart) == 1
    printed = capsys.readouterr().out
    assert "not every server started" in printed and "agent-plain ended with code 7" in printed
