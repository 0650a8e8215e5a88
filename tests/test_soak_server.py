"""Tests of the soak without a GPU: fake servers that abort, pause and flush, and misbehave in every way it must notice."""

import json
import os
import pathlib
import random
import shlex
import time
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import fake_sglang
import soak_server
from serving import fidelity, soak_load
from serving.soak_load import Question, Tally, Texts


def _arguments(folder: pathlib.Path, *extra: str) -> list[str]:
    if not (folder / "site").exists():
        (folder / "arguments").write_text(shlex.join(fake_sglang.arguments(folder)))
    return [
        str(folder / "model"), "--state", str(folder / "state"), "--out", str(folder / "out"), "--minutes", "0.07",
        "--pool-tokens", "4000", "--longest", "600", "--compare-from", "40", "--known", "8", "--most-output", "20", "--pinned-gib", "0",
        *shlex.split((folder / "arguments").read_text()), *extra,
    ]  # fmt: skip


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble as often as a few seconds of load need it, and no waiting for a statistics file that is always current."""
    mix = soak_load.Mix

    def rough(tokens: int, most_output: int, compare_from: int) -> soak_load.Mix:
        return mix(
            tokens,
            most_output,
            compare_from=compare_from,
            pause_every_s=0.5,
            pause_longest_s=0.1,
            flush_every_s=0.4,
            abort_share=0.2,
        )

    monkeypatch.setattr(soak_server, "Mix", rough)
    monkeypatch.setattr(fidelity.settled_counters, "__defaults__", (0.05,))
    monkeypatch.setenv("FAKE_DELAY", "0.01")


def _broken(folder: pathlib.Path) -> list[str]:
    document = json.loads((folder / "out" / "soak_h200.json").read_text())
    return [one["what"] for one in document["demands"] if not one["held"]]


def test_soak_holds_on_a_server_that_behaves(tmp_path: pathlib.Path, hurried: None) -> None:
    """Goal: every kind of request and trouble happens, and all is answered. Method: seconds against fake servers."""
    assert soak_server.main(_arguments(tmp_path)) == soak_server.HELD, _broken(tmp_path)
    document = json.loads((tmp_path / "out" / "soak_h200.json").read_text())
    requests = document["requests"]
    assert document["held"] and document["setting"]["tokens_in_flight"] == 8000 and requests["failures"] == []
    kinds = ("finished", "aborted_by_client", "aborted_by_pause", "disconnected")
    assert all(requests[kind] > 0 for kind in kinds), requests
    assert sum(requests[kind] for kind in kinds) == requests["sent"] and requests["failed"] == 0
    assert all(count > 0 for count in requests["pauses"].values())
    assert requests["checked_answers"] > 10 and requests["retractions"] > 0 and requests["cached_tokens"] > 0
    assert requests["flushes_granted"] + requests["flushes_refused"] > 3
    assert 8000 - 620 < requests["most_tokens_in_flight"] < 8000 + 620
    assert (
        document["exit_s_soak"] < 10 and json.loads((tmp_path / "out" / "progress.json").read_text())["phase"] == "done"
    )


@pytest.mark.parametrize(
    ("fault", "value", "noticed"),
    [
        ("FAKE_WRONG_AFTER", "2", "answers differ from plain's"),
        ("FAKE_DROPS", "9", "every request answered"),
        ("FAKE_MISMATCHES", "3", "3 mismatches"),
        ("FAKE_LEAK", "2", "pools empty at the end"),
        ("FAKE_SLOW_EXIT", "1", "ended after SIGTERM"),
        ("FAKE_RAISES", "9", "RuntimeError: lost a page"),
    ],
)
def test_soak_notices(
    fault: str, value: str, noticed: str, tmp_path: pathlib.Path, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no demand is an empty one. Method: one misbehaviour of the fake server at a time."""
    monkeypatch.setenv(fault, value)
    monkeypatch.setattr(soak_server, "EXIT_SECONDS", 0.6)
    assert soak_server.main(_arguments(tmp_path, "--minutes", "0.015")) == soak_server.NOT_HELD
    assert any(noticed in what for what in _broken(tmp_path)), _broken(tmp_path)


def test_server_that_ends_while_it_serves(
    tmp_path: pathlib.Path, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: requests lost by an abrupt end, and memory that does not come back, are failures. Method: the third server, which
    pins nothing and drops what it serves."""
    monkeypatch.setenv("FAKE_DELAY", "0.02")
    free = iter((5000.0, 1000.0, 1100.0))
    monkeypatch.setattr(soak_server, "available_host_gib", lambda: next(free))
    args = _arguments(tmp_path, "--minutes", "0.02", "--pinned-gib", "4000", "--known", "2", "--most-output", "6")
    assert soak_server.main(args) == soak_server.NOT_HELD
    broken = _broken(tmp_path)
    assert any("pinned: 0 of 4 requests answered while it ended" in what for what in broken), broken
    assert "100.0 GiB of host memory came back" in broken
    assert not any(what.startswith("pinned ended") for what in broken)


def test_detached_soak_is_collected(tmp_path: pathlib.Path) -> None:
    """Goal: a soak outlives the call that started it, and its state can be asked for. Method: start, look, end, look."""
    args = _arguments(tmp_path, "--minutes", "5")
    collect = [
        "--state",
        str(tmp_path / "state"),
        "--out",
        str(tmp_path / "out"),
        "--commit",
        "abc",
        "--collect",
        "--wait",
    ]
    assert soak_server.main([*args, "--detach"]) == soak_server.HELD
    pid = int((tmp_path / "state" / "pid").read_text())
    assert os.getsid(pid) == pid != os.getsid(0)
    deadline = time.monotonic() + 30
    while _phase(tmp_path) != "load" and time.monotonic() < deadline:
        assert soak_server.main([*collect, "0"]) == soak_server.BUSY
        time.sleep(0.2)
    assert _phase(tmp_path) == "load"
    os.kill(pid, 15)
    assert soak_server.main([*collect, "20"]) == soak_server.DIED
    assert "ready" in (tmp_path / "out" / "end-of-soak.log").read_text()


def _phase(folder: pathlib.Path) -> str:
    path = folder / "state" / "progress.json"
    return json.loads(path.read_text())["phase"] if path.exists() else ""


def test_soak_whose_servers_do_not_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a failed start ends the soak with its reason. Method: fake servers that exit."""
    monkeypatch.setenv("FAKE_BROKEN", "soak")
    assert soak_server.main(_arguments(tmp_path)) == soak_server.NOT_HELD
    assert "out of patience" in _broken(tmp_path)[-1]


def _settled(question: Question, **reply: Any) -> Tally:
    tally = Tally(sent=1)
    for name, value in reply.items():
        setattr(question.reply, name, value)
    tally.settle(question, 1.0)
    return tally


@pytest.mark.parametrize(
    ("stop", "may_abort", "reply", "count"),
    [
        ("", False, {"tokens": [1, 2], "finish": "length"}, "finished"),
        ("abort", False, {"tokens": [1, 2], "finish": "length"}, "finished"),
        ("abort", False, {"tokens": [1], "finish": "abort"}, "aborted_by_client"),
        ("", True, {"tokens": [], "finish": "abort"}, "aborted_by_pause"),
        ("disconnect", False, {"tokens": [1], "error": "disconnected"}, "disconnected"),
        ("", False, {"tokens": [1], "finish": "abort"}, "failed"),
        ("", False, {"tokens": [1], "finish": "length"}, "failed"),
        ("", True, {"tokens": [1, 2], "finish": ""}, "failed"),
        ("abort", False, {"tokens": [], "error": "not answered in time"}, "failed"),
        ("", True, {"tokens": [], "error": "HTTP 500: out of memory"}, "failed"),
    ],
)
def test_every_end_has_its_count(stop: str, may_abort: bool, reply: dict[str, Any], count: str) -> None:
    """Goal: an end that nobody asked for is a failure. Method: each kind of reply by hand."""
    tally = _settled(Question([5], 2, stop=stop, may_abort=may_abort), **reply)
    counts = {name: getattr(tally, name) for name in
              ("finished", "aborted_by_client", "aborted_by_pause", "disconnected", "failed")}  # fmt: skip
    assert {name for name, number in counts.items() if number} == {count}
    assert tally.answered == (count != "failed")


def test_answers_are_held_against_the_front_of_what_is_expected() -> None:
    """Goal: a cut answer is right as far as it goes. Method: cut, changed and empty answers."""

    def wrong(tokens: list[int], finish: str = "abort") -> int:
        return _settled(Question([5], 4, [1, 2, 3, 4], "abort"), tokens=tokens, finish=finish).wrong_answers

    assert [wrong([1, 2]), wrong([]), wrong([1, 2, 3, 4], "length")] == [0, 0, 0]
    assert wrong([1, 9]) == 1


@pytest.mark.parametrize(("taken", "returned", "demands"), [(64.2, 63.0, [True]), (64.2, 9.0, [False]), (0.4, 0.1, [])])
def test_returned_memory(taken: float, returned: float, demands: list[bool], tmp_path: pathlib.Path) -> None:
    """Goal: memory is demanded back where it can be seen. Method: figures of three machines, one of which shows nothing."""
    soak = soak_server.Soak(soak_server.parse_arguments([str(tmp_path), "--commit", "abc"]))
    soak_server.note_returned_memory(soak, taken=taken, returned=returned)
    assert [one["held"] for one in soak.demands] == demands
    assert soak.found["host_memory_returned_gib"] == returned


def test_prompts_share_prefixes_of_any_length() -> None:
    """Goal: the radix tree gets nodes to share and to split. Method: 400 prompts against the families' texts."""
    texts = Texts.make(3, 5000)
    prompts = texts.prompts(400, "a")
    assert prompts == texts.prompts(400, "a") != texts.prompts(400, "b")
    assert 32 <= min(map(len, prompts)) and max(map(len, prompts)) <= 5000
    shared = [max(_common(prompt, family) for family in texts.families) for prompt in prompts]
    assert 100 < sum(length > 8 for length in shared) < 300
    assert len({length % 64 for length in shared}) > 40
    lengths = [soak_load.draw_length(random.Random(seed), 10, 1000) for seed in range(500)]
    assert 180 < sum(length < 100 for length in lengths) < 320


def _common(left: list[int], right: list[int]) -> int:
    return next(
        (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right))
    )


def test_servers_of_the_soak(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """Goal: audit, retractions and pinned memory are asked for. Method: the members, and the commands of a dry run."""
    args = soak_server.parse_arguments([str(tmp_path), "--commit", "abc"])
    members = soak_server.members_of(args)
    assert members["soak"].spec.env == {
        "SGLANG_HISPARSE_AUDIT": "1", "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "150",
    }  # fmt: skip
    assert members["soak"].spec.radix and not members["plain"].spec.hisparse
    assert soak_server.main([str(tmp_path), "--commit", "abc", "--dry-run"]) == 0
    (pinned,) = (line for line in capsys.readouterr().out.splitlines() if "host_pool_gib" in line)
    config = pytest.importorskip("sglang_hisparse.config", reason="the package is not importable")
    text = shlex.split(pinned)[shlex.split(pinned).index("--hisparse-config") + 1]
    assert config.parse_config(text).host_pool_gib == 64 and config.parse_config(text).host_to_device_ratio is None


def test_further_keys_reach_the_server_under_test_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: a soak can be run with any key of the config. Method: --config beside --dry-run; which commands carry it."""
    arguments = _arguments(tmp_path, "--dry-run", "--pinned-gib", "2", "--config", '{"elastic_border": true}')
    assert soak_server.main(arguments) == 0
    carrying = [line for line in capsys.readouterr().out.splitlines() if '"elastic_border": true' in line]
    assert len(carrying) == 1 and '"host_to_device_ratio": 3' in carrying[0]
