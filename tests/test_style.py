"""Goal: the code base stays readable and self-contained. Method: limits and words, checked file by file."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("sglang_hisparse", "tests", "scripts", "csrc", "configs", ".ci")
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".json", ".md", ".toml", ""}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
# Paths and words of the machines on which the project happens to be worked on, spelt so that this file has none.
BANNED = re.compile("|".join(["/" + "work/", "/" + "root/", "py" + "env", "pypi" + "-more"]))


def sources(*suffixes: str) -> list[Path]:
    """Our files with these suffixes, those at the root included; generated results are data, not sources."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
    return sorted(path for path in files if path.suffix in suffixes and _is_ours(path))


def _is_ours(path: Path) -> bool:
    relative = name(path)
    if not path.is_file() or "__pycache__" in relative or "egg-info" in relative:
        return False
    return path.suffix == ".md" or not relative.startswith("scripts/results/")


def name(path: Path) -> str:
    """Path relative to the root, as a test id."""
    return path.relative_to(ROOT).as_posix()


def test_the_search_finds_the_code() -> None:
    """Goal: the tests below look at something. Method: count files that are known to exist."""
    assert {"sglang_hisparse/config.py", "tests/test_style.py", ".ci/run", "README.md"} <= set(
        map(name, sources(*SUFFIXES))
    )


@pytest.mark.parametrize("path", sources(".py", ".cu", ".cuh", ".h", ".cpp", ".sh"), ids=name)
def test_files_are_short(path: Path) -> None:
    """Goal: a file can be read in one sitting. Method: count its lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES


@pytest.mark.parametrize("path", sources(".py"), ids=name)
def test_functions_are_short_and_modules_say_what_they_own(path: Path) -> None:
    """Goal: a function fits a screen and a module introduces itself. Method: walk the syntax tree."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []
    if tree.body:
        assert ast.get_docstring(tree), "no module docstring"


@pytest.mark.parametrize(
    "path", [path for path in sources(".py") if path.name.startswith("test_") and "tests" in path.parts], ids=name
)
def test_every_test_begins_with_its_goal(path: Path) -> None:
    """Goal: a failing test tells what it is for. Method: every test function has a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("path", sources(*SUFFIXES), ids=name)
def test_no_path_of_one_machine(path: Path) -> None:
    """Goal: the project speaks of itself alone. Method: search every text file for paths of build machines."""
    text = path.read_text(encoding="utf-8")
    found = [f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()}" for match in BANNED.finditer(text)]
    assert found == []


def test_every_package_and_every_kernel_source_is_shipped() -> None:
    """Goal: the wheel holds all that a checkout holds. Method: folders and suffixes against pyproject.toml."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "sglang_hisparse").rglob("*.py")}
    packages = {".".join(folder.parts) for folder in folders}
    assert packages | {"sglang_hisparse.csrc"} == set(setuptools["packages"])
    patterns = setuptools["package-data"]["sglang_hisparse.csrc"]
    kernels = [
        path for path in (ROOT / setuptools["package-dir"]["sglang_hisparse.csrc"]).rglob("*") if path.is_file()
    ]
    left_out = [name(path) for path in kernels if not any(path.relative_to(ROOT / "csrc").match(p) for p in patterns)]
    assert kernels and left_out == []
    assert all(path.parent == ROOT / "csrc" for path in kernels), "package data is listed for one folder"
