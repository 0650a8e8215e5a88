"""Goal: the command's output, JSON and exit status. Method: the installed command line in-process, on a small load."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from replay.small import SMALL
from sglang_hisparse.cli import app
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.replay.figures import Counts, ReplayReport
from sglang_hisparse.replay.options import ReplayOptions

ARGUMENTS = [
    "replay", "--scale", "0.2", "--top-k", "32", "--buffer", "64", "--row-bytes", "16", "--device-pages", "140",
    "--min-context", "256", "--max-context", "2048", "--max-output", "64", "--requests", "8",
]  # fmt: skip


class ReportFile(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON file's form: a report and its verdict."""

    ok: bool
    parameters: dict[str, int | float | str]
    phases: list[dict[str, object]]
    total: dict[str, int | float]
    profiles: list[dict[str, int | str]]
    problems: list[str]


def test_run_prints_tables_and_writes_json(tmp_path: Path) -> None:
    """Goal: exit status 0, every phase named, a JSON file of the promised form. Method: strict decoding of the file."""
    path = tmp_path / "replay.json"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--json", str(path)])
    assert result.exit_code == 0, result.output
    for text in ("warm-up", "growth", "pressure", "re-arrival", "drain", "fetched from the host", "ok: 0 mismatches"):
        assert text in result.output
    data = msgspec.json.decode(path.read_bytes(), type=ReportFile, strict=True)
    assert data.ok
    assert data.parameters["top_k"] == 32 and data.parameters.keys() == set(ReplayOptions.__dataclass_fields__)
    assert [phase["name"] for phase in data.phases] == ["warm-up", "growth", "pressure", "re-arrival", "drain"]
    assert data.total.keys() == set(Counts.__struct_fields__)
    report = msgspec.json.decode(path.read_bytes(), type=ReplayReport)
    assert report.ok and report.total.rows_checked > 0


def test_wrong_bytes_give_exit_status_1(tmp_path: Path) -> None:
    """Goal: machines see a failure. Method: a planted fault; the file says so too."""
    path = tmp_path / "replay.json"
    result = CliRunner().invoke(app, [*ARGUMENTS, "--plant", "table", "--json", str(path)])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output
    assert not msgspec.json.decode(path.read_bytes(), type=ReportFile).ok


def test_bad_options_are_refused() -> None:
    """Goal: one clear error. Method: a value that only the replay can judge, one that the parser can."""
    result = CliRunner().invoke(app, ["replay", "--buffer", "100"])
    assert isinstance(result.exception, ConfigError) and "multiple of the page" in str(result.exception)
    assert CliRunner().invoke(app, ["replay", "--profile", "unknown"]).exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--seed", "--device", "--profile", "--plant", "--top-k", "--row-bytes"])
def test_help_names_every_option(option: str) -> None:
    """Goal: the options are documented. Method: the help text, wide enough not to cut names."""
    result = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"})
    assert option in result.output


def test_small_options_are_options() -> None:
    """Goal: the shared test load names real options. Method: every key is a field."""
    assert set(SMALL) <= set(ReplayOptions.__dataclass_fields__)
