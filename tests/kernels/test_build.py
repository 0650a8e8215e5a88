"""Goal: kernels build everywhere they must, and a failed build says what to do. Method: real compilers, no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_report
import pytest

from sglang_hisparse.errors import KernelBuildError
from sglang_hisparse.kernels import build


def _toolkit_missing() -> str | None:
    try:
        build.cuda_home()
    except KernelBuildError as error:
        return str(error)
    return None


needs_nvcc = pytest.mark.skipif(_toolkit_missing() is not None, reason=str(_toolkit_missing()))


@needs_nvcc
@pytest.mark.parametrize("architecture", kernel_report.ARCHITECTURES)
def test_kernels_compile_without_spills(architecture: str) -> None:
    """Goal: no kernel keeps registers in memory. Method: nvcc for each architecture, ptxas's own report."""
    uses = kernel_report.report(architecture)
    assert {use.name.split("<")[0] for use in uses} >= {"resolve_kernel", "copy_pages_kernel", "translate_kernel"}
    assert [use for use in uses if use.spills] == []
    # Two blocks of 512 threads, or four of copying kernels with 256, share 65,536 registers; unions hold rows in them, two blocks.
    most = {use.name: 128 if use.name.startswith("union_fetch") else 64 for use in uses}
    assert [use for use in uses if use.registers > most[use.name]] == []


def test_report_sees_a_spill() -> None:
    """Goal: the test above can fail. Method: ptxas text of a kernel that spills."""
    text = (
        "ptxas info    : Compiling entry function '_ZN8hisparse14resolve_kernelILi1ELi0ELi3EEEvv' for 'sm_90a'\n"
        "    72 bytes stack frame, 156 bytes spill stores, 228 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 72 bytes cumulative stack size\n"
    )
    (use,) = kernel_report.parse(text)
    assert use.name == "resolve_kernel<1, 0, 3>" and use.spills and use.registers == 64


def test_second_process_finds_the_library(tmp_path: Path) -> None:
    """Goal: processes that start together build once. Method: two at once on an empty cache, one library, both work."""
    program = "from sglang_hisparse.kernels.build import load_cpu; load_cpu().resolve; print('loaded')"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, build.CACHE_VARIABLE: str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["loaded"] * 2
    assert len(list(tmp_path.glob("hisparse_cpu_*/complete"))) == 1


def test_broken_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a failed build tells its cause and remedy. Method: a compiler that answers --version and nothing else."""
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such architecture" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(KernelBuildError, match=r"(?s)hisparse_cpu failed. Remedy: .*no such architecture"):
        build.build_cpu()


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a missing compiler is asked for by name. Method: an empty PATH."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="'no-such-compiler' not found: install one"):
        build.build_cpu()


def test_key_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an edit is never hidden by the cache. Method: the key of a copy of the sources before and after an edit."""
    for source in build.source_folder().iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    before = build._key((), "9.0a")
    assert build._key((), "10.0a") != before
    with (tmp_path / "rows.cuh").open("a") as source:
        source.write("// edited\n")
    assert build._key((), "9.0a") != before
