"""Goal: an installation needs nothing but its wheel, and no compiler where kernels came with it. Method: a real wheel,
built offline and unpacked; processes that know only the unpacked copy."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_hisparse.errors import KernelBuildError
from sglang_hisparse.kernels import build, prebuilt

ROOT = Path(__file__).parent.parent
# Another project's library: shipped, because it lies there, and never taken for one of ours.
PREBUILT_IN_TREE = "sglang_hisparse/prebuilt/hisparse_other-x86_64-0123456789abcdef.so"
HERE = "import sglang_hisparse; print(sglang_hisparse.__file__); from sglang_hisparse.kernels import build; "
COMMAND = "from sglang_hisparse.cli import main; main()"
LOAD = HERE + "build.load_cpu().resolve; print('loaded')"

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")


def _no_nvcc() -> str:
    try:
        build.cuda_home()
    except KernelBuildError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sources as they are, built from a copy, since a build folder of old would leak into it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    skip = shutil.ignore_patterns("__pycache__", "prebuilt")
    for name in ("sglang_hisparse", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    (tree / PREBUILT_IN_TREE).parent.mkdir()
    (tree / PREBUILT_IN_TREE).write_bytes(b"not loaded by anything")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run(
        [*command, "-q", "-w", str(folder)], check=False, cwd=tree, capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds what the wheel holds."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C++ compiler that notes each source file that it compiles in the file `compiled` beside it."""
    path = tmp_path_factory.mktemp("compiler") / "c++"
    real = shutil.which(os.environ.get("CXX", "c++"))
    path.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) echo "$*" >> "{path.parent}/compiled";; esac\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def three(installed: Path, compiler: Path) -> list[str]:
    """What three processes print that are started at once on an empty cache."""
    processes = [start(installed, cache_of(installed), LOAD, CXX=str(compiler)) for _ in range(3)]
    return [finish(process) for process in processes]


@pytest.fixture(scope="module")
def prebuilt_folder(installed: Path, compiler: Path, three: list[str]) -> Path:
    """What `build --cpu-only --out` leaves; the cache is filled already."""
    assert three
    out = installed.parent / "libraries"
    arguments = ("build", "--cpu-only", "--out", str(out))
    done = finish(start(installed, cache_of(installed), COMMAND, *arguments, CXX=str(compiler)))
    assert f"{prebuilt.PREBUILT_VARIABLE}={out}" in done
    return out


def cache_of(site: Path) -> Path:
    """The cache that the tests of this file share, beside the unpacked wheel."""
    return site.parent / "cache"


def start(site: Path, cache: Path, program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process that finds the package in `site` alone, and compiles into `cache`."""
    variables = {"PYTHONPATH": str(site), build.CACHE_VARIABLE: str(cache), **environment}
    inherited = {key: value for key, value in os.environ.items() if key != prebuilt.PREBUILT_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=inherited | variables,
        cwd=site.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Its output, once it has ended well."""
    output, problems = process.communicate(timeout=240)
    assert process.returncode == 0, problems
    return output


def test_the_wheel_holds_every_module_and_every_kernel_source(wheel: Path) -> None:
    """Goal: nothing of a checkout is missed and nothing else comes along. Method: the wheel's list against the tree."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sglang_hisparse").rglob("*.py")}
    sources = {f"sglang_hisparse/csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_file()}
    assert {"sglang_hisparse/csrc/resolver.cu", "sglang_hisparse/csrc/resolver_cpu.cpp"} <= sources
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sglang_hisparse").rglob("*.md")}
    assert names == modules | sources | documents | {PREBUILT_IN_TREE}
    assert b"hisparse = sglang_hisparse.plugin:register" in entry_points
    assert b"sglang-hisparse = sglang_hisparse.cli:main" in entry_points


@needs_compiler
def test_three_processes_of_an_unpacked_wheel_compile_once(installed: Path, compiler: Path, three: list[str]) -> None:
    """Goal: the ranks of a server may start together on an empty cache. Method: three processes; count compilations."""
    package = str(installed / "sglang_hisparse" / "__init__.py")
    assert [output.split() for output in three] == [[package, "loaded"]] * 3
    compiled = [line for line in (compiler.parent / "compiled").read_text().splitlines() if "resolver_cpu" in line]
    assert len(compiled) == 1
    assert str(installed / "sglang_hisparse" / "csrc") in compiled[0]
    assert len(list(cache_of(installed).glob("hisparse_cpu_*/complete"))) == 1


@needs_compiler
def test_a_prebuilt_library_needs_no_compiler(installed: Path, prebuilt_folder: Path, tmp_path: Path) -> None:
    """Goal: a production image has no compiler. Method: load with none, from the named folder and from the package."""
    without = {"CXX": "no-such-compiler"}
    named = {prebuilt.PREBUILT_VARIABLE: str(prebuilt_folder)}
    assert finish(start(installed, tmp_path / "cache", LOAD, **without, **named)).endswith("loaded\n")
    inside = tmp_path / "site"
    shutil.copytree(installed, inside)
    for library in prebuilt_folder.iterdir():
        shutil.copy(library, inside / "sglang_hisparse" / "prebuilt")
    assert finish(start(inside, tmp_path / "cache", LOAD, **without)).endswith("loaded\n")
    assert not (tmp_path / "cache").exists(), "something was compiled"
    alone = start(installed, tmp_path / "cache", LOAD, **without)
    assert "'no-such-compiler' not found" in alone.communicate(timeout=120)[1]


@needs_compiler
def test_a_stale_library_is_refused_in_one_line(
    installed: Path, prebuilt_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a server never runs kernels of other sources. Method: edit a source; change a flag; then rebuild in place."""
    sources, libraries = tmp_path / "csrc", tmp_path / "libraries"
    shutil.copytree(installed / "sglang_hisparse" / "csrc", sources)
    shutil.copytree(prebuilt_folder, libraries)
    monkeypatch.setenv(prebuilt.PREBUILT_VARIABLE, str(libraries))
    monkeypatch.setattr(build, "source_folder", lambda: sources)
    (present,) = libraries.iterdir()
    assert prebuilt.find(build.cpu_library()) == present
    with monkeypatch.context() as patched:
        patched.setattr(build, "CPP_FLAGS", ("-std=c++20", "-O2"))
        with pytest.raises(KernelBuildError, match="was built from other sources, flags or tvm-ffi"):
            prebuilt.find(build.cpu_library())
    with (sources / "resolver_cpu.cpp").open("a") as source:
        source.write("// edited\n")
    with pytest.raises(KernelBuildError) as caught:
        prebuilt.find(build.cpu_library())
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert present.name in message and f"sglang-hisparse build --out {libraries}" in message
    current = prebuilt.publish(present, build.cpu_library(), libraries)
    assert [path.name for path in libraries.iterdir()] == [current.name]
    assert prebuilt.find(build.cpu_library()) == current


def test_a_library_for_another_target_is_neither_taken_nor_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: one folder serves several machines. Method: files for another architecture and another processor."""
    monkeypatch.setenv(prebuilt.PREBUILT_VARIABLE, str(tmp_path))
    wanted = build.cuda_library("9.0a")
    for name in (
        build.cuda_library("10.0a").file_name,
        wanted.file_name.replace(platform.machine(), "other"),
        build.cpu_library().file_name,
    ):
        (tmp_path / name).write_bytes(b"")
    assert prebuilt.find(wanted) is None
    assert wanted.key != build.cuda_library("10.0a").key
    (tmp_path / wanted.file_name).write_bytes(b"")
    assert prebuilt.find(wanted) == tmp_path / wanted.file_name


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a typo does not end in a search for a compiler. Method: name a folder that does not exist."""
    monkeypatch.setenv(prebuilt.PREBUILT_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(KernelBuildError, match=r"SGLANG_HISPARSE_PREBUILT_DIR: .*/gone is not a folder; allowed: "):
        prebuilt.find(build.cpu_library())


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        ("sm_90a", "9.0a"),
        ("sm_90", "9.0a"),
        ("9.0", "9.0a"),
        ("9.0a", "9.0a"),
        ("sm_100a", "10.0a"),
        ("12.0f", "12.0f"),
    ],
)
def test_architectures_are_read_as_people_write_them(text: str, architecture: str) -> None:
    """Goal: nvcc's and CUDA's own spellings work. Method: a table."""
    assert build.parse_architecture(text) == architecture


@pytest.mark.parametrize("text", ["sm_80", "8.9", "hopper", "", "sm_90a 10.0a"])
def test_other_architectures_are_refused_before_anything_is_compiled(text: str) -> None:
    """Goal: a typo is told at once. Method: old ones, words, two at once."""
    with pytest.raises(KernelBuildError, match="--arch: "):
        build.parse_architecture(text)


@needs_compiler
@pytest.mark.skipif(bool(_no_nvcc()), reason=_no_nvcc())
def test_cuda_kernels_built_ahead_are_found_without_nvcc(
    installed: Path, compiler: Path, prebuilt_folder: Path, tmp_path: Path
) -> None:
    """Goal: no nvcc in a production image. Method: build for sm_90a, then load where looking for a toolkit fails."""
    assert prebuilt_folder  # the CPU library, which the command builds too, is cached
    out = tmp_path / "libraries"
    arguments = ("build", "--arch", "sm_90a", "--out", str(out))
    done = finish(start(installed, cache_of(installed), COMMAND, *arguments, CXX=str(compiler)))
    assert "CUDA library for 9.0a: ready" in done
    assert len(list(out.iterdir())) == 2
    load = HERE + "build.cuda_home = None; build.load_cuda('9.0a').resolve; print('loaded')"
    named = {prebuilt.PREBUILT_VARIABLE: str(out)}
    assert finish(start(installed, tmp_path / "cache", load, **named)).endswith("loaded\n")
    assert not (tmp_path / "cache").exists(), "something was compiled"
