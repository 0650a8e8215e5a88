"""Checks of what is installed: Python, SGLang, the plugin's entry point and hooks, compilers and built kernels.

Called by the command `check`. Imports SGLang in a process of its own only: its import is slow, and may fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from sglang_hisparse.doctor.findings import Finding, error, ok, warning
from sglang_hisparse.errors import KernelBuildError
from sglang_hisparse.plugin import TESTED_SGLANG

LEAST_PYTHON = (3, 11)
GROUP, NAME, TARGET = "sglang.srt.plugins", "hisparse", "sglang_hisparse.plugin:register"
HOOKS_TIMEOUT_SECONDS = 300
HOPPER = "9.0a"

_PROBE = """
from sglang_hisparse.plugin import _why_not
reason = _why_not()
if reason is None:
    from sglang_hisparse.hooks import HOOKS
print("RESULT", reason or f"all {len(HOOKS)} places are there")
raise SystemExit(reason is not None)
"""


def check_python(version_info: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Whether this interpreter is new enough."""
    shown = ".".join(map(str, version_info))
    if version_info[:2] < LEAST_PYTHON:
        return error("Python", shown, "install Python 3.11 or later and this package in an environment of it")
    return ok("Python", shown)


def check_sglang(installed: str | None = None) -> Finding:
    """Whether SGLang is the version that the hooks are made for."""
    try:
        installed = installed or version("sglang")
    except PackageNotFoundError:
        return error("SGLang", "not installed", f"pip install sglang=={TESTED_SGLANG}")
    if installed != TESTED_SGLANG:
        return error("SGLang", f"{installed}; made for {TESTED_SGLANG}", f"pip install sglang=={TESTED_SGLANG}")
    return ok("SGLang", installed)


def check_entry_point(points: tuple[EntryPoint, ...] | None = None) -> Finding:
    """Whether SGLang will find the plugin, and only one of its name."""
    found = tuple(entry_points(group=GROUP)) if points is None else points
    ours = [point for point in found if point.name == NAME]
    if not ours:
        return error(
            "plugin", f"no entry point {NAME!r} in group {GROUP}", "pip install this package into SGLang's environment"
        )
    strange = sorted({point.value for point in ours} - {TARGET})
    if strange:
        return error("plugin", f"another package calls itself {NAME!r}: {', '.join(strange)}", "uninstall that package")
    others = sorted({point.name for point in found} - {NAME})
    return ok("plugin", f"entry point {NAME}" + (f"; beside it: {', '.join(others)}" if others else ""))


def check_plugin_list(environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether SGLANG_PLUGINS leaves the plugin in."""
    value = environ.get("SGLANG_PLUGINS", "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if value and NAME not in names:
        return error(
            "SGLANG_PLUGINS", f"{value!r} leaves {NAME} out", f"unset it, or set it to {','.join([*names, NAME])}"
        )
    return ok("SGLANG_PLUGINS", f"names {NAME}" if value else "not set: all plugins are loaded")


def check_hooks(fast: bool) -> Finding:
    """Whether every place that the plugin hooks exists; imports SGLang in another process."""
    if fast:
        return warning("hooks", "skipped (--fast)", "leave --fast out once after installing")
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], check=False, capture_output=True, text=True, timeout=HOOKS_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return error(
            "hooks", f"SGLang was not imported within {HOOKS_TIMEOUT_SECONDS} s", 'try: python -c "import sglang"'
        )
    found = [line.removeprefix("RESULT ") for line in probe.stdout.splitlines() if line.startswith("RESULT ")]
    if probe.returncode == 0 and found:
        return ok("hooks", found[-1])
    last = probe.stderr.strip().splitlines()[-1:] or ["no output"]
    return error("hooks", (found or last)[-1], f"install SGLang {TESTED_SGLANG} unchanged")


def check_kernels(architecture: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Finding, ...]:
    """Whether the CUDA kernels are there or can be compiled. architecture None: no GPU tells it, Hopper's is taken.

    Three lines: kernels, nvcc, C++ compiler. The compilers are not needed where a library was built ahead of time.
    """
    from sglang_hisparse.kernels import build, prebuilt

    try:
        library = prebuilt.find(build.cuda_library(architecture or HOPPER))
    except KernelBuildError as problem:
        first, *remedy = re.split(r"\. Remedy: |; allowed: ", str(problem).splitlines()[0], maxsplit=1)
        kernels = error(
            "kernels", first, remedy[0] if remedy else "build them again: sglang-hisparse build --out FOLDER"
        )
        return kernels, *_compilers(architecture, environ, needed=True)
    if library is not None:
        return ok("kernels", f"prebuilt: {library}"), *_compilers(architecture, environ, needed=False)
    cached = len(list(build.cache_folder().glob("hisparse_cuda_*/complete")))
    if cached:
        kernels = ok("kernels", f"{cached} in {build.cache_folder()}; one for other sources or flags is not used")
    else:
        command = "sglang-hisparse build" + ("" if architecture else f" --arch {HOPPER}")
        remedy = f"the first start compiles them; `{command}` does it now"
        kernels = warning("kernels", f"none in {build.cache_folder()}", remedy)
    return kernels, *_compilers(architecture, environ, needed=True)


def _compilers(architecture: str | None, environ: Mapping[str, str], *, needed: bool) -> tuple[Finding, Finding]:
    from sglang_hisparse.kernels.build import cuda_home

    try:
        nvcc = ok("CUDA toolkit", f"nvcc in {cuda_home()}")
    except KernelBuildError as problem:
        # Where there is no GPU nothing is compiled for one, so that nothing is wrong yet.
        line = warning if architecture is None else error
        remedy = str(problem).partition(": ")[2]
        nvcc = line("CUDA toolkit", "nvcc not found", remedy) if needed else ok("CUDA toolkit", "not found, not needed")
    name = environ.get("CXX", "c++")
    path = shutil.which(name, path=environ.get("PATH"))
    if path is not None:
        return nvcc, ok("C++ compiler", path)
    if not needed:
        return nvcc, ok("C++ compiler", "not found, not needed")
    return nvcc, error("C++ compiler", f"{name} not found", "install one (for example the package g++) or set CXX")
