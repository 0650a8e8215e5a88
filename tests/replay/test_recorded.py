"""Goal: a recording drives the engine and the policies. Method: one made of a profile, one that a server on the CPU wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from harness.engine import make_scheduler
from typer.testing import CliRunner

from sglang_hisparse.cli import app
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.recording import recorder
from sglang_hisparse.recording.format import Header, RecordingError, Step, pack
from sglang_hisparse.recording.reader import read_recording
from sglang_hisparse.recording.writer import RecordingWriter
from sglang_hisparse.replay.figures import ReplayReport
from sglang_hisparse.replay.history import rolling_mean, rolling_ratio
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.policy_table import PolicyReport
from sglang_hisparse.replay.profiles import PROFILES
from sglang_hisparse.replay.recorded import RecordedStream, RecordedWorkload, recorded_options

TOP_K, GROUPS, STEPS, STARTS = 64, (0, 2, 4), 40, (700, 1100, 300)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three requests of three groups, the `paper` profile; the last one begins late, one step was dropped."""
    path = tmp_path_factory.mktemp("recording") / "trace.topk"
    header = Header("0.1.0", "0.5.23", "some/model", top_k=TOP_K, page_size=64, groups=GROUPS)
    streams = [
        [
            PROFILES["paper"].stream(num_positions=start, top_k=TOP_K, rng=np.random.default_rng([start, group]))
            for start in STARTS
        ]
        for group in GROUPS
    ]
    writer = RecordingWriter(path, header)
    for step in range(STEPS):
        there = [0, 1] if step < 5 else [0, 1, 2]
        sets = np.stack([[_next(row[number]) for number in there] for row in streams])
        lens = tuple(STARTS[number] + 1 + step - 5 * (number == 2) for number in there)
        if step != 7:
            counts, positions = pack(sets, lens)
            writer.write(Step(step, tuple(there), lens, counts, positions))
    writer.close(1, "the test has ended")
    return path


def _next(stream: object) -> np.ndarray:
    stream.append()
    return stream.select()


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def test_stream_selects_what_was_recorded(recording: Path) -> None:
    """Goal: lengths decide which set is given; a lost step repeats the one before. Method: walk one request, also in pieces."""
    read = read_recording(recording)
    request = read.requests()[1]
    for start in (1100, 1103, 1106, 1120):
        stream = RecordedStream(read, request, 1, start)
        for length in range(start + 1, 1141):
            stream.append()
            known = max(seq_len for seq_len in request.seq_lens if seq_len <= length)
            index = request.seq_lens.index(known)
            assert np.array_equal(stream.select(), read.positions(request.steps[index], 1, request.places[index]))
            assert known == (length if length != 1108 else 1107)


def test_workload_brings_each_request_once(recording: Path) -> None:
    """Goal: prompts and ends are those of the recording. Method: ask for arrivals until there are none."""
    read = read_recording(recording)
    options = recorded_options(ReplayOptions(), read, buffer_size=None, device_pages=None)
    workload, found = RecordedWorkload(options, read), []
    while workload.num_left:
        request = workload.arrival(None, None, set())
        found.append((request.prompt_tokens, request.goal_tokens))
    assert found == [(700, 740), (1100, 1140), (300, 335)]
    assert (options.top_k, options.buffer_size, options.max_requests, options.num_groups) == (64, 128, 3, 2)


def test_command_replays_a_recording_with_plots(recording: Path, tmp_path: Path) -> None:
    """Goal: right bytes, under pressure, and three plots. Method: the command on a small pool; the numbers of its JSON."""
    json, plots = tmp_path / "out" / "replay.json", tmp_path / "plots"
    output = run(
        "--stream", recording, "--row-bytes", 16, "--device-pages", 30, "--groups", 3, "--json", json, "--plot", plots
    )
    report = msgspec.json.decode(json.read_bytes(), type=ReplayReport)
    assert report.ok and report.total.finished == 3 and report.parameters["stream"] == "trace.topk"
    (profile,) = report.profiles
    assert profile.name == "recording" and profile.rows_hot > profile.rows_fetched > 0
    # Results come one step late: each request decodes once more than it needs.
    assert profile.rows == (2 * STEPS + 35 + len(STARTS)) * len(GROUPS) * TOP_K
    assert report.phases[0].name == "recording" and report.total.pages_spilled > 0
    for name in ("misses", "residency", "bytes"):
        assert (plots / f"{name}.png").read_bytes().startswith(PNG) and f"{name}.png" in output


def test_command_compares_policies_on_a_recording(recording: Path, tmp_path: Path) -> None:
    """Goal: the same rates as the profile that was recorded. Method: LRU at 2k and 4k rows; Belady below; a plot."""
    json, plots = tmp_path / "policies.json", tmp_path / "plots"
    output = run("--stream", recording, "--policies", "--json", json, "--plot", plots)
    report = msgspec.json.decode(json.read_bytes(), type=PolicyReport)
    rates = {(row.buffer, row.policy): row.miss_rate for row in report.rows}
    assert (report.streams, report.streams_there) == (9, 9)
    assert 0.13 < rates[128, "lru"] < 0.20 and rates[256, "lru"] < 0.13  # buffers fill in the 40 steps that there are
    assert rates[128, "turnover"] == pytest.approx(rates[128, "lru"], abs=0.01)
    assert all(rates[buffer, "belady"] <= rate for (buffer, _), rate in rates.items())
    assert (plots / "misses-recording.png").read_bytes().startswith(PNG) and "turnover" in output


def test_command_compares_policies_on_a_profile(tmp_path: Path) -> None:
    """Goal: --policies works without a recording. Method: a score profile, which has index_score too."""
    json = tmp_path / "policies.json"
    run(
        "--policies",
        "--profile",
        "smB",
        "--top-k",
        64,
        "--buffer",
        128,
        "--scale",
        0.2,
        "--max-context",
        4096,
        "--json",
        json,
    )
    report = msgspec.json.decode(json.read_bytes(), type=PolicyReport)
    assert {row.policy for row in report.rows} == {
        "lru",
        "turnover",
        "fifo",
        "random",
        "clock",
        "belady",
        "index_score",
    }
    assert {row.buffer for row in report.rows} == {128, 256} and {row.profile for row in report.rows} == {"smB"}


def test_command_plots_a_synthetic_run(tmp_path: Path) -> None:
    """Goal: --plot needs no recording. Method: a small standard script."""
    run("--scale", 0.1, "--top-k", 32, "--buffer", 64, "--row-bytes", 16, "--device-pages", 140, "--min-context", 256,
        "--max-context", 2048, "--max-output", 32, "--requests", 4, "--plot", tmp_path)  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes.png", "misses.png", "residency.png"]


def test_refusals(recording: Path, tmp_path: Path) -> None:
    """Goal: what does not fit a recording is refused. Method: another top_k, an empty recording."""
    result = CliRunner().invoke(app, ["replay", "--stream", str(recording), "--top-k", "32"])
    assert isinstance(result.exception, ConfigError) and "--top-k: 32" in str(result.exception)
    empty = tmp_path / "empty.topk"
    RecordingWriter(empty, Header("0.1.0", "0.5.23", "m", 64, 64, (0,))).close(0, "nothing came")
    result = CliRunner().invoke(app, ["replay", "--stream", str(empty)])
    assert isinstance(result.exception, RecordingError) and "no step" in str(result.exception)


def test_cut_file_ends_with_status_2_and_partial_takes_it(recording: Path, tmp_path: Path) -> None:
    """Goal: one clear line for a person, status 2 for a machine. Method: the program itself on half a file."""
    half = tmp_path / "half.topk"
    half.write_bytes(recording.read_bytes()[: recording.stat().st_size // 2])
    command = [sys.executable, "-m", "sglang_hisparse.cli", "replay", "--policies", "--stream", str(half)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "RecordingError" in line and "is truncated after" in line and "Traceback" not in ended.stderr
    assert "turnover" in run("--policies", "--stream", half, "--partial")


def test_recording_of_a_scheduler_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: from a running server to a figure. Method: SGLang's scheduler on the CPU records; the command replays its file."""
    monkeypatch.setattr(recorder, "RING", 64)  # a busy machine drops no step
    path = tmp_path / "server.topk"
    config = {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4, "record_file": str(path)}
    rng = np.random.default_rng(0)
    with make_scheduler(config, overlap=True, radix=True, index_topk_freq=2, device_tokens=32 * 64) as engine:
        handles = [engine.submit(rng.integers(10, 1000, length).tolist(), 24) for length in (600, 500, 450, 900)]
        engine.run_until_idle()
        assert all(len(handle.output) == 24 for handle in handles)
        engine.coordinator.destroy()
    read = read_recording(path)
    lengths = sorted((request.seq_lens[0], request.seq_lens[-1]) for request in read.requests())
    assert lengths == [(length + 1, length + 23) for length in (450, 500, 600, 900)]
    assert all(len(request.steps) == 23 for request in read.requests()) and read.dropped == 0
    assert "0 mismatches" in run("--stream", path, "--row-bytes", 16)


def test_rolling_figures_by_hand() -> None:
    """Goal: the window is what it says. Method: three values worked out by hand."""
    assert rolling_mean(np.array([1.0, np.nan, 3.0, 5.0]), 2).tolist() == [1.0, 1.0, 3.0, 4.0]
    ratio = rolling_ratio(np.array([0, 1, 1, 0]), np.array([0, 2, 1, 0]), 2)
    assert np.isnan(ratio[0]) and ratio[1:].tolist() == [0.5, 2 / 3, 1.0]
