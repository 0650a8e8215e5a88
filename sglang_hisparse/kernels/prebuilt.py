"""Libraries compiled ahead of time: where they lie, what they are called, and when one is too old to be used.

build.py asks it before it compiles, and `sglang-hisparse build --out` fills a folder with it. A file's name tells
library, target and the key of what it was made from, so that a machine without a compiler can tell a stale library from
a current one. It compiles and loads nothing, and deletes nothing but an older library in whose place it puts a new one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sglang_hisparse.errors import KernelBuildError

PREBUILT_VARIABLE = "SGLANG_HISPARSE_PREBUILT_DIR"


@dataclass(frozen=True, slots=True)
class Library:
    """One library as this installation wants it. target: architectures and processor; key: sources, flags, tvm-ffi."""

    name: str
    target: str
    key: str

    @property
    def file_name(self) -> str:
        return f"{self._stem}{self.key}.so"

    @property
    def _stem(self) -> str:
        return f"{self.name}-{self.target.replace(' ', '+')}-"

    def others_in(self, folder: Path) -> list[Path]:
        """Libraries of the same name and target that were made from something else."""
        return sorted(path for path in folder.glob(f"{self._stem}*.so") if path.name != self.file_name)


def folders() -> tuple[Path, ...]:
    """Where to look: $SGLANG_HISPARSE_PREBUILT_DIR, then `prebuilt` inside the package. Raises KernelBuildError."""
    inside = Path(__file__).resolve().parents[1] / "prebuilt"
    named = os.environ.get(PREBUILT_VARIABLE)
    if not named:
        return (inside,)
    if not Path(named).is_dir():
        raise KernelBuildError(f"{PREBUILT_VARIABLE}: {named} is not a folder; allowed: one that holds built libraries")
    return Path(named), inside


def find(library: Library) -> Path | None:
    """The prebuilt library, or None where there is none of its name and target and it has to be compiled.

    Raises KernelBuildError, of one line, where there is one that was made from other sources or flags.
    """
    for folder in folders():
        wanted = folder / library.file_name
        if wanted.is_file():
            return wanted
        stale = library.others_in(folder)
        if stale:
            raise KernelBuildError(
                f"{stale[-1]} was built from other sources, flags or tvm-ffi than this installation's (wanted: key "
                f"{library.key}). Remedy: build it again with `sglang-hisparse build --out {folder}`, or remove it"
            )
    return None


def publish(built: Path, library: Library, folder: Path) -> Path:
    """Put a library that was just built into `folder`, whole or not at all; older ones of its target go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".partial", delete=False) as partial:
            partial.write(built.read_bytes())
        shutil.copymode(built, partial.name)
        os.replace(partial.name, folder / library.file_name)
        for path in library.others_in(folder):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise KernelBuildError(f"--out: {folder} cannot be written ({error}); allowed: a folder of yours") from error
    return folder / library.file_name
