"""Tests of the serving benchmark without a GPU: fake servers answer, the rest is pools, commands, points and result rows."""

import itertools
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import bench_serving
from fake_sglang import free_port, install
from serving import client, fidelity, fleet, link_load, results, server


@pytest.fixture
def fake_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> server.Paths:
    """Paths whose `site` holds a package that answers like SGLang; its counters are current at once."""
    monkeypatch.setattr(fidelity.time, "sleep", lambda seconds: None)
    return server.Paths(
        tmp_path / "model",
        tmp_path / "logs",
        str(install(tmp_path / "site")),
        str(tmp_path / "plugin"),
        str(tmp_path / "cache"),
    )


@pytest.mark.parametrize("system", ["plain", "builtin", "ours"])
def test_systems_differ_only_where_they_should(system: str, tmp_path: pathlib.Path) -> None:
    """Goal: all systems get the same limits, and only ours the plugin. Method: command line and environment of each."""
    spec = bench_serving.SYSTEMS[system]
    paths = server.Paths(tmp_path, tmp_path, "/site", "/plugin", "/cache")
    command, env = server.command_line(spec, paths, server.Limits(), 1), server.environment(spec, paths)
    assert command[command.index("--max-total-tokens") + 1] == "200000"
    assert ("--enable-hisparse" in command) == (system != "plain")
    assert ("--disable-radix-cache" in command) == (system == "builtin")
    assert env["SGLANG_PLUGINS"] == ("hisparse" if system == "ours" else "none")
    assert env["PYTHONPATH"] == ("/plugin:/site" if system == "ours" else "/site")


def _bench(paths: server.Paths, out: pathlib.Path, *extra: str) -> int:
    return bench_serving.main([
        str(paths.model), "--out", str(out), "--logs", str(paths.logs), "--site", paths.site,
        "--plugin", paths.plugin, "--cache", paths.cache, "--port", str(free_port()),
        "--context", "30", "--output", "8", "--concurrency", "1,3", "--commit", "abc",
        "--base", str(out / "none.json"), *extra,
    ])  # fmt: skip


def test_benchmark_end_to_end_on_a_fake_server(fake_paths: server.Paths, tmp_path: pathlib.Path) -> None:
    """Goal: rows of all systems in the issue's form, replaced when measured again. Method: a fake server, two calls."""
    out = tmp_path / "out"
    assert _bench(fake_paths, out) == 0
    logs = [log.read_text() for log in fake_paths.logs.glob("*.log")]
    assert logs == ["gc frozen after 2 requests\n"] * 3, "after the two prompts that warm each of them"
    assert _bench(fake_paths, out, "--systems", "ours") == 0
    document = json.loads((out / "serving_h200.json").read_text())
    head = ["commit", "versions", "command", "stream_interval", "config", "link_load", "ratios", "repeats"]
    assert [key for key in document if key != "rows"] == head and document["repeats"] == []
    assert len(document["rows"]) == 6 and all(tuple(row) == results.SERVING_KEYS for row in document["rows"])
    assert {row["system"] for row in document["rows"]} == {"plain", "builtin", "ours"}
    assert all(row["output_tok_s"] > 0 and row["decode_tok_s"] > 0 for row in document["rows"])
    # One point, measured again in the end, whose ratio follows from the rows.
    assert {(one["concurrency"], one["others"]) for one in document["ratios"]} == {(1, 2), (3, 2)}
    speed = {row["system"]: row["output_tok_s"] for row in document["rows"] if row["concurrency"] == 3}
    (three,) = (one for one in document["ratios"] if one["concurrency"] == 3)
    assert three["ours_over_better"] == round(speed["ours"] / max(speed["plain"], speed["builtin"]), 3)
    assert _bench(fake_paths, out, "--systems", "plain", "--budget", "10") == 1


def test_repeats_take_turns_and_leave_the_median_run(
    fake_paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a row is one whole run, the median one; systems take turns; outputs are points. Method: speeds by hand."""
    order, prompts = [], set()

    def measure(running: server.Server, load: bench_serving.Load, seed: str, timeout_s: float) -> tuple:
        system = running.spec.name.split("-")[1]
        order.append((load.output, system))
        prompts.add(seed)
        speed = [30.0, 10.0, 20.0][sum(one == order[-1] for one in order) - 1] + load.output
        timing = client.Timing(speed, 2 * speed, 1 / speed, 3 * speed)
        return timing, {name: len(order) for name in ("pages_spilled", "rows_fetched")}

    monkeypatch.setattr(bench_serving, "measure", measure)
    arguments = ("--systems", "plain,ours", "--output", "8,9", "--concurrency", "1", "--repeats")
    assert _bench(fake_paths, tmp_path, *arguments, "3", "--stream-interval", "4") == 0
    assert order == 3 * [(8, "plain"), (8, "ours")] + 3 * [(9, "plain"), (9, "ours")] and len(prompts) == 6
    document = json.loads((tmp_path / "serving_h200.json").read_text())
    rows = {(row["output"], row["system"]): row for row in document["rows"]}
    assert len(rows) == len(document["rows"]) == 4 and document["stream_interval"] == 4
    assert [rows[9, "ours"][key] for key in ("output_tok_s", "decode_tok_s", "ttft_s", "itl_ms")] == [29, 58, 0.034, 87]
    assert {(one["output"], tuple(one["output_tok_s"])) for one in document["repeats"]} == {
        (8, (38.0, 18.0, 28.0)),
        (9, (39.0, 19.0, 29.0)),
    }
    # Rows of another interval are not mixed in, from the file itself or from a base, where none is written stands 1.
    before, base = (tmp_path / "serving_h200.json").read_bytes(), tmp_path / "base.json"
    assert _bench(fake_paths, tmp_path, *arguments, "1") == 2
    results.write_json(base, {"rows": []})
    assert _bench(fake_paths, tmp_path / "new", "--stream-interval", "2", "--base", str(base)) == 2
    assert _bench(fake_paths, tmp_path / "new", "--config", '{"device_buffer_size": 2048}', "--base", str(base)) == 2
    assert (tmp_path / "serving_h200.json").read_bytes() == before and not (tmp_path / "new").exists()
    order.clear()
    assert _bench(fake_paths, tmp_path, *arguments, "1", "--stream-interval", "4", "--output", "8") == 0
    repeats = json.loads((tmp_path / "serving_h200.json").read_text())["repeats"]
    assert [one["output"] for one in repeats] == [9, 9]


FAKE_LOAD = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("copying", flush=True)
signal.sigwait({signal.SIGTERM})
print('{"seconds": 1.0, "gb_s": 12.5}')
"""


def test_a_loaded_link(fake_paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: copies run while points are measured, end with them, and their file is of its own. Method: processes that copy nothing."""
    seen: list[int] = []
    processes: list[subprocess.Popen[str]] = []
    popen = link_load.subprocess.Popen

    def started(*args: Any, **options: Any) -> subprocess.Popen[str]:
        process = popen(*args, **options)
        processes.append(process)
        return process

    def measure(*given: object) -> tuple[client.Timing, dict[str, int]]:
        seen.append(sum("load.py" in str(process.args) and process.poll() is None for process in processes))
        return client.Timing(1.0, 1.0, 1.0, 1.0), {"pages_spilled": 0, "rows_fetched": 0}

    (tmp_path / "load.py").write_text(FAKE_LOAD)
    monkeypatch.setattr(link_load, "__file__", str(tmp_path / "load.py"))
    monkeypatch.setattr(link_load.subprocess, "Popen", started)
    monkeypatch.setattr(bench_serving, "measure", measure)
    arguments = ("--systems", "plain", "--output", "8", "--concurrency", "1", "--link-load")
    assert _bench(fake_paths, tmp_path, *arguments, "2") == 0
    loads = [process for process in processes if "load.py" in str(process.args)]
    assert seen == [2] and len(loads) == 2 and all(process.returncode == 0 for process in loads)
    document = json.loads((tmp_path / "serving_h200.json").read_text())
    assert document["link_load"] == 2 and document["link_load_gb_s"] == [[12.5, 12.5]]
    assert _bench(fake_paths, tmp_path, *arguments, "0") == 2
    with pytest.raises(SystemExit):
        _bench(fake_paths, tmp_path, *arguments, "-1")


def test_a_load_that_does_not_copy_is_told() -> None:
    """Goal: no figure of a slow link that was not. Method: a process without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to copy to")
    with pytest.raises(ValueError, match="did not begin to copy"), link_load.link_load(1):
        raise AssertionError("it began")


@pytest.mark.gpu
def test_the_load_takes_the_link() -> None:
    """Goal: it is a load. Method: a second of copies; PCIe 4 x16 already carries 20 GB/s."""
    with link_load.link_load(1) as taken:
        time.sleep(1.0)
    assert taken[0] > 10.0


def test_a_point_may_have_its_own_output(tmp_path: pathlib.Path) -> None:
    """Goal: few runs of a large grid. Method: points with an output and without, by hand."""
    base = [str(tmp_path), "--out", str(tmp_path), "--commit", "abc", "--output", "8,9"]
    args = bench_serving.parse_arguments([*base, "--points", "64x2,64x2x8,30x5x1"])
    assert bench_serving.points(args) == {30: [(5, 1)], 64: [(2, 8), (2, 9)]}
    args = bench_serving.parse_arguments([*base, "--context", "64,30", "--concurrency", "3,1"])
    assert bench_serving.points(args) == {context: [(1, 8), (1, 9), (3, 8), (3, 9)] for context in (30, 64)}
    for wrong in ("64", "64x2x8x1", "64xa"):
        with pytest.raises(SystemExit):
            bench_serving.parse_arguments([*base, "--points", wrong])


def test_variants_of_ours_are_compared_with_ours_alone(tmp_path: pathlib.Path) -> None:
    """Goal: the ratio says nothing of variants; --config is for ours, and what SGLang's own knows of it for that too. Method: rows and members by hand."""
    row = {"model": "m", "dtype": "d", "context": 8, "output": 1, "concurrency": 1, "pool_tokens": 9}
    speeds = {"plain": 10.0, "ours": 12.0, "ours_audit": 30.0, "ours_latency": 40.0, "ours_elastic": 50.0}
    found = bench_serving.ratios([row | {"system": system, "output_tok_s": speed} for system, speed in speeds.items()])
    assert [(one["better"], one["others"], one.get("system"), one["ours_over_better"]) for one in found] == [
        ("plain", 1, None, 1.2),
        ("plain", 1, "ours_elastic", 5.0),
    ]
    args = bench_serving.parse_arguments([
        str(tmp_path), "--out", str(tmp_path), "--commit", "abc", "--systems", "builtin,ours,ours_audit,ours_latency",
        "--config", '{"device_buffer_size": 2048, "admission": "throughput"}', "--equal", "bytes",
    ])  # fmt: skip
    specs = {key.split("@")[0]: one.spec for key, one in bench_serving.members_of(args, [16_000]).items()}
    assert specs["builtin"].config == {"host_to_device_ratio": 6, "device_buffer_size": 2048}
    ours = specs["builtin"].config | args.config
    assert specs["ours"].config == specs["ours_audit"].config == ours and specs["ours_latency"].config == ours | {"admission": "latency"}
    assert specs["ours_audit"].env == {"SGLANG_HISPARSE_AUDIT": "1"} and not specs["ours"].env


def test_elastic_system_begins_with_plains_tokens_and_ends_at_ours(tmp_path: pathlib.Path) -> None:
    """Goal: one pool of bytes for all. Method: pools, ratio and config by hand; --equal tokens is refused."""
    base = [str(tmp_path), "--out", str(tmp_path), "--commit", "abc", "--systems", "ours,ours_elastic"]
    args = bench_serving.parse_arguments([*base, "--equal", "bytes"])
    ours, elastic = (bench_serving.pool_of(args, system, 16_000) for system in args.systems)
    # 200,000 x (1152 + 132) / (1152 + 6 x 132) = 132,098 tokens, 2,064 whole pages.
    assert (ours.device_tokens, ours.logical_tokens) == (132_096, 792_576)
    assert (elastic.device_tokens, elastic.logical_tokens) == (200_000, 792_576) and elastic.gpu_bytes == ours.gpu_bytes
    members = bench_serving.members_of(args, [16_000])
    config = members["ours_elastic@16000"].spec.config
    assert config == {"elastic_border": True, "host_to_device_ratio": 792_576 / 200_000}
    assert members["ours_elastic@16000"].limits.pool_tokens == 200_000
    assert members["ours@16000"].spec.config == {"host_to_device_ratio": 6}
    for wrong in (["--equal", "tokens"], ["--equal", "bytes", "--repeats", "0"]):
        with pytest.raises(SystemExit):
            bench_serving.parse_arguments([*base, *wrong])


def test_grid_starts_servers_together_and_scales_pools(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """Goal: a grid costs few starts, and the pool holds as many contexts everywhere. Method: a dry run, read back."""
    args = [str(tmp_path), "--out", str(tmp_path), "--commit", "abc", "--context", "4000,16000,64000"]
    parsed = bench_serving.parse_arguments(args)
    assert bench_serving.points(parsed) == {context: [(many, 256) for many in (1, 4, 16, 48)] for context in (4000, 16000, 64000)}
    assert bench_serving.groups(parsed, [4000, 16000, 64000]) == [[4000, 16000], [64000]]
    assert [bench_serving.pool_tokens(parsed, context) for context in (4000, 16000)] == [50_000, 200_000]
    assert bench_serving.main([*args, "--points", "16000x48,4000x1", "--equal", "bytes", "--dry-run"]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "launch_server" in line]
    ports = {word for line in commands for flag, word in itertools.pairwise(line.split()) if flag.endswith("port")}
    assert len(commands) == 6 and len(ports) == 12
    assert sum("--max-total-tokens 200000" in line for line in commands) == 1  # plain alone keeps its tokens


def test_a_server_that_does_not_start_leaves_the_others(
    fake_paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: one broken system costs its own rows only. Method: a fleet whose built-in server dies while starting."""
    monkeypatch.setenv("FAKE_BROKEN", "builtin")
    out = tmp_path / "out"
    assert _bench(fake_paths, out, "--points", "30x2", "--output", "4") == 1
    document = json.loads((out / "serving_h200.json").read_text())
    assert [row["system"] for row in document["rows"]] == ["plain", "ours"]
    assert document["ratios"][0]["others"] == 1


@pytest.mark.parametrize("ratio", [1, 2, 6, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_equal_memory_is_equal(ratio: int, dtype: str) -> None:
    """Goal: no system gets more GPU memory than another. Method: bytes of both pools, less than a page apart."""
    plain, sparse = fleet.plain_pool(100_000, 8, dtype), fleet.hisparse_pool(100_000, ratio, 8, dtype)
    page = 64 * 8 * (fleet.ROW_BYTES[dtype] + ratio * fleet.INDEX_ROW_BYTES)
    assert 0 <= plain.gpu_bytes - sparse.gpu_bytes < page
    assert sparse.device_tokens % 64 == 0 and sparse.logical_tokens == ratio * sparse.device_tokens
    assert fleet.hisparse_pool(100_000, ratio, 8, dtype, "tokens").device_tokens == 100_000
