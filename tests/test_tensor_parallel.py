"""Goal: ranks of one server take equal decisions. Method: two processes with tensor parallel 2 over gloo, step by step.

Lives and what differs between the ranks in each: tensor_parallel.py, which is run once for all tests of this file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tensor_parallel import LIVES
from two_ranks import PAGE, RANKS

FOLDER = Path(__file__).parent
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Lines]]:
    """By life: each rank's decisions, a line a step."""
    folder = tmp_path_factory.mktemp("ranks")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(FOLDER.parent), str(FOLDER)]))
    program = [sys.executable, str(FOLDER / "tensor_parallel.py"), str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            process.wait(timeout=400)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    found = {name: [_read(folder / f"{name}.{rank}") for rank in range(RANKS)] for name in LIVES}
    return {**found, "folder": [[{"path": str(folder)}]]}


def _read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _steps(ranks: list[Lines]) -> list[Lines]:
    """The steps alone; no rank has failed, and each has made as many."""
    for lines in ranks:
        assert lines, "a rank has left no trace"
        assert "error" not in lines[-1], lines[-1]["error"]
    steps = [[line for line in lines if "counts" in line] for lines in ranks]
    assert len(steps[0]) == len(steps[1]) > 50
    return steps


def _first_difference(steps: list[Lines], keys: tuple[str, ...] = ()) -> str | None:
    """Step and key at which the ranks part; None: they never do."""
    for number, lines in enumerate(zip(*steps, strict=True)):
        for key in keys or lines[0]:
            if any(line[key] != lines[0][key] for line in lines):
                return f"step {number}: {key}: {[line[key] for line in lines]}"
    return None


def _last_counts(steps: list[Lines]) -> dict[str, int]:
    return steps[0][-1]["counts"]


def test_copy_timing_decides_nothing(traces: dict[str, list[Lines]]) -> None:
    """Goal: ranks agree whatever their links do (R30). Method: links of two speeds; tables, queues, counts each step."""
    steps = _steps(traces["links_of_two_speeds"])
    assert _first_difference(steps) is None
    counts = _last_counts(steps)
    assert counts["pages_spilled"] > 20 and counts["pages_promoted"] > 0 and counts["leases_acquired"] > 0
    assert all(reason is not None for reason in steps[0][-1]["ended"].values())


def test_failed_copies_part_no_ranks(traces: dict[str, list[Lines]]) -> None:
    """Goal: a copy that fails on one rank is made there (R30). Method: other failures on each rank, equal decisions."""
    ranks = traces["a_link_that_fails_on_each_rank"]
    steps = _steps(ranks)
    assert _first_difference(steps) is None
    fired = [lines[-1]["told"] for lines in ranks]
    assert fired[0] != fired[1] and all(one["copy_fail"] > 5 and one["copy_delay"] > 5 for one in fired)
    assert _last_counts(steps)["copies_failed"] == 0


def test_failures_given_back_would_part_them(traces: dict[str, list[Lines]]) -> None:
    """Goal: the test above can fail. Method: the same life with what a single rank does with a failed copy."""
    assert _first_difference(_steps(traces["failures_given_back"]), ("tables",)) is not None


def test_one_rank_measures_for_all(traces: dict[str, list[Lines]]) -> None:
    """Goal: admission by measured times is equal (R30). Method: clocks that differ, read on the first rank alone."""
    steps = _steps(traces["a_gate_measured_on_one_rank"])
    assert _first_difference(steps) is None
    assert steps[0][-1]["figures"][0] > 0, "nothing was measured"
    assert _last_counts(steps)["admission_waits"] > 0
    assert any(any(line["misses"]) for line in steps[0]), "promotion was never ordered by misses"


def test_own_measurements_would_part_them(traces: dict[str, list[Lines]]) -> None:
    """Goal: the test above can fail. Method: each rank believes its own clock and its own counts."""
    assert _first_difference(_steps(traces["a_gate_on_each_rank"]), ("figures",)) is not None
    assert _first_difference(_steps(traces["a_gate_on_each_rank"]), ("misses",)) is not None


def test_a_border_moves_on_all_ranks_in_one_step(traces: dict[str, list[Lines]]) -> None:
    """Goal: R30 where memory moves. Method: ranks that see their streams pass at other times; tables, queues, counts each step."""
    ranks = traces["a_border_seen_at_two_speeds"]
    assert _first_difference(_steps(ranks)) is None
    first, second = (lines[-1]["told"] for lines in ranks)
    assert first == second and first["border_steps"] > 2 and first["border_chunks_moved"] > 20
    home, other = ([lines[-1]["places"], lines[-1]["returns"]] for lines in ranks)
    assert home == other and home[1] == 1 and home[0][-1][:2] == [0, 32], "after a flush it goes back, on all ranks in one step"


def test_a_border_seen_by_each_rank_would_part_them(traces: dict[str, list[Lines]]) -> None:
    """Goal: the test above can fail. Method: each rank goes on by what it has seen itself."""
    for lines in (ranks := traces["a_border_seen_by_each_rank_alone"]):
        assert lines, "a rank has left no trace"
    steps = [[line for line in lines if "counts" in line] for lines in ranks]
    shared = min(map(len, steps))
    assert len(steps[0]) != len(steps[1]) or _first_difference([lines[:shared] for lines in steps]) is not None


def test_prompts_are_judged_alike(traces: dict[str, list[Lines]]) -> None:
    """Goal: cached prefixes are given up, and the border goes back under load, on all ranks in one step. Method: as above; the border's
    place, the verdict and the cache at each step; verdicts in both directions."""
    ranks = traces["prompts_that_do_not_return"]
    steps = _steps(ranks)
    assert _first_difference(steps) is None
    first, second = (lines[-1]["told"] for lines in ranks)
    assert first == second and first["border_returns"] > 1 and first["most_steps"] > first["border_steps"] + 3, first
    verdicts = [line["border"][3] for line in steps[0]]
    assert sum(before != after for before, after in pairwise(verdicts)) > 1


def test_windows_are_the_same_on_all_ranks(traces: dict[str, list[Lines]]) -> None:
    """Goal: what is streamed, and cut how, follows from the books alone. Method: links of two speeds; tables, queues, counts each step."""
    ranks = traces["turns_in_windows"]
    assert _first_difference(_steps(ranks)) is None
    first, second = (lines[-1]["told"] for lines in ranks)
    assert first == second and first[0] >= 3 and first[1] > first[0], "several windows an extend"


def test_questions_of_idleness_have_one_answer(traces: dict[str, list[Lines]]) -> None:
    """Goal: no rank flushes, or takes a health check, by itself. Method: a flush that waits while copies run; all answers."""
    ranks = traces["questions_while_copies_run"]
    assert _first_difference(_steps(ranks)) is None
    told = [[line["told"] for line in lines if "told" in line] for lines in ranks]
    assert told[0] == told[1] and told[0][-1][2] > 5, "flushes were answered"


def test_every_rank_has_a_statistics_file_of_its_own(traces: dict[str, list[Lines]], tmp_path: Path) -> None:
    """Goal: ranks do not write over each other. Method: the files that the first life has left."""
    from sglang_hisparse.stats import rank_file

    assert rank_file(tmp_path / "a.json", None) == tmp_path / "a.json"
    files = sorted(path.name for path in Path(traces["folder"][0][0]["path"]).glob("stats*.json"))
    assert files == ["stats.json", "stats.rank1.json"]


def test_storage_gives_all_ranks_the_same_prefix(traces: dict[str, list[Lines]]) -> None:
    """Goal: a prefetch ends on all ranks in one step. Method: one rank publishes, the other reads slowly."""
    ranks = traces["storage_of_two_speeds"]
    assert _first_difference(_steps(ranks)) is None
    first, second = (lines[-1]["told"] for lines in ranks)
    assert first["cached"] == second["cached"] == [9 * PAGE] * 3
    assert first["storage_pages_published"] == 27 and second["storage_pages_published"] == 0
    assert first["storage_pages_loaded"] == second["storage_pages_loaded"] == 27


def test_one_signal_ends_all_ranks_in_one_iteration(traces: dict[str, list[Lines]]) -> None:
    """Goal: SIGTERM ends no rank alone, and none while another writes. Method: SGLang's process function; a slow storage."""
    from sglang_hisparse.recording.reader import read_recording

    first, second = (lines[-1]["told"] for lines in _without_error(traces["told_to_end"]))
    assert first["iterations"] == second["iterations"] == 60, "the second rank was told at 30, the first at 60"
    assert first["failed"] == second["failed"] == "" and first["released"] and second["released"]
    assert first["forwards"] == second["forwards"] > 50
    assert first["backlog"] > 9 and first["storage_pages_published"] == 27 and first["storage_pages_dropped"] == 0
    folder = Path(traces["folder"][0][0]["path"])
    assert len(read_recording(folder / "told_to_end.recording").steps) > 20
    assert not (folder / "told_to_end.rank1.recording").exists()


def test_with_dp_attention_too(traces: dict[str, list[Lines]]) -> None:
    """Goal: the end reaches ranks that share no requests. Method: the same while idle, two attention ranks in one world."""
    first, second = (lines[-1]["told"] for lines in _without_error(traces["told_to_end_with_dp_attention"]))
    assert first["iterations"] == second["iterations"] == 60
    assert first["failed"] == second["failed"] == "" and first["released"] and second["released"]


def test_ranks_that_end_alone_would_fail(traces: dict[str, list[Lines]]) -> None:
    """Goal: the tests above can fail. Method: each rank leaves its loop by its own signal."""
    first, second = (lines[-1]["told"] for lines in _without_error(traces["each_told_to_end_alone"]))
    assert second["iterations"] == 30 and second["released"] and not second["failed"]
    assert first["failed"] == f"signal {int(signal.SIGQUIT)} to the launcher" and not first["released"]


def _without_error(ranks: list[Lines]) -> list[Lines]:
    for lines in ranks:
        assert lines, "a rank has left no trace"
        assert "error" not in lines[-1], lines[-1]["error"]
    return ranks
