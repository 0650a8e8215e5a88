"""Backends of the kernel tests: the CPU library, the CUDA device code run thread by thread on the CPU, and the GPU."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse.kernels import build, resolver


@functools.cache
def emulated_library() -> Any:
    """The resolver's device code under the emulation of tests/kernels/emulation; the rest is the CPU library's."""
    import tvm_ffi.cpp

    folder = Path(__file__).parent / "emulation"
    cache = build.cache_folder() / "hisparse_emulated"
    with build.ninja_on_path():
        emulated = tvm_ffi.cpp.load(
            "hisparse_emulated",
            sources=[str(folder / "emulated.cpp")],
            extra_cflags=["-std=c++20", "-O2"],
            extra_include_paths=[str(build.source_folder())],
            build_directory=str(cache),
        )
    return SimpleNamespace(resolve=emulated.resolve, translate_pages=build.load_cpu().translate_pages)


def _chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if name != "cuda" and not shutil.which("c++"):
        pytest.skip("no C++ compiler (c++) on PATH")
    if name == "emulated":
        monkeypatch.setattr(resolver, "library_of", lambda tensor: emulated_library())
        return "cpu"
    return name


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the world's tensors; "emulated" replaces the library and works on CPU tensors."""
    return _chosen(request.param, monkeypatch)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `backend`, for what the CPU library does not have."""
    return _chosen(request.param, monkeypatch)
