"""Runs code in an interpreter of its own, for tests of what is patched once in a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

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
