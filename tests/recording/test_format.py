"""Goal: a recording comes back as it was written, and nothing else is taken for one. Method: round trips and damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.recording import format as recording_format
from sglang_hisparse.recording.format import FILE_HEAD, MAGIC, End, Header, RecordingError, Step, encode, pack, unpack
from sglang_hisparse.recording.reader import read_recording
from sglang_hisparse.recording.writer import RecordingWriter

HEADER = Header("0.1.0", "0.5.23", "some/model", top_k=8, page_size=64, groups=(0, 3))


def step_of(number: int, seq_lens: tuple[int, ...], seed: int = 0) -> Step:
    """A step of requests 0, 1, ... with random sets of up to top_k positions."""
    rng = np.random.default_rng([seed, number])
    sets = np.full((len(HEADER.groups), len(seq_lens), HEADER.top_k), -1, dtype=np.int32)
    for group in sets:
        for row, seq_len in zip(group, seq_lens, strict=True):
            chosen = rng.permutation(seq_len)[: HEADER.top_k]
            row[: chosen.size] = chosen
    counts, positions = pack(sets, seq_lens)
    return Step(number, tuple(range(len(seq_lens))), seq_lens, counts, positions)


def write_file(path: Path, steps: list[Step], *, dropped: int = 0) -> Path:
    writer = RecordingWriter(path, HEADER)
    for step in steps:
        assert writer.write(step)
    writer.close(dropped, "the test has ended")
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_file(tmp_path / "trace.topk", [step_of(n, (5 + n, 100 + n)) for n in range(6)], dropped=2)


@given(st.data())
def test_sets_come_back_sorted(data: st.DataObject) -> None:
    """Goal: packing loses nothing but order, repeats and impossible entries. Method: sets of Python against unpack."""
    groups, requests, k = (data.draw(st.integers(1, high)) for high in (3, 3, 6))
    seq_lens = [data.draw(st.integers(1, 2**31 - 1)) for _ in range(requests)]
    entry = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 8)
    sets = [[[data.draw(entry) for _ in range(k)] for _ in range(requests)] for _ in range(groups)]
    counts, positions = pack(np.array(sets, dtype=np.int32), seq_lens)
    step = Step(0, tuple(range(requests)), tuple(seq_lens), counts, positions)
    for group, row in zip(unpack(step), sets, strict=True):
        for got, entries, seq_len in zip(group, row, seq_lens, strict=True):
            assert got.tolist() == sorted({entry for entry in entries if 0 <= entry < seq_len})


def test_file_comes_back(recording: Path) -> None:
    """Goal: header, steps and requests are those written. Method: read, compare with the steps made again."""
    read = read_recording(recording)
    assert read.header == HEADER and read.dropped == 2 and len(read.steps) == 6
    for request, first in zip(read.requests(), (5, 100), strict=True):
        assert request.seq_lens == tuple(range(first, first + 6))
        for group in range(2):
            for number, positions in enumerate(read.gather([(request, group)])[0]):
                expected = unpack(step_of(number, (5 + number, 100 + number)))[group][request.number]
                assert np.array_equal(positions, expected) and positions.size == min(8, request.seq_lens[number])


def test_every_truncation_is_seen(recording: Path) -> None:
    """Goal: a cut file is refused, wherever it is cut, and partial reading takes its whole steps. Method: every length."""
    data, short = recording.read_bytes(), recording.with_name("short.topk")
    for length in range(len(data)):
        short.write_bytes(data[:length])
        with pytest.raises(RecordingError) as refusal:
            read_recording(short)
        assert "\n" not in str(refusal.value) and str(short) in str(refusal.value)
        if length > len(FILE_HEAD.pack(MAGIC, 1) + encode(HEADER)):
            assert len(read_recording(short, partial=True).steps) in range(6 + 1)
    assert len(read_recording(short, partial=True).steps) == 6, "only the end frame is cut"


def test_every_changed_byte_is_seen(recording: Path) -> None:
    """Goal: damage is not replayed. Method: one bit of each byte turned over; all are refused."""
    data = recording.read_bytes()
    for place in range(len(data)):
        recording.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(RecordingError):
            read_recording(recording)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a recording"),
        (b'{"ok": true}', "is not a recording"),
        (FILE_HEAD.pack(MAGIC, 2) + encode(HEADER), "format version 2; this package reads version 1"),
        (FILE_HEAD.pack(MAGIC, 1) + encode(End(0, 0, "")), "does not begin with a header"),
        (FILE_HEAD.pack(MAGIC, 1) + encode(HEADER), "was not closed"),
        (FILE_HEAD.pack(MAGIC, 1) + encode(HEADER) + encode(HEADER), "second header"),
        (FILE_HEAD.pack(MAGIC, 1) + encode(HEADER) + encode(End(1, 0, "")), "says that it has 1 steps"),
        (FILE_HEAD.pack(MAGIC, 1) + encode(HEADER) + encode(End(0, 0, "")) + b"x", "goes on"),
        (
            FILE_HEAD.pack(MAGIC, 1) + encode(HEADER) + encode(Step(0, (0,), (9,), ((1,),), b"")),
            "other numbers of sets",
        ),
        (FILE_HEAD.pack(MAGIC, 1) + encode(HEADER) + encode(Step(0, (0,), (9,), ((1,), (9,)), b"")), "more than top_k"),
    ],
)
def test_wrong_files_give_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    """Goal: one line that says what is wrong. Method: files that are each wrong in one way, whole frames included."""
    path = tmp_path / "wrong.topk"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


@pytest.mark.parametrize(
    ("counts", "positions", "message"),
    [
        (((1,), (1,)), b"no zlib", "cannot be unpacked"),
        (((2,), (1,)), pack(np.array([[[1]], [[2]]], dtype=np.int32), [9])[1], "instead of 12"),
        (((1,), (0,)), pack(np.array([[[1]], [[2]]], dtype=np.int32), [9])[1], "instead of 4"),
        (((1,), (1,)), pack(np.array([[[1]], [[9]]], dtype=np.int32), [99])[1], "beyond the sequence"),
    ],
)
def test_contradictory_positions_are_refused(counts: tuple, positions: bytes, message: str) -> None:
    """Goal: a step is believed only if it fits itself. Method: packed sets under counts that are not theirs."""
    with pytest.raises(RecordingError, match=message):
        unpack(Step(0, (0,), (9,), counts, positions))


def test_a_huge_frame_is_not_read(tmp_path: Path) -> None:
    """Goal: a wrong length takes no memory. Method: a frame head that promises 4 GiB."""
    path = tmp_path / "huge.topk"
    path.write_bytes(FILE_HEAD.pack(MAGIC, 1) + recording_format.FRAME_HEAD.pack(2**32 - 1, 0))
    with pytest.raises(RecordingError, match="a frame of 4294967295 bytes"):
        read_recording(path)


def test_writer_stops_at_its_limit(tmp_path: Path) -> None:
    """Goal: a recording does not fill the disk. Method: a small limit; the file stays whole and below it."""
    path, steps = tmp_path / "small.topk", [step_of(n, (100,)) for n in range(50)]
    writer = RecordingWriter(path, HEADER, max_bytes=1500)
    written = [writer.write(step) for step in steps]
    writer.close(0, "full")
    assert True in written and False in written
    assert path.stat().st_size <= 1500 + len(encode(End(50, 0, "full")))
    assert len(read_recording(path).steps) == sum(written)
