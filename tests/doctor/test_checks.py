"""Goal: each check tells good from bad and says what to do. Method: made-up machines, files and versions; one real run."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_hisparse.cli import app
from sglang_hisparse.config import GIB
from sglang_hisparse.doctor import command, gpus, host, software
from sglang_hisparse.doctor.findings import Finding, Status, as_json, error, is_good, no_gpu, ok, table_of, warning
from sglang_hisparse.errors import KernelBuildError
from sglang_hisparse.kernels import build
from sglang_hisparse.memory.host_memory import HostMemory, HostMemoryError

H200 = gpus.Gpu(0, "NVIDIA H200", (9, 0), 140 * GIB, 227 << 10, 1)


def written(root: Path, files: dict[str, str]) -> Path:
    """A file system tree below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("finding", "status", "word"),
    [
        (software.check_python((3, 12, 3)), Status.OK, "3.12.3"),
        (software.check_python((3, 10, 9)), Status.ERROR, "3.11"),
        (software.check_sglang("0.5.23"), Status.OK, "0.5.23"),
        (software.check_sglang("0.5.24"), Status.ERROR, "pip install sglang==0.5.23"),
        (software.check_plugin_list({}), Status.OK, "not set"),
        (software.check_plugin_list({"SGLANG_PLUGINS": ""}), Status.OK, "not set"),
        (software.check_plugin_list({"SGLANG_PLUGINS": "x, hisparse"}), Status.OK, "names hisparse"),
        (software.check_plugin_list({"SGLANG_PLUGINS": "x"}), Status.ERROR, "set it to x,hisparse"),
        (host.check_memlock(-1), Status.OK, "unlimited"),
        (host.check_memlock(64 << 10), Status.WARNING, "ulimit -l unlimited"),
        (host.check_memlock(64 * GIB), Status.OK, "64.00 GiB"),
        (host.check_cgroup(None), Status.OK, "none"),
        (host.check_cgroup((8 * GIB, GIB)), Status.WARNING, "raise it"),
        (host.check_cgroup((512 * GIB, GIB)), Status.OK, "512.0 GiB, 1.0 in use"),
        (host.check_available(None, 0, 0, 100 * GIB), Status.OK, "90.0 for each of 1 ranks"),
        (host.check_available(None, 8 * 140 * GIB, 8, 2010 * GIB), Status.OK, "250.0 for each of 8 ranks"),
        (host.check_available(None, 8 * 140 * GIB, 8, 500 * GIB), Status.WARNING, "sglang-hisparse plan"),
        (host.check_available((20 * GIB, 10 * GIB), 140 * GIB, 1, 500 * GIB), Status.ERROR, "10.0 GiB free"),
        (host.check_available(None, 0, 0, 8 * GIB), Status.WARNING, "8.0 GiB free"),
        (host.check_numa([0, 1], 2), Status.OK, "GPU 1: 1"),
        (host.check_numa([0, None], 2), Status.WARNING, "GPU 1: unknown"),
        (host.check_numa([None], 1), Status.OK, "one node"),
        (gpus.check_shared_memory([H200]), Status.OK, "227 KiB"),
        (gpus.check_shared_memory([]), Status.WARNING, "no GPU: skipped"),
        (gpus.check_shared_memory([gpus.Gpu(0, "x", (9, 0), GIB, 48 << 10, None)]), Status.ERROR, "48 KiB"),
        (gpus.check_gpus([H200])[1], Status.OK, "NVIDIA H200, 140.0 GiB, capability 9.0"),
        (gpus.check_gpus([gpus.Gpu(3, "A100", (8, 0), GIB, 1, 0)])[1], Status.ERROR, "Hopper"),
        (gpus.check_gpus([])[0], Status.WARNING, "no GPU"),
        (gpus.check_link([])[0], Status.WARNING, "no GPU: skipped"),
    ],
    ids=lambda value: value.check if isinstance(value, Finding) else None,
)
def test_each_check_tells_good_from_bad(finding: Finding, status: Status, word: str) -> None:
    """Goal: status and advice fit the case. Method: every check on a machine made up for it."""
    assert finding.status is status
    assert word in f"{finding.found} {finding.remedy}"
    assert (finding.remedy == "") == (status is Status.OK)


def test_entry_points() -> None:
    """Goal: a missing plugin and a rival of the same name are told. Method: lists of entry points; then the real one."""
    ours = EntryPoint(software.NAME, software.TARGET, software.GROUP)
    rival = EntryPoint(software.NAME, "rival.plugin:register", software.GROUP)
    other = EntryPoint("other", "other:register", software.GROUP)
    assert software.check_entry_point((ours, other)).found == "entry point hisparse; beside it: other"
    assert software.check_entry_point((other,)).status is Status.ERROR
    assert "rival.plugin" in software.check_entry_point((ours, rival)).found
    assert software.check_entry_point().status is Status.OK, "this package is not installed"


def test_hooks_resolve_in_a_process_of_its_own() -> None:
    """Goal: the check sees SGLang as a server will. Method: the real import in another process; --fast leaves it out."""
    finding = software.check_hooks(fast=False)
    assert finding.status is Status.OK, finding
    assert "places are there" in finding.found
    assert software.check_hooks(fast=True).status is Status.WARNING


@pytest.mark.parametrize(
    ("probe", "word"),
    [
        ("print('RESULT', 'a place that it hooks is not there: x'); raise SystemExit(1)", "not there: x"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "no output"),
    ],
)
def test_hooks_that_do_not_resolve(monkeypatch: pytest.MonkeyPatch, probe: str, word: str) -> None:
    """Goal: a moved hook and a broken SGLang are errors. Method: other programs in the probe's place."""
    monkeypatch.setattr(software, "_PROBE", probe)
    finding = software.check_hooks(fast=False)
    assert (finding.status, word in finding.found) == (Status.ERROR, True)


def test_a_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the check ends. Method: a probe that sleeps, and a short limit."""
    monkeypatch.setattr(software, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "HOOKS_TIMEOUT_SECONDS", 1)
    assert "within 1 s" in software.check_hooks(fast=False).found


def test_compiled_kernels_and_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: cache and compilers are looked at. Method: an empty and a filled cache, with and without a toolkit."""
    monkeypatch.setenv("SGLANG_HISPARSE_CACHE_DIR", str(tmp_path / "cache"))
    toolkit = written(tmp_path / "cuda", {"bin/nvcc": ""})
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    kernels, nvcc, cxx = software.check_kernels("9.0a", {"PATH": os.environ["PATH"], "CXX": "no-such-compiler"})
    assert (nvcc.status, nvcc.found) == (Status.OK, f"nvcc in {toolkit}")
    assert (kernels.status, "`sglang-hisparse build`" in kernels.remedy) == (Status.WARNING, True)
    assert (cxx.status, cxx.found) == (Status.ERROR, "no-such-compiler not found")
    written(tmp_path / "cache" / "hisparse_cuda_0123", {"complete": ""})
    assert software.check_kernels(None)[0].status is Status.OK

    without_nvcc(monkeypatch)
    lines = [software.check_kernels(architecture)[1] for architecture in ("9.0a", None)]
    assert [line.status for line in lines] == [Status.ERROR, Status.WARNING]
    assert lines[0].remedy == "install the CUDA toolkit"


def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the CUDA toolkit."""

    def missing() -> Path:
        raise KernelBuildError("nvcc not found: install the CUDA toolkit")

    monkeypatch.setattr(build, "cuda_home", missing)


def test_prebuilt_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a production image passes without compilers. Method: a library of the right name, then one of other sources."""
    monkeypatch.setenv("SGLANG_HISPARSE_PREBUILT_DIR", str(tmp_path))
    without_nvcc(monkeypatch)
    bare = {"PATH": str(tmp_path), "CXX": "no-such-compiler"}
    wanted = build.cuda_library("9.0a")
    library = tmp_path / wanted.file_name
    library.touch()
    lines = software.check_kernels("9.0a", bare)
    assert [line.status for line in lines] == [Status.OK] * 3
    assert str(library) in lines[0].found and "not needed" in lines[2].found
    library.rename(tmp_path / wanted.file_name.replace(wanted.key, "0123456789abcdef"))
    stale = software.check_kernels("9.0a", bare)
    assert [line.status for line in stale] == [Status.ERROR] * 3
    assert stale[0].found.endswith(f"(wanted: key {wanted.key})")
    assert stale[0].remedy == f"build it again with `sglang-hisparse build --out {tmp_path}`, or remove it"
    monkeypatch.setenv("SGLANG_HISPARSE_PREBUILT_DIR", str(tmp_path / "gone"))
    assert software.check_kernels("9.0a", bare)[0].remedy == "one that holds built libraries"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "10\n",
                "sys/fs/cgroup/a/memory.max": "1000\n",
                "sys/fs/cgroup/a/memory.current": "400\n",
            },
            (1000, 400),
        ),
        (  # a container sees its own group at the root of the mount, under a path of the machine
            {
                "proc/self/cgroup": "0::/../../docker/x\n",
                "sys/fs/cgroup/memory.max": "500\n",
                "sys/fs/cgroup/memory.current": "100\n",
            },
            (500, 100),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory,other:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "700\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "7\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "9\n",
            },
            (700, 7),
        ),
    ],
    ids=["no proc", "root", "v2, parent", "v2, container", "v1"],
)
def test_limits_of_the_container(tmp_path: Path, files: dict[str, str], limit: tuple[int, int] | None) -> None:
    """Goal: the tightest limit above the process counts. Method: both cgroup versions as files."""
    assert host.cgroup_limit_bytes(written(tmp_path, files)) == limit


def test_numa_nodes_and_driver_are_read_from_files(tmp_path: Path) -> None:
    """Goal: a machine's nodes are counted and its driver is named. Method: the kernel's files, made up."""
    assert host.numa_nodes(tmp_path) == 1
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon Jan 1\nGCC version: gcc 12.3.0\n"
    nodes = {f"sys/devices/system/node/node{node}/cpulist": "" for node in (0, 1, 10)}
    written(tmp_path, {**nodes, "sys/devices/system/node/online": "0-10", "proc/driver/nvidia/version": text})
    assert host.numa_nodes(tmp_path) == 3
    assert gpus.driver_version(tmp_path).startswith("580.159.04")


def test_link_findings() -> None:
    """Goal: a slow link warns and one that cannot be measured is an error. Method: measurements made up."""
    fast = gpus.Link(55.0, 54.0, {"bf16": 47.0, "fp8": 43.0})
    (good,) = gpus.check_link([H200], lambda device: fast)
    assert good.status is Status.OK
    assert good.found == "GB/s: large copy 55 to the GPU, 54 back; scattered rows bf16 47, fp8 43"
    (slow,) = gpus.check_link([H200], lambda device: gpus.Link(12.0, 54.0, {}))
    assert (slow.status, "nvidia-smi -q" in slow.remedy) == (Status.WARNING, True)

    def fails(device: str) -> gpus.Link:
        raise HostMemoryError(f"cudaHostRegister failed on {device}\nsecond line")

    (bad,) = gpus.check_link([H200], fails)
    assert (bad.status, bad.found) == (Status.ERROR, "not measured: cudaHostRegister failed on cuda:0")


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_the_measurement_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the measurement copies what it counts. Method: the CPU library; every row that arrives is a row of its own."""
    counted: list[int] = []

    def once(device: torch.device, num_bytes: int, work: Callable[[], object]) -> float:
        work()
        counted.append(num_bytes)
        return 1.0

    monkeypatch.setattr(gpus, "_gbps", once)
    link = gpus.measure_link("cpu", large_bytes=1 << 20, num_rows=100)
    assert counted == [1 << 20, 1 << 20, 100 * 1152, 100 * 656]
    assert link == gpus.Link(1.0, 1.0, {"bf16": 1.0, "fp8": 1.0})

    memory, other = HostMemory.allocate(1 << 20, device="cpu"), torch.zeros(1 << 20, dtype=torch.uint8)
    memory.tensor.copy_(
        torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    )
    gpus._rows_gbps(memory, other, 100, 656)
    home = {memory.tensor[row * 656 : row * 656 + 656].numpy().tobytes() for row in range((1 << 20) // 656)}
    arrived = [other[row * 656 : row * 656 + 656].numpy().tobytes() for row in range(101)]
    assert len(set(arrived[:100]) & home) == 100 and not any(arrived[100])


def test_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: GB/s is bytes over the median time of runs after the first. Method: a clock that is told what to say."""
    times = iter([0.0, 9.0, 10.0, 10.5, 20.0, 20.5, 30.0, 30.5, 40.0, 47.0, 50.0, 50.1])
    monkeypatch.setattr(gpus.time, "perf_counter", lambda: next(times))
    assert gpus._gbps(torch.device("cpu"), 10**9, lambda: None) == pytest.approx(2.0)


@pytest.mark.gpu
def test_the_measurement_on_a_gpu() -> None:
    """Goal: the link of a real GPU is measured. Method: the whole check on the first GPU; every figure is plausible."""
    seen = gpus.visible_gpus()
    (finding,) = gpus.check_link(seen[:1])
    assert finding.status is not Status.ERROR, finding
    link = gpus.measure_link("cuda:0")
    assert all(1 < value < 1000 for value in (link.to_device, link.to_host, *link.rows.values()))


def test_the_table_shows_every_line_and_json_too() -> None:
    """Goal: nothing is lost between check and reader. Method: three lines with awkward text, in both forms."""
    lines = [ok("a", "[red] is text"), warning("b", "c", "d"), error("e", "f", "g"), no_gpu("h")]
    stream = io.StringIO()
    Console(width=100, file=stream).print(table_of(lines))
    text = stream.getvalue()
    assert all(word in text for word in ("[red] is text", "warning", "error", "no GPU: skipped"))
    plain = as_json(lines)
    assert (plain["ok"], is_good(lines)) == (False, False)
    assert plain["checks"][2] == {"check": "e", "status": "error", "found": "f", "remedy": "g"}
    assert as_json(lines[:2])["ok"] and is_good(lines[:2])


def test_the_command_by_its_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Goal: scripts can ask. Method: the real command in fast form, then with one line made an error."""
    path = tmp_path / "check.json"
    result = CliRunner().invoke(app, ["check", "--fast", "--json", str(path)])
    written_lines = json.loads(path.read_text())
    expected = 0 if written_lines["ok"] else 1
    assert result.exit_code == expected, result.output
    names = [line["check"] for line in written_lines["checks"]]
    assert names[:8] == [
        "Python", "SGLang", "plugin", "SGLANG_PLUGINS", "hooks", "kernels", "CUDA toolkit", "C++ compiler",
    ]  # fmt: skip
    assert {"locked memory (ulimit -l)", "available memory", "shared memory per block"} <= set(names)
    bad = error("SGLang", "not installed", "pip install it")
    monkeypatch.setattr(software, "check_sglang", lambda: bad)
    result = CliRunner().invoke(app, ["check", "--fast"])
    assert (result.exit_code, "pip install it" in result.output) == (1, True)


def test_without_torch_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a broken torch is one error, not a traceback. Method: its import made to fail."""
    import sglang_hisparse.doctor as package

    assert importlib.util.find_spec("sglang_hisparse.doctor.gpus") is not None
    monkeypatch.delattr(package, "gpus", raising=False)
    monkeypatch.setitem(sys.modules, "sglang_hisparse.doctor.gpus", None)
    findings = list(command.all_findings(fast=True))
    assert (findings[-1].check, findings[-1].status) == ("torch", Status.ERROR)
    assert len(findings) == 6
