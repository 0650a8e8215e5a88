"""Tests of the kernel benchmark, fuzz and proof scripts, on the CPU library: what they time is right, and they notice what is not."""

import json
import pathlib
import sys
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import bench_resolver
import gpu_kernel_check
import kernel_fuzz
import ncu_resolver
import resolver_plot
import resolver_workload as workload
from resolver_workload import Case, Ours, Variant, Workload

from sglang_hisparse.transfer import hot_buffer

SMALL = Case(row_bytes=48, top_k=128, buffer=256, batch=3, misses=9)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls on a machine with a GPU: no graph, no events, CPU tensors."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def work(case: Case = SMALL, spread: list[int] | None = None, pitch: int | None = None) -> Workload:
    return Workload(case, spread, pitch=pitch, device="cpu")


@pytest.mark.parametrize("spread", [None, [128, 0, 3]])
def test_every_step_misses_what_the_case_says(spread: list[int] | None) -> None:
    """Goal: a point measures its own number of misses. Method: compare each selection with the one before it."""
    some = work(spread=spread)
    last = [set(range(SMALL.buffer - SMALL.top_k, SMALL.buffer))] * SMALL.batch
    for step in some.top_k:
        for request, misses in enumerate(spread or [SMALL.misses] * SMALL.batch):
            now = set(step[request].tolist())
            assert len(now) == SMALL.top_k and len(now - last[request]) == misses
            last[request] = now
    assert max(max(rows) for rows in last) < some.context


@pytest.mark.parametrize("options", [{}, {"pitch": 64}, {"spread": [128, 0, 3]}], ids=str)
@pytest.mark.parametrize(
    "variant", [Variant(), Variant(translated=False, overlap=False), Variant(scored=True)], ids=str
)
def test_a_timed_point_is_right(options: dict[str, Any], variant: Variant) -> None:
    """Goal: the benchmark's own check passes where the resolver is right. Method: time small points with the CPU library."""
    took, correct = workload.time_ours(work(**options), variant, replays=1)
    assert correct and took > 0
    assert workload.time_ours(work(**options), variant, resident=True, replays=1)[1]
    took, correct = workload.time_behind(work(**options), variant)
    assert correct and took > 0


def test_the_default_is_what_serving_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: figures are of the resolver as it is served. Method: the arguments that the hot buffers pass, beside the default's."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(hot_buffer, "resolve", lambda **arguments: passed.update(arguments))
    table, bases = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    buffers = hot_buffer.HotBuffers(
        groups=hot_buffer.GroupTable.from_reuse_flags(None, 1),
        num_slots=2,
        buffer_size=4,
        page_size=4,
        top_k=4,
        max_pages=2,
        row_bytes=16,
        page_table=table,
        host_bases=bases,
        device_bases=bases,
    )
    rows = torch.zeros((1, 4), dtype=torch.int32)
    buffers.resolve(0, rows, table[None, :2], table[:1], table[:1])
    timed = Ours(work()).arguments
    for name in ("translated_pages", "overlap_launch", "cluster_blocks", "copy_method"):
        assert passed.get(name, 0) == timed[name], name


def test_a_buffer_that_is_no_multiple_of_k_is_filled() -> None:
    """Goal: every size of the table starts full. Method: rows of the hot state after the fill, counted."""
    ours = Ours(work(Case(48, 96, 320, 2, 5)))
    assert sorted(ours.state.tags[0].tolist()) == [64 + row for row in range(320)]


@pytest.mark.parametrize("fault", ["answer", "row", "unwritten"])
def test_a_wrong_point_is_called_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no wrong figure is called correct. Method: spoil one answer, one row, or leave one answer out."""
    plain = workload.resolve

    def spoilt(**arguments: Any) -> None:
        plain(**arguments)
        if fault == "answer":
            arguments["out"][1, 5] = arguments["out"][1, 6]
        elif fault == "unwritten":
            arguments["out"][1, 5] = -7
        else:
            some.device[int(arguments["out"][2, 0]), -1] ^= 1

    some = work()
    monkeypatch.setattr(workload, "resolve", spoilt)
    assert not workload.time_ours(some, replays=1)[1]


def test_rows_fetched_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a figure that fetched more than its misses is called wrong. Method: forget the hot rows between two steps."""
    calls: list[int] = []
    plain = Ours.call

    def forgetful(ours: Ours, step: int) -> None:
        calls.append(step)
        if len(calls) % 7 == 0:
            ours.state.reset(torch.tensor([0]))
        plain(ours, step)

    monkeypatch.setattr(Ours, "call", forgetful)
    assert not workload.time_ours(work(), replays=1)[1]


def test_a_gather_and_the_ceiling_are_positive() -> None:
    """Goal: the reference columns hold figures. Method: measure them on the CPU."""
    assert work().gather_us() > 0
    assert work(Case(48, 128, 256, 3, 0)).gather_us() == 0


def test_a_sample_of_the_counters_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the cost of the counters is that of right sums. Method: time one, then spoil what it writes."""
    assert workload.time_sample(5, 3, "cpu")[1]
    plain = workload.library_of

    class Spoilt:
        def sum_counters(self, header: torch.Tensor, layers: torch.Tensor, out: torch.Tensor) -> None:
            plain(header).sum_counters(header, layers, out)
            out[1, 2] += 1

    monkeypatch.setattr(workload, "library_of", lambda tensor: Spoilt())
    assert not workload.time_sample(5, 3, "cpu")[1]


def result(**changed: Any) -> dict[str, Any]:
    row = {"row_bytes": 1152, "top_k": 2048, "buffer": 4096, "batch": 1, "misses": 102, "ours_us": 10.0}
    return row | {"builtin_us": 24.0, "vllm_us": None, "gather_us": 5.0, "correct": True} | changed


def test_the_plot_has_a_panel_for_each_size_and_no_column_without_figures(tmp_path: pathlib.Path) -> None:
    """Goal: a plot can be drawn from any result. Method: panels of made rows; a PNG of them and of rows with gaps."""
    rows = [result(), result(row_bytes=656), result(top_k=512), result(builtin_us=None, misses=0, gather_us=0.0)]
    assert [len(points) for points in resolver_plot.panels(rows).values()] == [2, 1, 1]
    resolver_plot.draw(rows, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_main_reports_wrong_rows_and_writes_every_part(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a wrong row ends the run with 1, and each part reaches the file. Method: parts that return made rows."""
    parts = {
        "table": [result()],
        "sizes": [result(top_k=512, gather_us=0.0)],
        "imbalance": [{"one_us": 1.0, "correct": True}],
    }
    monkeypatch.setattr(bench_resolver, "PARTS", {name: lambda _, rows=rows: rows for name, rows in parts.items()})
    monkeypatch.setattr(bench_resolver, "pinned_block", lambda size: None)
    target = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--commit", "abc", "--json", str(target)])
    assert bench_resolver.main() == 0
    written = json.loads(target.read_text())  # a figure of 0.0 is not a wrong one
    assert written["rows"] == parts["table"] + parts["sizes"] and written["imbalance"] == parts["imbalance"]
    assert written["commit"] == "abc" and written["versions"]["torch"] == torch.__version__
    assert written["vllm_left_out"] == "no library given"
    parts["table"][0]["correct"] = False
    assert bench_resolver.main() == 1


def test_a_part_that_fails_leaves_the_others(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one part's failure costs no other figure and is not hidden. Method: a part that raises beside one that works."""

    def broken(_: object) -> list[bench_resolver.Row]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench_resolver, "PARTS", {"scores": broken, "table": lambda _: [result()]})
    monkeypatch.setattr(bench_resolver, "pinned_block", lambda size: None)
    target = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(target)])
    assert bench_resolver.main() == 1
    assert json.loads(target.read_text())["rows"] == [result()]


def test_the_fuzz_passes_and_counts() -> None:
    """Goal: the fuzz runs as many cases as asked for. Method: two libraries that are one, on the CPU."""
    found = kernel_fuzz.fuzz_in_processes(60, 5, "cpu", 1, 60)
    assert (found["cases"], found["faults"]) == (60, []) and found["rows"] > 20


@pytest.mark.parametrize("part", ["out", "tags", "header", "stamps", "rows", "slot pages"])
def test_the_fuzz_notices_a_difference(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a GPU that answers otherwise is caught, with a seed. Method: spoil one number of the second library's result."""
    plain = kernel_fuzz.resolve

    def spoilt(**arguments: Any) -> None:
        plain(**arguments)
        twin = twins[-1]
        if arguments["group"] is not twin.there or not int(arguments["num_real_rows"]):
            return
        state, held = twin.there, (twin.there.tags >= 0).nonzero()
        if part == "slot pages":
            if state.slot_pages is not None and len(held):
                state.slot_pages[tuple(held[0])] += 1
        elif part == "out":
            arguments["out"][0, 0] += 1
        elif part == "rows":
            twin.kv[0, 0, 0] ^= 1
        elif len(held):
            target = {"tags": state.tags, "stamps": state.stamps, "header": state.header}[part]
            target[tuple(held[0]) if part != "header" else (0, 4)] += 1

    twins: list[kernel_fuzz.Twin] = []

    class Kept(kernel_fuzz.Twin):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            twins.append(self)

    monkeypatch.setattr(kernel_fuzz, "Twin", Kept)
    monkeypatch.setattr(kernel_fuzz, "resolve", spoilt)
    found = kernel_fuzz.fuzz_in_processes(400, 5, "cpu", 1, 60)
    assert len(found["faults"]) == 1 and f"{part}: the two libraries differ" in found["faults"][0]


def test_findings_of_the_sanitizers_are_told_apart() -> None:
    """Goal: a finding in a kernel of ours is a finding, another's is not. Method: text as the tools print it."""
    output = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void hisparse::<unnamed>::resolve_kernel<1, 0, 3>(ResolveParams, int, int)+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========
small run done
========= Error: Race reported between Write access at void at::native::sort(float *)+0x80
=========     and Read access at void at::native::sort(float *)+0x90 [4 hazards]
========= ERROR SUMMARY: 2 errors
"""
    found = gpu_kernel_check.reports(output)
    assert len(found) == 2 and [gpu_kernel_check.OURS in text for text in found] == [True, False]
    assert gpu_kernel_check.reports("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


def test_counters_are_read_from_what_ncu_prints() -> None:
    """Goal: figures land at their points and gaps stay gaps. Method: a table as ncu prints it, with units and a missing metric."""
    known = [metric for metric in ncu_resolver.METRICS if metric != "pcie__read_bytes.sum"]
    heading = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *known])
    units = ",".join('""' for _ in range(len(known) + 2))
    lines = [",".join(f'"{value}"' for value in [i, "resolve_kernel", *["1,234"] * len(known)]) for i in range(4)]
    output = "\n".join(["==PROF== Connected", "correct 1 307 True", heading, units, *lines])
    rows = ncu_resolver.with_points(ncu_resolver.parse_csv(output), 1152)
    assert [row["batch"] for row in rows] == [point[0] for point in ncu_resolver.POINTS]
    assert rows[0]["bytes_needed"] == 307 * 1152 and rows[0]["sysmem_read_bytes"] == 32 * 1234
    assert rows[0]["pcie_read_bytes"] is None
    with pytest.raises(ValueError, match="3 kernels"):
        ncu_resolver.with_points(ncu_resolver.parse_csv(output)[:3], 1152)
