"""Runs code in an interpreter of its own, for tests of what is patched once in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import sglang_hisparse


def run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter that finds this package; returns what it printed. Fails with its output."""
    root = str(Path(sglang_hisparse.__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measure_apart(module: str, *arguments: Any) -> Any:
    """What `measure` of a script returns, as JSON has it, from an interpreter of its own: hooks stay in a process for good, and plain
    SGLang has none."""
    tests = Path(__file__).resolve().parent
    called = f"{module}.measure({', '.join(map(repr, arguments))})"
    printed = run_python(
        f"import sys; sys.path[:0] = [{str(tests.parent / 'scripts')!r}, {str(tests)!r}]; "
        f"import json, {module}; print(json.dumps({called}))"
    )
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))
