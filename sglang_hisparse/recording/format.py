"""The file of a recorded top-k stream: its frames, and how positions are packed. FORMAT.md beside it describes it.

writer.py and reader.py call it. It knows bytes alone: no device, no server, no policy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from sglang_hisparse.errors import HiSparseError

MAGIC = b"HISPTOPK"
VERSION = 1
FILE_HEAD = struct.Struct("<8sI")  #: magic, version
FRAME_HEAD = struct.Struct("<II")  #: payload bytes, CRC-32 of the payload
MAX_PAYLOAD_BYTES = 1 << 28
_LEVEL = 1  # of zlib: a server is busy beside it


Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]


class RecordingError(HiSparseError, ValueError):
    """A file is no complete recording that this version can read; says where and why."""


class Header(msgspec.Struct, tag="header", tag_field="kind", frozen=True):
    """What was recorded. groups: leader layer of each index group, numbered as in the model."""

    package: str
    sglang: str
    model: str
    top_k: Positive
    page_size: Positive
    groups: Annotated[tuple[Count, ...], Meta(min_length=1)]


class Step(msgspec.Struct, tag="step", tag_field="kind", frozen=True):
    """One decode step of the sampled requests that took part in it.

    step: number of the decode step since the start. requests: numbers of the requests, unique in the file. seq_lens:
    tokens of each, with the one that the step writes. counts: [groups][requests] positions of each set. positions: all
    sets, group by group and in each request by request, as `pack` gives them.
    """

    step: Count
    requests: tuple[Count, ...]
    seq_lens: tuple[Positive, ...]
    counts: tuple[tuple[Count, ...], ...]
    positions: bytes


class End(msgspec.Struct, tag="end", tag_field="kind", frozen=True):
    """The last frame of a file that was closed in order. dropped: steps that could not be kept up with."""

    steps: Count
    dropped: Count
    reason: str


Frame = Header | Step | End
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """The frame as it lies in the file."""
    payload = _encoder.encode(frame)
    return FRAME_HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def decode(payload: bytes) -> Frame:
    """Raises RecordingError where the payload is no frame."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"holds a frame that is none ({error})") from None


def pack(sets: np.ndarray, seq_lens: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], bytes]:
    """Counts [groups][requests] and packed positions of `sets` int32 [groups, requests, k].

    Entries outside [0, seq_len), and repeats, are left out. Order inside a set is not kept: an indexer's has no meaning.
    """
    limit = np.asarray(seq_lens, dtype=np.int64)[None, :, None]
    ordered = np.sort(np.where((sets >= 0) & (sets < limit), sets, -1), axis=-1)
    # From the position before, or from -1: at least 1 for every distinct position.
    steps = np.diff(ordered, axis=-1, prepend=np.int32(-1))
    kept = steps > 0
    counts = kept.sum(axis=-1)
    # All low bytes, then all second bytes, ...: the high ones are nearly all zero.
    planes = np.ascontiguousarray(steps[kept].astype("<u4").view(np.uint8).reshape(-1, 4).T)
    return tuple(tuple(row) for row in counts.tolist()), zlib.compress(planes.tobytes(), _LEVEL)


def unpack(step: Step) -> list[list[np.ndarray]]:
    """Positions [groups][requests], int32, ascending. Raises RecordingError where the step contradicts itself."""
    sizes = np.array([size for counts in step.counts for size in counts], dtype=np.int64)
    total = int(sizes.sum())
    unzip = zlib.decompressobj()
    try:
        # One byte more than there may be tells whether there is more.
        planes = unzip.decompress(step.positions, 4 * total + 1)
    except zlib.error as error:
        raise RecordingError(f"step {step.step}: positions cannot be unpacked ({error})") from None
    if len(planes) != 4 * total:
        raise RecordingError(f"step {step.step}: positions take {len(planes)} bytes or more instead of {4 * total}")
    steps = np.frombuffer(planes, dtype=np.uint8).reshape(4, total).T.copy().view("<u4").reshape(-1).astype(np.int64)
    ends = np.cumsum(sizes)
    running = np.concatenate([[0], np.cumsum(steps)])
    flat = running[1:] - np.repeat(running[ends - sizes], sizes) - 1
    limits = np.repeat(np.tile(np.array(step.seq_lens, dtype=np.int64), len(step.counts)), sizes)
    if (steps == 0).any() or (flat >= limits).any():
        raise RecordingError(f"step {step.step}: repeated positions, or positions beyond the sequence")
    sets = np.split(flat.astype(np.int32), ends[:-1]) if sizes.size else []
    width = len(step.requests)
    return [sets[group * width : (group + 1) * width] for group in range(len(step.counts))]
