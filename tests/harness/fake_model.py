"""The fake DSA model: it writes, selects, reads and judges real rows instead of computing attention.

Owns the model and the attention backend that the harness gives to SGLang's ModelRunner. SGLang's eager runner calls
`FakeAttentionBackend.init_forward_metadata` and `FakeDsaModel.forward`, as it would with a real model. Per layer the
model does what a DSA layer does to memory: write the new rows at out_cache_loc through the pool, select positions
(leaders only), turn them into device rows exactly as SGLang's DSA backend does (plain: req_to_token; HiSparse decode:
the coordinator; HiSparse extend: the pool's translation) and read those rows of the buffer that the pool hands out. Every byte read is held against
`reference`. It must never repair or skip anything: the first wrong row raises `WrongRowError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from .reference import History, index_words, mix, next_token, row_words, select_positions


class WrongRowError(AssertionError):
    """The engine gave the model a token, a row or an index entry that its request's history does not demand."""


@dataclass(slots=True)
class StepMetadata:
    """What the DSA backend snapshots before the first layer.

    page_table_1: int32 [bs, max_seq_len] logical ids; real_page_table: int32 [bs, max_pages] logical pages;
    cache_seqlens_int32: int32 [bs].
    """

    page_table_1: torch.Tensor
    real_page_table: torch.Tensor
    cache_seqlens_int32: torch.Tensor


class FakeAttentionBackend(AttentionBackend):
    """Stands in for DeepseekSparseAttnBackend: keeps only its per-step snapshot of logical ids and pages."""

    def __init__(self, model_runner: Any) -> None:
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.page_size = model_runner.page_size
        self.hisparse_coordinator = model_runner.hisparse_coordinator
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: StepMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        max_len = int(forward_batch.seq_lens.max()) if forward_batch.batch_size else 0
        page_table_1 = self.req_to_token[forward_batch.req_pool_indices, :max_len].to(torch.int32)
        self.forward_metadata = StepMetadata(
            page_table_1=page_table_1,
            real_page_table=page_table_1[:, :: self.page_size] // self.page_size,
            cache_seqlens_int32=forward_batch.seq_lens.to(torch.int32),
        )


@dataclass(slots=True)
class ReadRecord:
    """Rows that a launched forward read: checked again until the next launch, since a GPU may still be reading."""

    rid: str
    layer_idx: int
    buffer: np.ndarray
    device_rows: np.ndarray
    expected: np.ndarray


@dataclass(slots=True)
class ReadCounters:
    """How much was written and verified, so that a test can show that it tested something."""

    forwards: int = 0
    rows_written: int = 0
    rows_read_extend: int = 0
    rows_read_streamed: int = 0  # of them, those of extends that read from a scratch
    windows_read: int = 0  # windows of extends that read the scratch in several
    rows_read_decode: int = 0
    rows_read_late: int = 0
    index_entries_read: int = 0


class FakeDsaModel(torch.nn.Module):
    """`forward` returns one-hot logits [bs, vocab] for the hash of each request's history."""

    shared_experts_config = None  # read by ModelRunner._forward_raw
    start_layer = 0

    def __init__(self, *, num_layers: int, leader_layers: list[bool], top_k: int, vocab_size: int) -> None:
        super().__init__()
        self.end_layer = num_layers
        self.num_layers = num_layers
        self.leader_layers = leader_layers
        self.top_k = top_k
        self.vocab_size = vocab_size
        self.histories: dict[str, History] = {}
        self.counters = ReadCounters()
        self.runner: Any = None  # the ModelRunner; set once it exists
        self._launched_reads: list[ReadRecord] = []

    # ------------------------------------------------------------------ entry points

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> LogitsProcessorOutput:
        self._launched_reads.clear()
        self.counters.forwards += 1
        if forward_batch.forward_mode.is_idle():
            return LogitsProcessorOutput(next_token_logits=torch.zeros(0, self.vocab_size))
        spans = self._spans(forward_batch)
        self._check_inputs(input_ids, positions, spans)
        top_k_positions: torch.Tensor | None = None
        for layer_idx in range(self.num_layers):
            leader = self.leader_layers[layer_idx]
            self._write_rows(layer_idx, spans, forward_batch, leader)
            if leader:
                self._check_index_keys(layer_idx, spans)
                top_k_positions = self._select(spans, layer_idx)
            if forward_batch.forward_mode.is_decode():
                assert top_k_positions is not None
                self._read_decode(layer_idx, spans, forward_batch, top_k_positions)
            else:
                self._read_extend(layer_idx, spans)
        logits = torch.zeros(len(spans), self.vocab_size)
        for row, span in enumerate(spans):
            last_hash = int(span.history.hashes(np.array([span.end - 1]))[0])
            logits[row, next_token(last_hash, self.vocab_size)] = 1.0
        return LogitsProcessorOutput(next_token_logits=logits)

    def check_launched_reads(self) -> None:
        """Read again, before the next launch, what the last forward read: nothing may have changed under it."""
        for record in self._launched_reads:
            self._compare(record, late=True)
            self.counters.rows_read_late += len(record.device_rows)

    def forget_launched_reads(self) -> None:
        """What comes now is ordered behind them."""
        self._launched_reads = []

    # ------------------------------------------------------------------ one forward

    def _spans(self, forward_batch: Any) -> list[Span]:
        seq_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            starts = [length - 1 for length in seq_lens]
        else:
            starts = forward_batch.extend_prefix_lens.tolist()
        slots = forward_batch.req_pool_indices.tolist()
        spans, offset = [], 0
        for row, (rid, slot, start, end) in enumerate(zip(forward_batch.rids, slots, starts, seq_lens, strict=True)):
            logical = self.runner.attn_backend.forward_metadata.page_table_1[row, :end]
            spans.append(Span(rid, slot, self.histories[rid], start, end, offset, logical))
            offset += end - start
        return spans

    def _check_inputs(self, input_ids: torch.Tensor, positions: torch.Tensor, spans: list[Span]) -> None:
        tokens, places = input_ids.tolist(), positions.tolist()
        for span in spans:
            for i in range(span.end - span.start):
                position = span.start + i
                if places[span.offset + i] != position:
                    raise WrongRowError(f"{span.rid}: position {places[span.offset + i]} given for {position}")
                if tokens[span.offset + i] != span.history.token(position):
                    raise WrongRowError(f"{span.rid}: wrong input token at position {position}")

    def _write_rows(self, layer_idx: int, spans: list[Span], forward_batch: Any, leader: bool) -> None:
        pool = self.runner.token_to_kv_pool
        row_bytes = pool.kv_buffer[layer_idx][0].nbytes
        hashes = np.concatenate([span.history.hashes(np.arange(span.start, span.end)) for span in spans])
        loc = forward_batch.out_cache_loc
        rows = torch.from_numpy(row_words(hashes, layer_idx, row_bytes).view(np.int16)).view(pool.dtype).unsqueeze(1)
        # The combined-row setter is the pool's only one with a CPU path; HiSparse pools translate in it as well.
        pool.set_kv_buffer(_Layer(layer_idx), loc, rows, rows)
        if leader:
            self._index_entries(layer_idx)[loc // 64, loc % 64, 0] = torch.from_numpy(
                index_words(hashes, layer_idx).view(np.int64)
            )
        self.counters.rows_written += len(hashes)

    def _device_words(self, layer_idx: int) -> np.ndarray:
        """What attention of a layer reads, uint64 [device_rows, row_bytes / 8], without a copy: asked for as the DSA backend does,
        once a layer, after its rows were written."""
        buffer = self.runner.token_to_kv_pool.get_key_buffer(layer_idx)
        return buffer.view(buffer.shape[0], -1).view(torch.int64).numpy().view(np.uint64)

    def _index_entries(self, layer_idx: int) -> torch.Tensor:
        """Index-K of a layer as int64 [pages, 64, 16]: the 128 key bytes of each logical id (scales stay zero)."""
        buffer = self.runner.token_to_kv_pool.index_key_cache.buffer[layer_idx]
        return buffer[:, : 64 * 128].view(torch.int64).view(buffer.shape[0], 64, 16)

    def _check_index_keys(self, layer_idx: int, spans: list[Span]) -> None:
        entries = self._index_entries(layer_idx)
        for span in spans:
            ids = span.logical.long()
            found = entries[ids // 64, ids % 64, 0].numpy().view(np.uint64)
            wanted = index_words(span.history.hashes(np.arange(span.end)), layer_idx)
            if not np.array_equal(found, wanted):
                bad = int(np.flatnonzero(found != wanted)[0])
                raise WrongRowError(
                    f"{span.rid}: index-K of layer {layer_idx} wrong at position {bad} (logical id {int(ids[bad])})"
                )
            self.counters.index_entries_read += span.end

    def _select(self, spans: list[Span], layer_idx: int) -> torch.Tensor:
        rows = [select_positions(mix(hash_text(span.rid) + layer_idx), span.end - 1, self.top_k) for span in spans]
        return torch.from_numpy(np.stack(rows))

    def _read_decode(self, layer_idx: int, spans: list[Span], forward_batch: Any, selected: torch.Tensor) -> None:
        coordinator = self.runner.hisparse_coordinator
        if coordinator is not None:
            rows = coordinator.swap_in_selected_pages(
                forward_batch.req_pool_indices, forward_batch.seq_lens, selected.clone(), layer_idx
            )
        else:
            table = self.runner.attn_backend.forward_metadata.page_table_1
            rows = torch.where(selected < 0, -1, table.gather(1, selected.clamp(min=0).long()))
        words = self._device_words(layer_idx)
        for span, positions, device_rows in zip(spans, selected, rows, strict=True):
            self._judge(span, layer_idx, words, positions, device_rows)
            self.counters.rows_read_decode += int((positions >= 0).sum())

    def _read_extend(self, layer_idx: int, spans: list[Span]) -> None:
        """Read every position of every request of the batch, through int32 [n, top_k] with -1 in the last row; window by window
        where the pool says so."""
        pool = self.runner.token_to_kv_pool
        words = self._device_words(layer_idx)
        stream = getattr(pool, "prefix_stream", None)
        is_streamed = stream is not None and stream.active
        # A streamed extend's layer is overwritten by the second after it; that it is not before, the next reads show.
        is_kept = not is_streamed or layer_idx >= self.num_layers - 2
        if is_streamed and stream.windows:
            self._read_windows(layer_idx, spans, stream)
        else:
            for span in spans:
                positions, logical = self._positions(span)
                self._judge(span, layer_idx, words, positions, self._translated(logical).reshape(-1), is_kept=is_kept)
        num_rows = sum(span.end for span in spans)
        self.counters.rows_read_extend += num_rows
        self.counters.rows_read_streamed += num_rows * is_streamed

    def _read_windows(self, layer_idx: int, spans: list[Span], stream: Any) -> None:
        """As attention does that is cut between requests (transfer/attention_windows.py)."""
        pool, left = self.runner.token_to_kv_pool, list(spans)
        for window, (first, last) in enumerate(stream.windows):
            here = [span for span in left if first <= span.offset < last]
            left = [span for span in left if span not in here]
            given = [self._positions(span) for span in here]
            asked = self._translated(torch.cat([logical for _, logical in given]))
            keys, rows = pool.window_rows(window, asked)
            words = keys.view(keys.shape[0], -1).view(torch.int64).numpy().view(np.uint64)
            for span, (positions, logical), own in zip(
                here, given, rows.split([len(logical) for _, logical in given]), strict=True
            ):
                self._judge(span, layer_idx, words, positions, own.reshape(-1), is_kept=False)
            stream.leave()
            self.counters.windows_read += 1
        if left:
            raise WrongRowError(f"layer {layer_idx}: no window has the tokens of {[span.rid for span in left]}")

    def _positions(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions of a request and -1 up to whole rows, int32; their logical ids [n, top_k]."""
        num_rows = -(-span.end // self.top_k)
        positions = torch.full((num_rows * self.top_k,), -1, dtype=torch.int32)
        positions[: span.end] = torch.arange(span.end, dtype=torch.int32)
        logical = torch.where(positions < 0, -1, span.logical[positions.clamp(min=0).long()])
        return positions, logical.view(num_rows, self.top_k)

    def _translated(self, logical: torch.Tensor) -> torch.Tensor:
        """What the DSA backend makes of logical ids."""
        if self.runner.hisparse_coordinator is None:
            return logical
        before = logical.clone()
        rows = self.runner.token_to_kv_pool.translate_loc_to_hisparse_device(logical).to(torch.int32)
        if not torch.equal(before, logical):
            raise WrongRowError("the translation changed its input, which follower layers reuse")
        return rows

    # ------------------------------------------------------------------ judgement

    def _judge(
        self,
        span: Span,
        layer_idx: int,
        words: np.ndarray,
        positions: torch.Tensor,
        device_rows: torch.Tensor,
        *,
        is_kept: bool = True,
    ) -> None:
        selected, given = positions.numpy(), device_rows.numpy()
        valid = selected >= 0
        if (given[~valid] != -1).any():
            raise WrongRowError(f"{span.rid}: layer {layer_idx}: a padding entry got a row number")
        chosen, rows = selected[valid], given[valid].astype(np.int64)
        outside = (rows < 0) | (rows >= len(words))
        if outside.any():
            first = int(chosen[outside][0])
            raise WrongRowError(
                f"{span.rid}: layer {layer_idx}: position {first} of {span.end} (logical id "
                f"{int(span.logical[first])}) got row {int(rows[outside][0])}; {int(outside.sum())} such entries"
            )
        expected = row_words(span.history.hashes(chosen), layer_idx, words.shape[1] * 8)
        record = ReadRecord(span.rid, layer_idx, words, rows, expected)
        self._compare(record, late=False, span=span, positions=chosen)
        if is_kept:
            self._launched_reads.append(record)

    def _compare(
        self, record: ReadRecord, *, late: bool, span: Span | None = None, positions: np.ndarray | None = None
    ) -> None:
        found = record.buffer[record.device_rows]
        if np.array_equal(found, record.expected):
            return
        wrong = (found != record.expected).any(axis=1)
        first = int(np.flatnonzero(wrong)[0])
        where = f"row {int(record.device_rows[first])}"
        if span is not None and positions is not None:
            position = int(positions[first])
            where += f" for position {position} of {span.end} (logical id {int(span.logical[position])})"
        moment = "changed after the launch" if late else "does not hold its token"
        raise WrongRowError(
            f"{record.rid}: layer {record.layer_idx}: {where} {moment}; {int(wrong.sum())} of {len(wrong)} rows wrong"
        )


@dataclass(slots=True, frozen=True)
class Span:
    """One request's share of a forward: positions start..end-1 are written, 0..end-1 may be read.

    logical: int32 [end] logical ids from the step's snapshot; offset: first entry in the flattened inputs.
    """

    rid: str
    slot: int
    history: History
    start: int
    end: int
    offset: int
    logical: torch.Tensor


@dataclass(slots=True, frozen=True)
class _Layer:
    """What the pool's setter reads of a RadixAttention layer."""

    layer_id: int


def hash_text(text: str) -> int:
    """A seed from a request id, equal in every process (unlike hash())."""
    value = 0
    for byte in text.encode():
        value = mix(value * 257 + byte)
    return value
