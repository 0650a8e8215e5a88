"""Goal: the command line accepts, refuses and explains settings. Method: run it in this process and as a program."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sglang_hisparse
from sglang_hisparse.cli import app
from sglang_hisparse.config import describe, reference_markdown
from sglang_hisparse.validation import refusals_markdown

GLM = {
    "num_hidden_layers": 78,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The program as the console script starts it."""
    program = "import sys; from sglang_hisparse.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_config_alone_shows_every_setting() -> None:
    """Goal: the reference is one command away. Method: every key appears, none cut."""
    result = CliRunner().invoke(app, ["config"])
    assert result.exit_code == 0
    for doc in describe():
        assert doc.key in result.output


def test_config_with_a_file_and_a_model_shows_what_they_amount_to(tmp_path: Path) -> None:
    """Goal: settings can be checked without a server. Method: a file and a model's config, nested as in a VLM's."""
    settings = tmp_path / "settings.json"
    settings.write_text('{"device_buffer_size": 6144}')
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"text_config": GLM}))
    result = CliRunner().invoke(app, ["config", str(settings), "--model", str(model)])
    assert result.exit_code == 0
    rows = {cells[0]: cells[1] for line in result.output.splitlines() if len(cells := line.strip("│ ").split("│")) == 2}
    shown = {key.strip(): value.strip() for key, value in rows.items()}
    assert shown["top_k"] == "2048"
    assert shown["pages of one hot buffer"] == "96"
    assert shown["layers with an indexer"] == "21 of 78"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"topk": 2048}', "topk: unknown key; did you mean top_k?"),
        ('{"host_to_device_ratio": 0.5}', "host_to_device_ratio: 0.5 is below 1; allowed: a number >= 1, or null"),
        ("no-such-file.json", "no-such-file.json: is neither a file nor a JSON object"),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_status_2(settings: str, message: str) -> None:
    """Goal: scripts can tell a bad setting from a crash. Method: run the program; look at status and both streams."""
    result = run("config", settings)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: ConfigError: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_a_model_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """Goal: a wrong path to the model is told as such. Method: pass a text file."""
    model = tmp_path / "README"
    model.write_text("no json")
    result = run("config", "{}", "--model", str(model))
    assert (result.returncode, result.stdout) == (2, "")
    assert "is not JSON" in result.stderr


def test_markdown_prints_both_tables_of_readme() -> None:
    """Goal: README can be regenerated. Method: compare with the generators."""
    result = CliRunner().invoke(app, ["config", "--markdown"])
    assert result.output.strip() == f"{reference_markdown()}\n\n{refusals_markdown()}"


def test_version_and_help_need_neither_torch_nor_sglang() -> None:
    """Goal: the command answers at once. Method: a fresh interpreter in which importing either raises."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\nfrom sglang_hisparse.cli import main\nmain()"
    )
    for arguments, expected in ((["--version"], sglang_hisparse.__version__), (["--help"], "config")):
        result = subprocess.run([sys.executable, "-c", program, *arguments], check=False, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_build_fills_the_cache_ahead_of_time(tmp_path: Path) -> None:
    """Goal: no server needs to wait for the compiler. Method: build for the CPU into an empty cache; look there."""
    result = run("build", "--cpu-only", SGLANG_HISPARSE_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "CPU library: ready" in result.stdout
    assert list(tmp_path.rglob("*.so"))


def test_build_without_a_compiler_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Goal: a missing compiler is told in one line. Method: name one that does not exist, with an empty cache."""
    result = run("build", "--cpu-only", SGLANG_HISPARSE_CACHE_DIR=str(tmp_path), CXX="no-such-compiler")
    assert (result.returncode, result.stdout.strip()) == (2, "")
    assert result.stderr.startswith("error: KernelBuildError: C++ compiler 'no-such-compiler' not found")
