"""Records the selections of a running server: what `record_file` of --hisparse-config switches on.

The runtime calls it on the scheduler's thread. Inside the decode graph `note` copies the sampled rows of a group's top-k
to a buffer of fixed address; before the next forward they are copied aside on the forward stream, and from there to
pinned memory on a stream of their own; a thread packs and writes them. Nothing here waits for the device on the
scheduler's thread: a step that finds all places of the ring in use is dropped and counted. It must never change what it
is given.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_hisparse import __version__, settings
from sglang_hisparse.ranks import is_first
from sglang_hisparse.recording.format import Header, Step, pack
from sglang_hisparse.recording.writer import MAX_FILE_BYTES, RecordingWriter, cannot_write
from sglang_hisparse.stats import rank_file

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4  #: recorded at once; another one is taken when one of them ends
RING = 4  #: steps on their way to the file
_CLOSE_SECONDS = 5.0  # SGLang's launcher kills a rank 15 s after it was told to end


@dataclass(frozen=True, slots=True)
class _Sample:
    """Which rows of one decode step are recorded."""

    step: int
    rows: tuple[int, ...]
    requests: tuple[int, ...]
    seq_lens: tuple[int, ...]


@dataclass(slots=True)
class _Place:
    """A place of the ring: int32 [groups, MAX_REQUESTS, top_k] on the device and the host, and the copy's event."""

    on_device: torch.Tensor
    on_host: torch.Tensor
    copied: Any


class NoRecorder:
    """Stands in where nothing is recorded: every method is free of cost."""

    records = False  #: whether anybody reads what it is told

    def note(self, group: int, top_k_result: torch.Tensor) -> None: ...

    def before_decode(self, slots: Sequence[int], seq_lens: Sequence[int]) -> None: ...

    def before_forward(self) -> None: ...

    def release(self, slots: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class TopKRecorder(NoRecorder):
    """Records to one file. leaders: leader layer of each group."""

    records = True

    def __init__(self, path: Path, header: Header, device: torch.device | str, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            self._writer = RecordingWriter(path, header, max_bytes)
        except OSError as problem:
            cannot_write(path, problem)
        self._path = path
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        shape = (len(header.groups), MAX_REQUESTS, header.top_k)
        self._selected = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        self._rows = torch.zeros(MAX_REQUESTS, dtype=torch.int64, device=self._device)
        self._row_numbers: tuple[int, ...] = ()
        self._places = [self._new_place() for _ in range(RING)]
        self._free = deque(range(RING))
        self._stream = torch.cuda.Stream(device=self._device) if self._on_gpu else None
        self._sampled: dict[int, int] = {}  # request slot -> number of the request in the file
        self._num_requests = self._num_steps = self.dropped = 0
        self._next: _Sample | None = None
        self._launched: _Sample | None = None
        self._reason = ""  # why the recording ended before the server did
        self._queue: queue.SimpleQueue[tuple[int, _Sample] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_steps, name="hisparse-recorder", daemon=True)
        self._thread.start()

    def _new_place(self) -> _Place:
        on_host = torch.empty(self._selected.shape, dtype=torch.int32, pin_memory=self._on_gpu)
        return _Place(
            torch.empty_like(self._selected), on_host, torch.cuda.Event(blocking=True) if self._on_gpu else None
        )

    # -- the scheduler's thread -------------------------------------------------------------------------------------

    def note(self, group: int, top_k_result: torch.Tensor) -> None:
        """Inside the graph: keep the sampled rows of top_k_result int32 [rows, k]."""
        num_rows, k = top_k_result.shape
        if num_rows:
            rows = self._rows.clamp(max=num_rows - 1)
            self._selected[group, :, :k].copy_(top_k_result.index_select(0, rows))

    def before_decode(self, slots: Sequence[int], seq_lens: Sequence[int]) -> None:
        """The next forward decodes these request slots, a row each; seq_lens count the token that it writes."""
        self._num_steps += 1
        rows = []
        for row, slot in enumerate(slots):
            if slot not in self._sampled and len(self._sampled) < MAX_REQUESTS:
                self._sampled[slot] = self._num_requests
                self._num_requests += 1
            if slot in self._sampled:
                rows.append(row)
        self._next = _Sample(
            self._num_steps - 1,
            tuple(rows),
            tuple(self._sampled[slots[row]] for row in rows),
            tuple(seq_lens[row] for row in rows),
        )

    def before_forward(self) -> None:
        """On the forward stream: take what the last decode forward has left, and say which rows the next one keeps."""
        self._collect()
        if self._next is not None and not self._reason:
            self._launched = self._next
            self._point_at(self._next.rows)
        self._next = None

    def release(self, slots: Sequence[int]) -> None:
        """These request slots have ended."""
        for slot in slots:
            self._sampled.pop(slot, None)

    def close(self) -> None:
        """Shutdown only, with the device idle: write what is under way and the end of the file."""
        if not self._thread.is_alive():
            return
        self._collect()
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _collect(self) -> None:
        sample, self._launched = self._launched, None
        if sample is None:
            return
        if not self._free:
            self.dropped += 1
            return
        index = self._free.popleft()
        place = self._places[index]
        place.on_device.copy_(self._selected)
        self._selected.fill_(-1)
        if self._on_gpu:
            aside = torch.cuda.Event()
            aside.record()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(aside)
                place.on_host.copy_(place.on_device, non_blocking=True)
                place.copied.record()
        else:
            place.on_host.copy_(place.on_device)
        self._queue.put((index, sample))

    def _point_at(self, rows: tuple[int, ...]) -> None:
        if rows == self._row_numbers:
            return
        self._row_numbers = rows
        padded = torch.tensor([*rows, *[0] * (MAX_REQUESTS - len(rows))], pin_memory=self._on_gpu)
        # Page-locked memory from torch's cache is not handed out again before this copy has run.
        self._rows.copy_(padded, non_blocking=True)

    # -- the thread that writes -------------------------------------------------------------------------------------

    def _write_steps(self) -> None:
        while (item := self._queue.get()) is not None:
            index, sample = item
            place = self._places[index]
            if self._on_gpu:
                place.copied.synchronize()
            if not self._reason:
                try:
                    self._write(sample, place.on_host)
                except OSError as error:
                    self._stop(f"the file cannot be written ({error.strerror})")
            self._free.append(index)
        try:
            self._writer.close(self.dropped, self._reason or "the server has ended")
        except OSError as error:
            logger.warning("the recording %s has no end: %s", self._path, error.strerror)

    def _write(self, sample: _Sample, on_host: torch.Tensor) -> None:
        count = len(sample.rows)
        counts, positions = pack(on_host[:, :count].numpy(), sample.seq_lens)
        if not self._writer.write(Step(sample.step, sample.requests, sample.seq_lens, counts, positions)):
            self._stop("the file has reached its largest size")

    def _stop(self, reason: str) -> None:
        self._reason = reason
        logger.warning("recording to %s ends after %d steps: %s", self._path, self._writer.steps, reason)


def recorder_of(runtime: HiSparseRuntime) -> NoRecorder:
    """The recorder that the settings ask for, on the first rank of the runtime's group.

    Ranks other than the first of all write beside it, see `stats.rank_file`.
    """
    path = settings.resolved().record_file
    if path is None or not is_first(runtime.tp_group):
        return NoRecorder()
    from sglang.srt.runtime_context import get_server_args

    file = rank_file(Path(path), runtime.tp_group)
    header = Header(
        package=__version__,
        sglang=version("sglang"),
        model=str(getattr(get_server_args(), "model_path", "")),
        top_k=runtime.top_k,
        page_size=runtime.page_size,
        groups=tuple(runtime.pool.start_layer + members[0] for members in runtime.groups.members),
    )
    logger.info("recording the selections of up to %d requests at once to %s", MAX_REQUESTS, file)
    return TopKRecorder(file, header, runtime.hot.page_table.device)
