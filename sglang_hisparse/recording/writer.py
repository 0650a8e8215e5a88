"""Writes a recording, frame by frame, and says beforehand whether that can be done.

Called by the recorder's thread, and by validation before weights load; it touches one file and no device.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NoReturn

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.recording.format import FILE_HEAD, MAGIC, VERSION, End, Header, Step, encode

MAX_FILE_BYTES = 1 << 30


def check_record_file(path: Path) -> None:
    """Raise ConfigError unless a recording can be written to `path`. A file that is there is left as it is.

    In an empty place a file without a name is made, never `path` itself: another rank may be recording to it already.
    """
    try:
        if path.is_dir():
            _refuse(path, "is a folder")
        if not path.parent.is_dir():
            _refuse(path, "is in a folder that is not there")
        if path.exists() and not path.is_file():
            _refuse(path, "is no regular file")
        if path.exists():
            path.open("r+b").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as problem:
        cannot_write(path, problem)


def cannot_write(path: Path, problem: OSError) -> NoReturn:
    """Raise the ConfigError of a file that the system will not open for writing."""
    _refuse(path, f"cannot be written ({problem.strerror})")


def _refuse(path: Path, why: str) -> NoReturn:
    # In full, unlike other values: the end of a path tells more than its beginning.
    raise ConfigError(
        f"record_file: {json.dumps(str(path))} {why}; allowed: a file, new or to be replaced, in a folder that can be "
        "written to"
    ) from None


class RecordingWriter:
    """An open recording. Every frame is handed to the system at once, so that a killed server leaves whole steps."""

    def __init__(self, path: Path, header: Header, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Replaces a file that is there. Raises OSError."""
        self._max_bytes = max_bytes
        self._file = path.open("wb", buffering=0)
        self._bytes = 0
        self.steps = 0
        self._write(FILE_HEAD.pack(MAGIC, VERSION) + encode(header))

    def write(self, step: Step) -> bool:
        """False: the file would be larger than it may become; nothing was written. Raises OSError."""
        frame = encode(step)
        if self._bytes + len(frame) > self._max_bytes:
            return False
        self._write(frame)
        self.steps += 1
        return True

    def close(self, dropped: int, reason: str) -> None:
        """Write the end frame. Raises OSError."""
        with self._file:
            self._write(encode(End(self.steps, dropped, reason)))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._bytes += len(data)
