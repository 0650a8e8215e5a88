"""Goal: README says what the code does. Method: its tables, commands and figures against their sources."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_hisparse.cli import app
from sglang_hisparse.config import reference_markdown
from sglang_hisparse.layout import KVShape
from sglang_hisparse.validation import refusals_markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL_AND_RUN = "pip install . && sglang-hisparse replay"
INSTALL_AND_TEST = "pip install '.[test]' && pytest -q"


def between(marker: str) -> str:
    """The text between `<!-- marker: ... -->` and the next end marker."""
    found = re.search(rf"<!-- {marker}: [^>]*-->\n(.*?)\n<!-- end -->", README, flags=re.DOTALL)
    assert found is not None, f"README has no {marker} section"
    return found.group(1)


@pytest.mark.parametrize(("marker", "table"), [("settings", reference_markdown()), ("refusals", refusals_markdown())])
def test_generated_tables_are_current(marker: str, table: str) -> None:
    """Goal: the reference is never stale. Method: the marked section equals what the code generates now."""
    assert between(marker) == table


def test_the_two_commands_are_there_each_alone_in_its_block() -> None:
    """Goal: a newcomer can copy them. Method: the fenced shell blocks of README."""
    blocks = re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL)
    assert blocks[:2] == [INSTALL_AND_RUN, INSTALL_AND_TEST]


def test_ci_runs_the_test_command_of_readme() -> None:
    """Goal: what CI proves is what README promises. Method: the script's commands against README's, word for word."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in script.splitlines() if re.match(r"(pip|pytest)\b", line)]
    quiet = {"-q"}
    expected = [shlex.split(part) for part in INSTALL_AND_TEST.split("&&")]
    assert [[word for word in command if word not in quiet] for command in commands] == [
        [word for word in command if word not in quiet] for command in expected
    ]


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ("DeepSeek-V3.2, bf16", KVShape(num_layers=61, num_leaders=61, row_bytes=1152)),
        ("DeepSeek-V3.2, fp8", KVShape(num_layers=61, num_leaders=61, row_bytes=656)),
        ("GLM-5.2, fp8 (21 of 78 layers have an indexer)", KVShape(num_layers=78, num_leaders=21, row_bytes=656)),
    ],
)
def test_capacity_figures_follow_from_the_layout(row: str, shape: KVShape) -> None:
    """Goal: the cost of a ratio is stated truly. Method: recompute each percentage from the bytes of a token."""
    plain = shape.kv_token_bytes + shape.index_token_bytes
    shares = [round(100 * plain / (shape.kv_token_bytes + ratio * shape.index_token_bytes)) for ratio in (2, 4, 10)]
    assert f"| {row} | {shares[0]} % | {shares[1]} % | {shares[2]} % |" in README


def test_every_path_that_readme_names_exists() -> None:
    """Goal: no dead pointer. Method: look up the files and folders in backquotes."""
    named = set(re.findall(r"`((?:[\w-]+/)*[\w.-]+(?:\.(?:md|py|json)|/))`", README))
    assert {"ARCHITECTURE.md", "csrc/", "configs/"} <= named
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "sglang_hisparse"))]
    assert missing == []


@pytest.mark.parametrize("command", sorted(set(re.findall(r"sglang-hisparse (\w+)", README))))
def test_every_command_that_readme_names_exists(command: str) -> None:
    """Goal: README's commands are known to the program. Method: ask each for its help."""
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output


def test_shipped_configs_named_in_readme_are_there() -> None:
    """Goal: the serving command works as it is. Method: the file that it reads exists."""
    (path,) = re.findall(r'"\$\(cat ([^)]+)\)"', README)
    assert (ROOT / path).is_file()
