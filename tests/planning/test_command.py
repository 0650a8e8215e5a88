"""Goal: the command's tables, JSON, plot and refusals. Method: the command line in this process, on built-in models."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_hisparse.cli import app
from sglang_hisparse.config import parse_config
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.layout_table import render
from sglang_hisparse.planning.model_shapes import BUILT_IN, built_in
from sglang_hisparse.planning.planner import Choices, Deployment, Load, make_plan
from sglang_hisparse.planning.plots import curves
from sglang_hisparse.planning.report import as_json, flags_of, notes_of, reasons_of, settings_of

NODE = ["plan", "--model", "GLM-5.1", "--dp", "8", "--host-memory-gib", "1800"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_tables_json_and_plot_tell_the_same(tmp_path: Path) -> None:
    """Goal: one plan in three forms. Method: the output's counts against the JSON; the PNG by its first bytes."""
    numbers, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    output = run(*NODE, "--json", str(numbers), "--plot", str(picture))
    plan = json.loads(numbers.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    counts = {fit["mode"]: fit["total"] for fit in (plan["plain"], *plan["hisparse"])}
    assert counts["full"] <= counts["plain"] < counts["mixed"] <= counts["none"]
    for mode, total in counts.items():
        (row,) = [line for line in output.splitlines() if line.startswith(f"│ {mode}:")]
        assert row.split("│")[3].strip() == str(total)
    assert plan["server_arguments"] in output
    assert f"{plan['memory']['device_tokens']} tokens" in output
    assert plan["host_bytes_per_token"] == 78 * 656
    assert (plan["model"]["name"], plan["device"]["weights_estimated"]) == ("GLM-5.1", True)


def test_the_settings_are_accepted_and_each_has_its_reason() -> None:
    """Goal: the line can be pasted. Method: it is split as a shell does and parsed as a server does."""
    planned = make_plan(built_in("GLM-5.2"), Deployment(dp=8), Load(), Choices(host_pool_gib=90))
    words = shlex.split(flags_of(planned))
    text = words[words.index("--hisparse-config") + 1]
    resolved = parse_config(text).resolve(planned.model.facts)
    assert resolved.host_to_device_ratio == planned.memory.requested_ratio
    assert (resolved.device_buffer_size, resolved.host_pool_gib) == (4096, 90)
    assert set(reasons_of(planned)) == {*settings_of(planned), "--max-running-requests"}
    assert "--enable-hisparse" in words and "--attn-dp-size" in words


def test_options_of_the_config_reach_settings_and_table(tmp_path: Path) -> None:
    """Goal: what is asked for is planned and can be pasted. Method: both tokens of the border in the table; the settings parsed."""
    target = tmp_path / "plan.json"
    output = run(*NODE, "--elastic-border", "--eviction", "index_score", "--ratio", "6", "--json", str(target))
    plan = json.loads(target.read_text())
    resolved = parse_config(json.dumps(plan["hisparse_config"])).resolve(built_in("GLM-5.1").facts)
    assert resolved.elastic_border and resolved.evicts_by_score
    memory = plan["memory"]
    assert f"{memory['device_tokens']} tokens" in output
    assert f"{plan['least_device_tokens']} + {memory['logical_tokens']} tokens" in output
    assert memory["device_tokens"] > 1.5 * plan["least_device_tokens"]
    assert {"elastic_border", "eviction"} <= set(plan["reasons"])
    json_of_default = tmp_path / "default.json"
    output = run(*NODE, "--ratio", "6", "--json", str(json_of_default))
    default = json.loads(json_of_default.read_text())
    assert not {"elastic_border", "eviction"} & set(default["hisparse_config"])
    assert default["least_device_tokens"] == default["memory"]["device_tokens"], "a node of eight GPUs: fixed unless asked for"
    assert any(note.startswith("elastic_border, left open, is off, since it has not run on several GPUs yet") for note in default["notes"])
    run(*NODE, "--ratio", "6", "--no-elastic-border", "--json", str(json_of_default))
    fixed = json.loads(json_of_default.read_text())
    assert fixed["hisparse_config"]["elastic_border"] is False
    assert fixed["least_device_tokens"] == fixed["memory"]["device_tokens"]


def test_a_border_that_gains_nothing_says_so() -> None:
    """Goal: plan and table name why it stays where it is. Method: one GPU and ratio 1, at which index-K of all logical tokens fits; a
    higher one, and it moves."""
    one_gpu = Deployment(gpus=1, tp=1, weight_bytes=60 << 30)
    planned = make_plan(built_in("GLM-5.1"), one_gpu, Load(4096, 512), Choices(ratio=6))
    assert any(note.startswith("elastic_border, left open, is on: the server begins") for note in notes_of(planned))
    assert planned.memory.device_tokens > 1.3 * planned.memory.least_device_tokens
    planned = make_plan(built_in("GLM-5.1"), one_gpu, Load(4096, 512), Choices(ratio=1))
    why = f"{planned.memory.device_tokens} tokens fit on the GPU beside index-K of all {planned.memory.logical_tokens}"
    assert f"elastic_border, left open, is off, since {why}" in list(notes_of(planned))
    assert f"elastic_border is off, since {why}" in " ".join(render(planned.memory).split())


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(), ("break-even: up to", "plain SGLang is ahead", "above")),
        (Load(500, 100), ("HiSparse brings nothing here",)),
    ],
)
def test_break_even_is_told(load: Load, words: tuple[str, ...]) -> None:
    """Goal: the plan says when not to use it. Method: long requests, and ones shorter than a hot buffer."""
    planned = make_plan(built_in("GLM-5.1"), Deployment(dp=8), load, Choices(elastic=False))
    text = "\n".join(notes_of(planned))
    assert all(word in text for word in words)
    assert (planned.mixed.total > planned.plain.total) == ("above" in words)


@pytest.mark.parametrize(
    ("load", "rows", "chosen"),
    [(Load(4000, 256), None, 2560), (Load(4000, 256), 4096, 4096), (Load(6000, 1000), None, 4096), (Load(500, 100), None, 4096)],
)
def test_hot_buffers_leave_short_requests_something_to_give(load: Load, rows: int | None, chosen: int) -> None:
    """Goal: a smaller buffer is planned where the default gains nothing and it does, and not otherwise. Method: short, longer and
    tiny requests, and a buffer that was asked for; the plan of the smaller buffer by itself."""
    planned = make_plan(built_in("DeepSeek-V3.2"), Deployment(dp=8), load, Choices(buffer_rows=rows))
    assert settings_of(planned)["device_buffer_size"] == chosen and planned.narrowed == (chosen == 2560)
    assert ("nearly as large as a request of 4256 tokens" in reasons_of(planned)["device_buffer_size"]) == planned.narrowed
    if planned.narrowed:
        default = make_plan(built_in("DeepSeek-V3.2"), Deployment(dp=8), load, Choices(buffer_rows=4096))
        assert planned.mixed.total > planned.plain.total >= default.mixed.total


def test_notes_name_what_is_not_certain() -> None:
    """Goal: estimates are marked. Method: a model whose shape is assumed; parallelism that repeats the cache."""
    planned = make_plan(built_in("GLM-5.3"), Deployment(dp=1), Load(), Choices())
    text = "\n".join(notes_of(planned))
    assert BUILT_IN["GLM-5.3"].note in text and "--dp 1" in text


def test_a_step_at_which_it_pays() -> None:
    """Goal: the break-even step time is where both make the same tokens a second. Method: throughput of both at it."""
    planned = make_plan(built_in("GLM-5.2"), Deployment(dp=8), Load(), Choices())
    time = next(t for t in planned.link if t.ahead_above_ms is not None)
    step = time.ahead_above_ms
    assert time.requests / (step + time.exposed_ms) == pytest.approx(planned.plain.per_cache / step)


def test_curves_fall_with_context_and_pass_through_the_plan() -> None:
    """Goal: the plot shows the plan. Method: longer prompts never fit more; the nearest point agrees with the table."""
    planned = make_plan(built_in("DeepSeek-V3.2"), Deployment(dp=8), Load(32768, 8192), Choices())
    by_mode = {curve.mode: curve for curve in curves(planned)}
    assert list(by_mode) == ["plain", "full", "mixed", "none"]
    for fit in (planned.plain, *planned.hisparse):
        curve = by_mode[fit.mode]
        assert list(curve.requests) == sorted(curve.requests, reverse=True)
        below = [count for prompt, count in zip(curve.prompt_tokens, curve.requests, strict=True) if prompt <= 32768]
        above = [count for prompt, count in zip(curve.prompt_tokens, curve.requests, strict=True) if prompt >= 32768]
        assert above[0] <= fit.total <= below[-1]


def test_json_holds_every_figure() -> None:
    """Goal: scripts need not parse tables. Method: the object survives JSON and has all parts."""
    planned = make_plan(built_in("GLM-5.1"), Deployment(dp=8), Load(), Choices())
    plan = json.loads(json.dumps(as_json(planned)))
    assert {"model", "deployment", "load", "device", "memory", "plain", "hisparse", "link", "reasons"} <= set(plan)
    assert 0 < plan["device_share_of_plain"] < 1
    parts = ("overhead", "slack", "weights", "cache")
    assert sum(plan["device"][part] for part in parts) == plan["device"]["total"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give one of them"),
        (["plan", "--model", "GLM-4"], "is not built in"),
        (["plan", "--model", "GLM-5.1", "--gpus", "8", "--tp", "3"], "--tp: 3 does not divide 8"),
        (["plan", "--model", "GLM-5.1", "--host-memory-gib", "10"], "host memory"),
    ],
)
def test_refusals_are_errors_of_one_line(arguments: list[str], message: str) -> None:
    """Goal: what cannot be planned is told. Method: the error that `main` prints, for each."""
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_a_config_file_plans_like_the_built_in(tmp_path: Path) -> None:
    """Goal: --config-json is the same road. Method: the built-in config as a file, weights given for both."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(BUILT_IN["GLM-5.1"].config)))
    plans = []
    for index, source in enumerate((["--model", "GLM-5.1"], ["--config-json", str(path)])):
        target = tmp_path / f"{index}.json"
        run("plan", *source, "--weights-gib", "90", "--dp", "8", "--json", str(target))
        plans.append(json.loads(target.read_text()))
    assert [plan["memory"] for plan in plans] == [plans[0]["memory"]] * 2
    assert plans[0]["server_arguments"] == plans[1]["server_arguments"]
