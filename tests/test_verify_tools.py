"""Goal: the script that tries the operator's tools on a GPU tells good from bad. Method: scrapes of the real exporter,
lines of the real reporter and real recordings, whole and then broken in one place each."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
import tool_checks
import verify_tools
from fake_sglang import free_port

pytest.importorskip("sglang")

from sglang_hisparse.metrics import METRICS, Exporter, Kind, decode_line
from sglang_hisparse.recording.format import Header, Step, pack
from sglang_hisparse.recording.writer import RecordingWriter
from sglang_hisparse.stats import CopyTimes, Sample

LABELS = {"model_name": "m", "tp_rank": 0}
ZERO = {("rows_total", "failed"), ("failed_copies_total", ""), ("audit_mismatches_total", "")}


def sample(scale: float) -> Sample:
    """Figures of a server under pressure; counters grow with `scale`."""
    made: Sample = {}
    for metric in METRICS:
        made[metric.name] = {
            value: 0.0 if (metric.name, value) in ZERO else scale if metric.kind is Kind.COUNTER else 2.0
            for value in metric.values
        }
    made["row_share"] = {"resident": 0.5, "hot": 0.25, "host": 0.25}
    return made


def scrape_texts() -> list[str]:
    """Two scrapes of our exporter beside a gauge of SGLang, in the text form."""
    registry = prometheus_client.CollectorRegistry()
    classes = {
        "_counter_cls": prometheus_client.Counter,
        "_gauge_cls": prometheus_client.Gauge,
        "_histogram_cls": prometheus_client.Histogram,
    }
    collector = SimpleNamespace(**{key: functools.partial(value, registry=registry) for key, value in classes.items()})
    prometheus_client.Gauge(tool_checks.SGLANG_METRIC, "SGLang's", list(LABELS), registry=registry).labels(**LABELS).set(1)
    exporter, times, texts = Exporter(LABELS, collector), CopyTimes(), []
    for scale in (10.0, 30.0):
        times.measure(lambda transfers: [7], [])
        times.note_completed([7])
        exporter.publish(sample(scale), times)
        texts.append(prometheus_client.generate_latest(registry).decode())
    return texts


TEXTS = scrape_texts()


def failed(texts: list[str]) -> set[str]:
    """Demands that do not hold."""
    return {check.check for check in tool_checks.check_metrics([tool_checks.read_scrape(t) for t in texts]) if not check.ok}


def test_a_good_run_passes() -> None:
    """Goal: no false alarm. Method: all demands on the scrapes, and their figures."""
    assert failed(TEXTS) == set()
    last = tool_checks.read_scrape(TEXTS[-1])
    assert tool_checks.totals(last)["rows_total"] == {"resident": 30.0, "hot": 30.0, "host": 30.0, "failed": 0.0}
    assert tool_checks.peaks([last])["device_demand"] == 2.0
    assert len(last) == len(METRICS) + 1


def without(name: str) -> Callable[[str], str]:
    return lambda text: "\n".join(line for line in text.splitlines() if name not in line) + "\n"


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text, old
        return text.replace(old, new)

    return change


P = "sglang:hisparse_"


@pytest.mark.parametrize(
    ("demand", "change"),
    [
        ("every metric with its type and label values", without(f"{P}refusals")),
        ("every metric with its type and label values", without('owner="hot"')),
        ("every metric with its type and label values", changed(f"TYPE {P}pages gauge", f"TYPE {P}pages untyped")),
        ("SGLang's label set", changed('state="host",tp_rank="0"', 'state="host",rank="0"')),
        ("SGLang's label set", without(tool_checks.SGLANG_METRIC)),
        ("counters never fall", changed(f'{P}refusals_total{{model_name="m",tp_rank="0"}} 30.0',
                                        f'{P}refusals_total{{model_name="m",tp_rank="0"}} 9.0')),
        ("counters that pressure moves", changed(f'{P}spilled_pages_total{{model_name="m",tp_rank="0"}} 30.0',
                                                 f'{P}spilled_pages_total{{model_name="m",tp_rank="0"}} 0.0')),
        ("counters of failures are zero", changed(f'{P}audit_mismatches_total{{model_name="m",tp_rank="0"}} 0.0',
                                                  f'{P}audit_mismatches_total{{model_name="m",tp_rank="0"}} 1.0')),
        ("pages: the same sum in every scrape", changed(f'{P}pages{{model_name="m",state="host",tp_rank="0"}} 2.0',
                                                        f'{P}pages{{model_name="m",state="host",tp_rank="0"}} 3.0')),
        ("row shares add up to 1", changed('source="host",tp_rank="0"} 0.25', 'source="host",tp_rank="0"} 0.5')),
        ("pressure seen in the gauges", changed(f'{P}device_demand{{model_name="m",tp_rank="0"}} 2.0',
                                                f'{P}device_demand{{model_name="m",tp_rank="0"}} 0.5')),
        ("latency histogram", changed('seconds_bucket{le="+Inf",model_name="m",stage="completed",tp_rank="0"} 2.0',
                                      'seconds_bucket{le="+Inf",model_name="m",stage="completed",tp_rank="0"} 1.0')),
    ],
)  # fmt: skip
def test_each_damage_is_named(demand: str, change: Callable[[str], str]) -> None:
    """Goal: the demand that fails says what is wrong. Method: one edit of the last scrape (gauges: of both) a case."""
    texts = [change(text) for text in TEXTS] if "pressure seen" in demand else [TEXTS[0], change(TEXTS[1])]
    assert demand in failed(texts)


# A process that answers like a server with our metrics; its log, scrapes and recording are files made beforehand.
SERVER = """
import http.server, json, os, pathlib, shutil, signal, sys

prepared = pathlib.Path(os.environ["FAKE_PREPARED"])
port = int(sys.argv[sys.argv.index("--port") + 1])
record_file = pathlib.Path(json.loads(sys.argv[sys.argv.index("--hisparse-config") + 1])["record_file"])
if not record_file.parent.is_dir():
    sys.exit(f'ConfigError: record_file: "{record_file}" is in a folder that is not there; allowed: another')
served = 0
def end(*_):
    shutil.copy(prepared / "recording", record_file)
    os._exit(0)
signal.signal(signal.SIGTERM, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer((prepared / f"scrape{min(served, 1)}").read_bytes() if self.path == "/metrics" else b"ok")
    def do_POST(self):
        global served
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        served += 1
        if served == 1: print((prepared / "log").read_text(), flush=True)
        tokens = list(range(request["sampling_params"]["max_new_tokens"]))
        self.answer(b"data: " + json.dumps({"output_ids": tokens}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

LINE = decode_line(sample(30.0), sample(10.0), 2.0)
IDLE = decode_line(sample(10.0), sample(10.0), 2.0)
TABLE = "HiSparse memory per rank: ratio 8"


@pytest.mark.parametrize(
    ("lines", "good"),
    [
        (["Decode batch", LINE, "Decode batch", IDLE], (True, True)),
        (["Decode batch", "Decode batch", LINE], (True, True)),  # the last line may be on its way
        (["Decode batch", "Decode batch", "Decode batch", "Decode batch", LINE], (False, True)),
        (["Decode batch", LINE, LINE], (False, True)),
        (["Decode batch", LINE.replace("miss rate", "missed")], (False, True)),
        (["Decode batch"], (False, True)),
    ],
)
def test_log_lines(lines: list[str], good: tuple[bool, bool]) -> None:
    """Goal: a line per decode interval, in the documented form. Method: the reporter's own lines, left out or changed."""
    assert tuple(check.ok for check in tool_checks.check_log("\n".join([TABLE, *lines]))) == good
    assert tool_checks.check_log("\n".join(lines))[1].ok is False


def record(path: Path, *, full: bool = True, dropped: int = 0) -> Path:
    writer = RecordingWriter(path, Header("0.1.0", "0.5.23", "some/model", top_k=8, page_size=64, groups=(0, 4)))
    rng = np.random.default_rng(5)
    for number in range(20):
        seq_lens = (100 + number, 5 + number)
        sets = np.full((2, 2, 8), -1, dtype=np.int32)
        for group in sets:
            for row, seq_len in zip(group, seq_lens, strict=True):
                chosen = rng.permutation(seq_len)[: 8 if full else 3]
                row[: chosen.size] = chosen
        counts, positions = pack(sets, seq_lens)
        assert writer.write(Step(number, (0, 1), seq_lens, counts, positions))
    writer.close(dropped, "the test has ended")
    return path


def test_recordings(tmp_path: Path) -> None:
    """Goal: a recording is judged as a replay needs it. Method: whole, half-full sets, many drops, cut, none at all."""

    def bad(path: Path) -> list[str]:
        return [check.check for check in tool_checks.check_recording(path)[0] if not check.ok]

    checks, figures = tool_checks.check_recording(record(tmp_path / "good"))
    assert all(check.ok for check in checks)
    assert (figures["steps"], figures["requests"], figures["longest"]) == (20, 2, 119)
    assert bad(record(tmp_path / "thin", full=False)) == ["every recorded set is full"]
    assert bad(record(tmp_path / "slow", dropped=3)) == ["the recorder kept up"]
    (tmp_path / "cut").write_bytes((tmp_path / "good").read_bytes()[:-30])
    assert bad(tmp_path / "cut") == bad(tmp_path / "nowhere") == ["recording is whole"]


def test_commands_are_run_and_their_failure_is_noted(tmp_path: Path) -> None:
    """Goal: a command that fails fails the run. Method: a plan that works, one for an unknown model, and the result file."""
    root = Path(verify_tools.__file__).parents[1]
    words = [str(tmp_path), "--out", str(tmp_path), "--logs", str(tmp_path), "--plugin", str(root), "--site", str(root)]
    run = verify_tools.Run(verify_tools.parse_arguments([*words, "--commit", "c", "--cache", str(tmp_path)]))
    assert verify_tools.run_command(run, "plan", ["plan", "--model", "GLM-5.1"], 60)["hisparse_config"]["top_k"] == 2048
    assert run.ok
    assert verify_tools.run_command(run, "other", ["plan", "--model", "no-such-model"], 60) == {}
    assert not run.ok
    written = json.loads((tmp_path / "tools_h200.json").read_text())["checks"]
    assert [check["ok"] for check in written] == [True, False] and "no-such-model" in written[1]["found"]
    with pytest.raises(SystemExit):
        verify_tools.parse_arguments([*words, "--parts", "server,nothing"])


def test_the_whole_road_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no GPU time is lost to the script's own mistakes. Method: a process that answers like a server, every demand; the
    replay command, tested by itself, is left out."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    (site / "sglang" / "launch_server.py").write_text(SERVER)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"scrape{number}").write_text(text)
    (tmp_path / "log").write_text(f"{TABLE}\nDecode batch\n{LINE}")
    record(tmp_path / "recording")
    monkeypatch.setenv("FAKE_PREPARED", str(tmp_path))
    monkeypatch.setattr(verify_tools, "SETTLE_SECONDS", 1.0)
    replayed: list[list[str]] = []
    rates = [{"policy": name, "buffer": 64, "miss_rate": rate} for name, rate in (("lru", 0.3), ("belady", 0.2))]

    def replay(run: verify_tools.Run, name: str, arguments: list[str], timeout_s: float) -> dict[str, object]:
        replayed.append(arguments)
        return {"rows": rates} if "--policies" in arguments else {"ok": True, "total": {"mismatches": 0}}

    monkeypatch.setattr(verify_tools, "run_command", replay)
    words = [str(tmp_path), "--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs"), "--commit", "c"]
    words += ["--plugin", str(Path(verify_tools.__file__).parents[1]), "--site", str(site), "--cache", str(tmp_path / "cache")]
    words += ["--replay-device", "cpu", "--port", str(free_port()), "--prompt", "40", "--output", "5"]
    assert verify_tools.main([*words, "--parts", "server,refusal"]) == 0
    written = json.loads((tmp_path / "out" / "tools_h200.json").read_text())
    assert written["ok"] and written["commit"] == "c" and written["recording"]["steps"] == 20
    assert written["recording_policies"] == rates and written["recording_replay"]["mismatches"] == 0
    assert all(arguments[:2] == ["replay", "--stream"] and Path(arguments[2]).is_file() for arguments in replayed)
    demands = {check["check"] for check in written["checks"]}
    assert len(demands) == len(written["checks"]) >= 17
