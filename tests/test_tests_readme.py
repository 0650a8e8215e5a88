"""Goal: the tables of tests/README.md do not rot. Method: every test and every planted bug that they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
MUTATION_FILES = ("mutations.py", "border_mutations.py", "sharing_mutations.py")
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    """Goal: no row points at nothing. Method: parse the files that the tables name."""
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 80
    for path, function in set(named):
        tree = ast.parse((FOLDER / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{path}::{function}"


def test_every_named_mutation_exists() -> None:
    """Goal: the planted bugs are those of the simulator. Method: quoted names of the table of invariants."""
    planted = "".join((FOLDER / "sim" / name).read_text(encoding="utf-8") for name in MUTATION_FILES)
    rows = [line for line in TEXT.splitlines() if re.match(r"\| I\d+ ", line)]
    assert len(rows) == 10
    names = [name for row in rows for name in re.findall(r'"([^"]+)"', row)]
    assert len(names) > 8
    assert [name for name in names if f'"{name}"' not in planted] == []


def test_every_trap_has_its_row() -> None:
    """Goal: none of the 22 traps is forgotten. Method: the numbers of the first table."""
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", TEXT, flags=re.MULTILINE)] == list(range(1, 23))
