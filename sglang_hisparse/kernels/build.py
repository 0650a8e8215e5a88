"""Compiles and loads the two kernel libraries: CUDA (tvm-ffi, on first use) and CPU (a C++ compiler is enough).

Called by the wrappers of this folder and by the `build` command. Owns the cache folder and its key (source text, flags,
architecture, compiler and tvm-ffi version) and the lock that lets several processes start at once. A library built
ahead of time (prebuilt.py) is taken instead, without a compiler. Never touches the package folder, and never builds for
an architecture other than the one asked for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_hisparse.errors import KernelBuildError
from sglang_hisparse.kernels import prebuilt

if TYPE_CHECKING:
    from tvm_ffi import Module

CACHE_VARIABLE = "SGLANG_HISPARSE_CACHE_DIR"
CUDA_SOURCES = ("resolver.cu", "page_copy.cu", "union_fetch.cu", "counters.cu", "binding.cpp")
CPU_SOURCES = ("resolver_cpu.cpp",)
CUDA_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo")
CPP_FLAGS = ("-std=c++20", "-O3")


def source_folder() -> Path:
    """Folder of the C++ and CUDA sources: beside this package in an installed copy, else in the source tree."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "params.h").is_file():
            return folder
    raise KernelBuildError(
        f"kernel sources not found beside {package}: the installation is incomplete, install it again"
    )


def cache_folder() -> Path:
    """Folder of the compiled libraries: $SGLANG_HISPARSE_CACHE_DIR, else ~/.cache/sglang-hisparse."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "sglang-hisparse")


def device_architecture(device: int | None = None) -> str:
    """Architecture of a CUDA device (default: the current one) as nvcc wants it, such as "9.0a"."""
    import torch

    if not torch.cuda.is_available():
        raise KernelBuildError(
            "no CUDA device is visible: name the architecture (for example 9.0a) to build without one"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        raise KernelBuildError(
            f"compute capability {major}.{minor} lacks thread block clusters: 9.0 or newer is needed"
        )
    return f"{major}.{minor}a"


def parse_architecture(text: str) -> str:
    """An architecture as a person writes it ("sm_90a", "9.0a"), in the form that `build_cuda` takes. Raises
    KernelBuildError."""
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)([af]?)", text)
    if found is None or int(found[1]) < 9:
        raise KernelBuildError(
            f"--arch: {text!r} is no architecture with thread block clusters; allowed: such as sm_90a, sm_100a or 9.0a"
        )
    # Blackwell's and Hopper's own instructions need the suffix, and it is what a GPU that is asked answers.
    return f"{found[1]}.{found[2]}{found[3] or 'a'}"


def cuda_home() -> Path:
    """Root of the CUDA toolkit: $CUDA_HOME, $CUDA_PATH, /usr/local/cuda, the pip toolkit, or what nvcc on PATH belongs to."""
    candidates = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates.append(Path("/usr/local/cuda"))
    candidates += [Path(entry) / "nvidia" / "cu13" for entry in sys.path if entry]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(Path(nvcc).resolve().parents[1])
    for home in candidates:
        if (home / "bin" / "nvcc").is_file():
            return home
    raise KernelBuildError("nvcc not found: install the CUDA toolkit and set CUDA_HOME to its folder")


@functools.cache
def load_cuda(architectures: str | None = None) -> Module:
    """Load the CUDA library for `architectures`: a prebuilt one, else see `build_cuda`."""
    architectures = architectures or device_architecture()
    return load(prebuilt.find(cuda_library(architectures)) or build_cuda(architectures))


@functools.cache
def load_cpu() -> Module:
    """Load the CPU library: a prebuilt one, else see `build_cpu`."""
    return load(prebuilt.find(cpu_library()) or build_cpu())


def cuda_library(architectures: str) -> prebuilt.Library:
    """What a prebuilt CUDA library for `architectures` must be; no compiler is asked, since there may be none."""
    target = f"{architectures}-{platform.machine()}"
    return prebuilt.Library("hisparse_cuda", target, _key(CUDA_FLAGS, target))


def cpu_library() -> prebuilt.Library:
    """What a prebuilt CPU library must be."""
    return prebuilt.Library("hisparse_cpu", platform.machine(), _key(CPP_FLAGS, platform.machine()))


def build_cuda(architectures: str | None = None) -> Path:
    """Path of the CUDA library, compiled if its like is not cached. Needs nvcc, but no GPU if architectures are named.

    architectures: blank-separated, such as "9.0a 10.0a"; default: the current device's. Raises KernelBuildError with the
    compiler's output and the remedy.
    """
    architectures = architectures or device_architecture()
    home = cuda_home()
    return _build(
        "hisparse_cuda",
        CUDA_SOURCES,
        _key(CUDA_FLAGS, architectures, _version(home / "bin" / "nvcc")),
        {"CUDA_HOME": str(home), "TVM_FFI_CUDA_ARCH_LIST": architectures},
        extra_cuda_cflags=list(CUDA_FLAGS),
        extra_include_paths=[str(home / "include")],
        extra_ldflags=_runtime_link_flags(home),
        backend="cuda",
    )


def build_cpu() -> Path:
    """Path of the CPU library, compiled if its like is not cached. Raises KernelBuildError like `build_cuda`."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        raise KernelBuildError(
            f"C++ compiler {compiler!r} not found: install one (for example the package g++) or set CXX"
        )
    return _build("hisparse_cpu", CPU_SOURCES, _key(CPP_FLAGS, platform.machine(), _version(compiler)), {})


def _key(flags: tuple[str, ...], *parts: str) -> str:
    import tvm_ffi

    digest = hashlib.sha256()
    for path in sorted(source_folder().iterdir()):
        if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*flags, *parts, tvm_ffi.__version__):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:16]


def _version(compiler: str | Path) -> str:
    try:
        return subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise KernelBuildError(f"{compiler} does not run: {error}") from error


def _build(name: str, sources: tuple[str, ...], key: str, variables: dict[str, str], **options: object) -> Path:
    import tvm_ffi.cpp
    from tvm_ffi.utils import FileLock

    folder = cache_folder() / f"{name}_{key}"
    complete, library = folder / "complete", folder / f"{name}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder.with_suffix(".lock"))):  # a second process waits, then finds the library
            if not (complete.exists() and library.exists()):
                with _environment(**variables):
                    tvm_ffi.cpp.build(
                        name,
                        sources=[str(source_folder() / source) for source in sources],
                        extra_cflags=list(CPP_FLAGS),
                        build_directory=str(folder),
                        **options,
                    )
                complete.touch()
    except (RuntimeError, OSError) as error:
        raise KernelBuildError(
            f"building {name} failed. Remedy: see that the compiler below works and that {folder.parent} is writable, "
            f"delete {folder} and start again; {CACHE_VARIABLE} names another cache folder.\n{error}"
        ) from error
    return library


def load(library: Path) -> Module:
    """Open a built library. Raises KernelBuildError."""
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(library))
    except (RuntimeError, OSError) as error:
        raise KernelBuildError(
            f"{library} does not load. Remedy: remove it, or build it again on a machine like this one.\n{error}"
        ) from error


def _runtime_link_flags(home: Path) -> list[str]:
    """The pip toolkit has no lib64 and no unversioned libcudart.so: give the linker a folder that has one."""
    if (home / "lib64" / "libcudart.so").exists():
        return []
    libraries = sorted((home / "lib").glob("libcudart.so.*"))
    if not libraries:
        raise KernelBuildError(f"no CUDA runtime library under {home}: install the full toolkit or set CUDA_HOME")
    folder = cache_folder() / "cudart"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "libcudart.so").symlink_to(libraries[0])
    return [f"-L{folder}"]


def ninja_on_path() -> contextlib.AbstractContextManager[None]:
    """While it is held, the ninja that pip put beside python is found."""
    return _environment()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for one build only (other libraries of the process read them too); ninja comes from pip, beside python."""
    values["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
