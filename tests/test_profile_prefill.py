"""Tests of scripts/profile_prefill.py without a GPU: fake servers that copy traces made by hand, whose figures are known."""

import gzip
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import profile_prefill
from fake_sglang import free_port, install
from serving import fidelity, server
from serving.traces import Launch, Profile, differences, merged, read_launches, shared_us, short_name

FORWARD, COPIES = 7, 22
GEMM = "void deep_gemm::sm90_fp8_gemm_impl<1u, 2u, (GemmType)0>(float*, int)"
ATTENTION = "void (anonymous namespace)::flash::sparse_fwd_kernel<Traits<64>>(Params)"
TRANSLATE = "hisparse::(anonymous namespace)::translate_kernel(hisparse::TranslateParams)"
COPY = "hisparse::(anonymous namespace)::copy_pages_kernel(hisparse::CopyPagesParams)"
PROMPTS, CHUNKS = 3, 4


def event(name: str, stream: int, start: float, us: float, category: str = "kernel") -> dict[str, Any]:
    """One event as torch's profiler writes it."""
    args = {"stream": stream, "grid": [8, 1, 1], "device": 0}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": us, "args": args}


def prompts(ours: bool) -> list[dict[str, Any]]:
    """PROMPTS prompts of CHUNKS chunks: a GEMM that grows with the chunk, attention of 50 us, 2 us between kernels.

    Ours: a translation of 10 us before attention; beside the GEMM of every chunk but the first a copy of 60 us, which makes it 20 us
    longer. A prompt begins 5,000 us after the one before has begun.
    """
    events = [event("ignored", 0, 0.0, 1e6, "cpu_op"), {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for prompt in range(PROMPTS):
        now = 1e12 + 5_000.0 * prompt
        for chunk in range(CHUNKS):
            beside = ours and chunk > 0
            if beside:
                events.append(event(COPY, COPIES, now + 10, 60.0))
            for name, us in [(GEMM, 100.0 + 100 * chunk + 20 * beside), (TRANSLATE, 10.0), (ATTENTION, 50.0)]:
                if name == TRANSLATE and not ours:
                    continue
                events.append(event(name, FORWARD, now, us))
                now += us + 2
    return events


def write_trace(path: pathlib.Path, events: list[dict[str, Any]]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return path


def profile(tmp_path: pathlib.Path, ours: bool) -> Profile:
    path = write_trace(tmp_path / f"{ours}.json.gz", prompts(ours))
    return Profile(read_launches(path), PROMPTS, separate=True)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GEMM, "sm90_fp8_gemm_impl"),
        (ATTENTION, "sparse_fwd_kernel"),
        (TRANSLATE, "translate_kernel"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)",
            "vectorized_elementwise_kernel[FillFunctor]",
        ),
        (
            "void at::native::(anonymous namespace)::unrolled<at::native::direct_copy_kernel_cuda(at::Iter&)::{lambda()#1}>(int)",
            "unrolled[direct_copy_kernel_cuda]",
        ),
    ],
)
def test_names_are_short_and_apart(name: str, short: str) -> None:
    """Goal: a table that can be read, in which torch's generic kernels differ. Method: names as traces have them."""
    assert short_name(name) == short


def test_spans() -> None:
    """Goal: time is counted once, and only where it is shared. Method: spans by hand, one inside another, one that only touches."""
    spans = merged([(5.0, 9.0), (0.0, 2.0), (6.0, 7.0), (9.0, 10.0), (20.0, 21.0)])
    assert spans == [(0.0, 2.0), (5.0, 10.0), (20.0, 21.0)]
    assert [shared_us(span, spans) for span in [(1.0, 6.0), (2.0, 5.0), (0.0, 30.0), (30.0, 40.0), (7.0, 8.0)]] == [2, 0, 8, 0, 1]


def test_a_trace_gives_what_was_put_in(tmp_path: pathlib.Path) -> None:
    """Goal: counts, times, gaps and streams per prompt are right. Method: prompts whose times are known by hand."""
    plain, ours = profile(tmp_path, False).report(), profile(tmp_path, True).report()
    assert plain["streams"] == [{"stream": FORWARD, "forward": True, "launches": 8.0, "busy_us": 1200.0}]
    assert plain["kernels"] == [
        {"kernel": "sm90_fp8_gemm_impl", "forward": True, "count": 4.0, "us": 1000.0},
        {"kernel": "sparse_fwd_kernel", "forward": True, "count": 4.0, "us": 200.0},
    ]
    # Seven pauses of 2 us within each prompt; those of more than 3 ms between prompts are the client's.
    assert (plain["gap_us"], plain["gaps"], plain["longest_us"], plain["over_20_us"]) == (14.0, 7.0, 2.0, 0.0)
    assert plain["span_us"] == 1214.0 and plain["between_units_us"] == 5_000 - 1_214
    assert {row["stream"]: row["busy_us"] for row in ours["streams"]} == {FORWARD: 1300.0, COPIES: 180.0}
    assert {row["kernel"]: row["forward"] for row in ours["kernels"]}["copy_pages_kernel"] is False


def test_what_copies_cost_the_kernels_beside_them(tmp_path: pathlib.Path) -> None:
    """Goal: a kernel that a copy slows down is seen, although the others of its name are of other sizes. Method: GEMMs of four
    sizes, those beside copies 20 us longer than plain's; attention beside no copy."""
    plain, ours = profile(tmp_path, False), profile(tmp_path, True)
    found = ours.overlap(plain)
    assert (found["copies"], found["copy_us"], found["overlapped_us"]) == (3.0, 180.0, 180.0)
    assert found["kernels"] == [
        # Beside: 220, 320, 420, of which plain's are 200, 300, 400. Without: 100.
        {"kernel": "sm90_fp8_gemm_impl", "inside": 3.0, "inside_us": 320.0, "outside_us": 100.0, "plain_us": 300.0, "lost_us": 60.0},
    ]  # fmt: skip
    assert ours.overlap()["kernels"][0]["plain_us"] is None and plain.overlap()["kernels"] == []
    fewer = Profile(plain.launches[:-2], PROMPTS, separate=True)
    assert ours.overlap(fewer)["kernels"][0]["plain_us"] is None, "launches that are not the same are not compared"


def test_the_copy_engine_copies_pages_too(tmp_path: pathlib.Path) -> None:
    """Goal: a mirror without a kernel is seen, and tokens on their way to the scheduler are none. Method: two copies of unlike size."""
    events = [event(GEMM, FORWARD, 0.0, 100.0)]
    for start, num_bytes in ((10.0, 8), (50.0, 8 * 73_728)):
        events.append(event("Memcpy DtoH (Device -> Pinned)", COPIES, start, 20.0, "gpu_memcpy"))
        events[-1]["args"]["bytes"] = num_bytes
    found = Profile(read_launches(write_trace(tmp_path / "engine.json.gz", events)), 1, separate=True).overlap()
    assert (found["copies"], found["copy_us"], found["overlapped_us"]) == (1.0, 20.0, 20.0)


def test_copies_of_the_forward_stream_are_beside_nothing(tmp_path: pathlib.Path) -> None:
    """Goal: a look at the link, or a page that comes back, counts as no copy beside the forward: it is a part of it. Method: one on
    either stream."""
    events = [event(COPY, FORWARD, 0.0, 30.0), event(GEMM, FORWARD, 40.0, 100.0), event(COPY, COPIES, 130.0, 20.0)]
    found = Profile(read_launches(write_trace(tmp_path / "both.json.gz", events)), 1, separate=True).overlap()
    assert (found["copies"], found["copy_us"], found["overlapped_us"]) == (1.0, 20.0, 10.0)
    assert [row["kernel"] for row in found["kernels"]] == ["sm90_fp8_gemm_impl"]


def test_differences_add_up(tmp_path: pathlib.Path) -> None:
    """Goal: the table explains the whole difference, in the order of its parts. Method: against the streams' busy times."""
    plain, ours = profile(tmp_path, False), profile(tmp_path, True)
    rows = differences(ours.kernels(), plain.kernels())
    assert [(row["kernel"], row["difference_us"]) for row in rows] == [
        ("copy_pages_kernel", 180.0),
        ("sm90_fp8_gemm_impl", 60.0),
        ("translate_kernel", 40.0),
        ("sparse_fwd_kernel", 0.0),
    ]
    assert sum(row["difference_us"] for row in rows if row["forward"]) == 1300 - 1200
    assert [row["plain_count"] for row in rows] == [0.0, 4.0, 0.0, 4.0]


def test_traces_that_cannot_be_right_are_refused(tmp_path: pathlib.Path) -> None:
    """Goal: no figures from nothing. Method: a trace of the CPU alone, prompts that cannot be told apart; one with NaN is read."""
    with pytest.raises(ValueError, match="ran on a GPU"):
        read_launches(write_trace(tmp_path / "cpu.json.gz", prompts(False)[:2]))
    launches = [Launch("a", 7, 0.0, 1.0), Launch("a", 7, 2.0, 3.0)]
    with pytest.raises(ValueError, match="tell 3 prompts apart"):
        Profile(launches, 3, separate=True)
    odd = [*prompts(False), {"ph": "C", "name": "memory", "ts": 1.0, "args": {"bytes": float("nan")}}]
    whole = read_launches(write_trace(tmp_path / "whole.json.gz", prompts(False)))
    assert read_launches(write_trace(tmp_path / "odd.json.gz", odd)) == whole


@pytest.fixture
def paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> server.Paths:
    """Fake servers, and the traces that they have."""
    monkeypatch.setattr(fidelity.time, "sleep", lambda seconds: None)
    for system in ("plain", "ours"):
        for phase in ("prefill", "decode"):
            write_trace(tmp_path / "known" / f"{system}-{phase}.json.gz", prompts(system == "ours"))
    monkeypatch.setenv("FAKE_TRACES", str(tmp_path / "known"))
    places = (str(install(tmp_path / "site")), str(tmp_path / "plugin"), str(tmp_path / "cache"))
    return server.Paths(tmp_path / "model", tmp_path / "logs", *places)


def _profile(paths: server.Paths, out: pathlib.Path, *extra: str) -> int:
    return profile_prefill.main([
        str(paths.model), "--out", str(out), "--logs", str(paths.logs), "--site", paths.site, "--plugin", paths.plugin,
        "--cache", paths.cache, "--port", str(free_port()), "--context", "30", "--prompts", str(PROMPTS), "--commit", "abc",
        "--decode", "2", "--steps", "3", "--output", "6", *extra,
    ])  # fmt: skip


def test_end_to_end_on_fake_servers(
    paths: server.Paths, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: both systems are profiled under the same load, and nothing but it is; a second call reads the same. Method: fake
    servers that say how many requests a profile had."""
    assert _profile(paths, tmp_path / "out") == 0
    logs = {log.name: log.read_text().splitlines() for log in paths.logs.glob("*.log")}
    assert logs == {
        f"bench-{system}-30.log": [
            "gc frozen after 2 requests",
            f"profile {system}-prefill of {PROMPTS} requests",
            f"profile {system}-decode of 2 requests",
        ]
        for system in ("plain", "ours")
    }
    file = tmp_path / "out" / profile_prefill.FILE
    document = json.loads(file.read_text())
    assert (document["commit"], document["context"], document["prompts"]) == ("abc", 30, PROMPTS)
    for system in ("plain", "ours"):
        one = document["systems"][system]
        assert len(one["ttft_s"]) == len(one["profiled_ttft_s"]) == PROMPTS and min(one["ttft_s"]) > 0
        assert one["prefill"]["units"] == one["decode"]["units"] == 3
    assert document["systems"]["ours"]["pool"]["gpu_bytes"] <= document["systems"]["plain"]["pool"]["gpu_bytes"]
    prefill = document["differences"]["ours"]["prefill"]
    assert [row["kernel"] for row in prefill][:3] == ["copy_pages_kernel", "sm90_fp8_gemm_impl", "translate_kernel"]
    assert document["systems"]["ours"]["prefill"]["overlap"]["kernels"][0]["lost_us"] == 60.0
    # A step's trace is not cut at pauses, so these lie within it.
    assert document["systems"]["plain"]["decode"]["gap_us"] > 1000
    shown = capsys.readouterr().out
    assert "prefill: ours - plain" in shown and "+180.0" in shown and "translate_kernel" in shown
    assert _profile(paths, tmp_path / "out", "--read-only") == 0
    again = json.loads(file.read_text())
    assert {key: again[key] for key in ("systems", "differences")} == {key: document[key] for key in ("systems", "differences")}


def test_what_fails_is_said(
    paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: no half result passes as a whole one. Method: a server that does not start, a profiler that refuses, a broken trace."""
    monkeypatch.setenv("FAKE_BROKEN", "ours")
    assert _profile(paths, tmp_path / "one") == 1
    assert list(json.loads((tmp_path / "one" / profile_prefill.FILE).read_text())["systems"]) == ["plain"]
    monkeypatch.delenv("FAKE_BROKEN")
    (tmp_path / "known" / "ours-prefill.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert _profile(paths, tmp_path / "two", "--decode", "0") == 1
    document = json.loads((tmp_path / "two" / profile_prefill.FILE).read_text())
    assert "prefill" in document["systems"]["plain"] and "prefill" not in document["systems"]["ours"]
    assert document["differences"] == {}
    monkeypatch.setenv("FAKE_NO_PROFILE", "1")
    assert _profile(paths, tmp_path / "three", "--systems", "plain") == 1
    assert "the profiler did not start" in capsys.readouterr().out


def test_arguments(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: what cannot be measured is refused before a server starts; servers are those of the benchmark. Method: a dry run."""
    base = [str(tmp_path), "--out", str(tmp_path), "--commit", "abc"]
    for wrong in (["--prompts", "0"], ["--decode", "4", "--output", "8"], ["--systems", "other"],
                  ["--systems", "ours_elastic", "--equal", "tokens"]):  # fmt: skip
        with pytest.raises(SystemExit):
            profile_prefill.parse_arguments([*base, *wrong])
    assert profile_prefill.main([*base, "--systems", "plain,ours_elastic", "--dry-run"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 2 and all("--max-total-tokens 800000" in command for command in commands)
    specs = profile_prefill.members(profile_prefill.parse_arguments([*base, "--decode", "4"]))
    assert specs["ours@64000"].spec.env == {"SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS": "4"}
    script = pathlib.Path(profile_prefill.__file__)
    answer = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    assert "--read-only" in answer.stdout
