"""Goal: what README, CONTRIBUTING and CHANGELOG say can be found in the code. Method: names and messages, looked up."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

import sglang_hisparse
from sglang_hisparse.cli import app
from sglang_hisparse.config import describe
from sglang_hisparse.metrics import METRICS, decode_line
from sglang_hisparse.stats import Sample

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = [*(ROOT / "sglang_hisparse").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]


def section(title: str) -> str:
    """The text of README under a heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", README, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found.group(1)


def rows(title: str) -> list[list[str]]:
    """Cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def quoted(text: str) -> list[str]:
    """What stands in backquotes, blocks of commands left out."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def test_every_metric_of_the_table_exists_and_the_important_ones_are_there() -> None:
    """Goal: nobody looks for a metric that is not exported. Method: the table's second column against METRICS."""
    labels = {metric.label for metric in METRICS}
    names = {metric.name for metric in METRICS}
    shown = {name for row in rows("Reading the metrics") for name in quoted(row[1])}
    assert shown - labels <= names
    assert {"row_share", "device_demand", "refusals_total", "audit_mismatches_total"} <= shown
    rare = {"hot_leases_acquired_total", "rehomed_pages_total", "audited_rows_total"}
    assert names - shown <= rare


def test_label_values_of_the_table_exist() -> None:
    """Goal: the table can be typed into a query. Method: words in backquotes of the third column are label values."""
    values = {value for metric in METRICS for value in metric.values}
    shown = {word for row in rows("Reading the metrics") for word in quoted(row[2]) if " " not in word}
    assert shown and shown <= values


def test_the_line_shown_is_the_line_logged() -> None:
    """Goal: the example can be recognised. Method: its field names against those of a line made from zeros."""
    sample: Sample = {metric.name: dict.fromkeys(metric.values, 0.0) for metric in METRICS}
    logged = re.findall(r"(?:^|, )([^,:]+):", decode_line(sample, sample, 1.0))
    (example,) = re.findall(r"^HiSparse, .*$", section("Reading the metrics"), flags=re.MULTILINE)
    shown = re.findall(r"(?:^|, )([^,:]+):", example)
    assert len(shown) >= 5
    assert shown == logged[: len(shown)]


@pytest.mark.parametrize("symptom", [row[0] for row in rows("Troubleshooting")])
def test_every_message_quoted_as_a_symptom_is_in_the_code(symptom: str) -> None:
    """Goal: a searched message leads to its row. Method: look it up in our source, or in SGLang's check."""
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    sglang = Path(spec.origin).parent / "srt" / "arg_groups" / "hisparse_hook.py"
    text = "".join(path.read_text(encoding="utf-8") for path in [*CODE, sglang])
    text = text.replace("{_FLAG}", "--enable-hisparse")
    known = {value for metric in METRICS for value in metric.values}
    missing = [message for message in quoted(symptom) if message not in text and message not in known]
    assert missing == []


def test_remedies_name_settings_and_variables_that_exist() -> None:
    """Goal: a remedy can be followed. Method: snake-case words are settings or metrics, capitals are read by the code."""
    keys = {doc.key for doc in describe()} | {metric.name for metric in METRICS}
    source = "".join(path.read_text(encoding="utf-8") for path in CODE)
    words = [word for row in rows("Troubleshooting") for word in quoted(" ".join(row[1:]))]
    settings = {word for word in words if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)}
    variables = {found for word in words for found in re.findall(r"[A-Z]+(?:_[A-Z]+)+", word)}
    assert settings and settings <= keys
    assert {"SGLANG_HISPARSE_PREBUILT_DIR", "SGLANG_HISPARSE_AUDIT"} <= variables
    assert [name for name in variables if f'"{name}"' not in source] == []


@pytest.mark.parametrize("line", re.findall(r"^python3 scripts/.*$", CONTRIBUTING, flags=re.MULTILINE))
def test_commands_of_contributing_exist_with_their_flags(line: str) -> None:
    """Goal: the commands can be copied. Method: the script is there, and its parser knows each flag."""
    words = shlex.split(line, comments=True)
    source = (ROOT / words[1]).read_text(encoding="utf-8")
    flags = [word for word in words[2:] if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in source] == []


def test_paths_and_variables_of_contributing_exist() -> None:
    """Goal: no dead pointer. Method: look up paths in backquotes, and the environment variables in the code."""
    paths = [word for word in quoted(CONTRIBUTING) if re.fullmatch(r"[\w./-]+(\.(py|md)|/)|\.ci/run", word)]
    assert {"hooks.py", "tests/test_style.py", "csrc/"} <= set(paths)
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "sglang_hisparse"))]
    assert missing == []
    source = "".join(path.read_text(encoding="utf-8") for path in CODE)
    variables = set(re.findall(r"SGLANG_HISPARSE_[A-Z_]+", CONTRIBUTING))
    assert variables and [name for name in variables if f'"{name}"' not in source] == []


def test_the_changelog_describes_this_version() -> None:
    """Goal: a release is described. Method: the newest entry is the package's version and names all its commands."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert versions[0] == sglang_hisparse.__version__
    (line,) = re.findall(r"^- `sglang-hisparse plan`.*? and `\w+`", changelog, flags=re.MULTILINE)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {word.split()[-1] for word in quoted(line)} == commands
