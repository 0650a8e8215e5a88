"""Writes a recording, frame by frame. Called by the recorder's thread; it touches one file and no device."""

from __future__ import annotations

from pathlib import Path

from sglang_hisparse.recording.format import FILE_HEAD, MAGIC, VERSION, End, Header, Step, encode

MAX_FILE_BYTES = 1 << 30


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
