"""Reads and checks a recording. Called by the replay command and by tests; a file that is not whole is one error."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sglang_hisparse.recording.format import (
    FILE_HEAD,
    FRAME_HEAD,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    VERSION,
    End,
    Frame,
    Header,
    RecordingError,
    Step,
    decode,
    unpack,
)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Steps of one request, in order: `steps` are indices into Recording.steps, `places` its index in each."""

    number: int
    steps: tuple[int, ...]
    places: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Recording:
    """A file in memory, positions still packed. dropped: steps that the server did not keep up with."""

    header: Header
    steps: list[Step]
    dropped: int = 0
    _unpacked: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)

    def positions(self, step: int, group: int, place: int) -> np.ndarray:
        """Set of the request at `place` of the step-th step: int32 [n], ascending."""
        return self._sets(step)[group][place]

    def _sets(self, step: int) -> list[list[np.ndarray]]:
        if step not in self._unpacked:
            if len(self._unpacked) > 64:  # readers walk step by step: a few steps are enough
                self._unpacked.clear()
            self._unpacked[step] = unpack(self.steps[step])
        return self._unpacked[step]

    def requests(self) -> list[RecordedRequest]:
        """Every recorded request, in order of appearance."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for index, step in enumerate(self.steps):
            for place, (number, seq_len) in enumerate(zip(step.requests, step.seq_lens, strict=True)):
                found.setdefault(number, []).append((index, place, seq_len))
        return [RecordedRequest(number, *zip(*entries, strict=True)) for number, entries in found.items()]

    def gather(self, wanted: Sequence[tuple[RecordedRequest, int]]) -> list[list[np.ndarray]]:
        """All sets of each (request, group), step by step; every step is unpacked once."""
        found: list[list[np.ndarray]] = [[] for _ in wanted]
        places = [dict(zip(request.steps, request.places, strict=True)) for request, _ in wanted]
        for step in range(len(self.steps)):
            for (_, group), place, sets in zip(wanted, places, found, strict=True):
                if step in place:
                    sets.append(self.positions(step, group, place[step]))
        return found


def read_recording(path: Path, *, partial: bool = False) -> Recording:
    """Read a recording. partial: take the whole steps of one that was not closed. Raises RecordingError, OSError."""
    try:
        with path.open("rb") as file:
            return _read(file, partial)
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None


def _read(file: BinaryIO, partial: bool) -> Recording:
    head = file.read(FILE_HEAD.size)
    if len(head) < FILE_HEAD.size or not head.startswith(MAGIC):
        raise RecordingError("is not a recording of a top-k stream")
    version = FILE_HEAD.unpack(head)[1]
    if version != VERSION:
        raise RecordingError(f"has format version {version}; this package reads version {VERSION}")
    header, steps = _next_frame(file, 0), []
    if not isinstance(header, Header):
        raise RecordingError("does not begin with a header")
    while True:
        try:
            frame = _next_frame(file, len(steps))
        except _CutError as error:
            if partial:
                return Recording(header, steps)
            raise RecordingError(f"{error}; --partial replays the {len(steps)} whole steps before") from None
        if isinstance(frame, End):
            if frame.steps != len(steps) or file.read(1):
                raise RecordingError(f"says that it has {frame.steps} steps and ends, but has {len(steps)} or goes on")
            return Recording(header, steps, frame.dropped)
        if not isinstance(frame, Step):
            raise RecordingError(f"holds a second header after {len(steps)} steps")
        _check(frame, header)
        steps.append(frame)


def _check(step: Step, header: Header) -> None:
    """The numbers of a step fit together."""
    width = len(step.requests)
    shape = [len(counts) for counts in step.counts]
    if len(step.seq_lens) != width or shape != [width] * len(header.groups) or len(set(step.requests)) != width:
        raise RecordingError(
            f"step {step.step}: {width} requests of {len(header.groups)} groups, but other numbers of sets"
        )
    if any(count > header.top_k for counts in step.counts for count in counts):
        raise RecordingError(f"step {step.step}: a set of more than top_k ({header.top_k}) positions")


class _CutError(RecordingError):
    """The file ends where it may not."""


def _next_frame(file: BinaryIO, steps: int) -> Frame:
    head = file.read(FRAME_HEAD.size)
    if not head:
        raise _CutError(f"was not closed: it ends after {steps} steps without an end frame")
    if len(head) < FRAME_HEAD.size:
        raise _CutError(f"is truncated after {steps} steps")
    size, checksum = FRAME_HEAD.unpack(head)
    if size > MAX_PAYLOAD_BYTES:
        raise RecordingError(f"is damaged after {steps} steps: a frame of {size} bytes")
    payload = file.read(size)
    if len(payload) < size:
        raise _CutError(f"is truncated after {steps} steps")
    if zlib.crc32(payload) != checksum:
        raise RecordingError(f"is damaged after {steps} steps: wrong checksum")
    return decode(payload)
