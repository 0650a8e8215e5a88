"""SGLang's DSA backend as far as its decode graphs go: what it allocates for them, writes before a replay, and reads in one.

The class and its methods are SGLang's; weights, FlashMLA's schedule and DeepGEMM's are left out. On the CPU the kernel that fills the
metadata is stood in for by what its documentation says: rows are written over their live pages only, tails keep what they had.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured_decode import captured
from runtime_world import PAGE, Client, World
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode


def documented_metadata(
    *, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, bs: int, max_len: int, **out: Any
) -> None:
    """What `fused_dsa_decode_metadata` writes: lengths, and each row's tables over the blocks of 128 tokens that it lives in."""
    assert max_len == req_to_token.shape[1] and out["physical_page_size"] == PAGE
    out["cache_seqlens"].copy_(seq_lens)
    out["dsa_cache_seqlens"].copy_(seq_lens.clamp(max=out["dsa_index_topk"]))
    for row in range(bs):
        live = min(-(-int(seq_lens[row]) // 128) * 128, max_len)
        ids = req_to_token[req_pool_indices[row], :live].int()
        out["real_page_table"][row, : -(-live // PAGE)] = ids[::PAGE] // PAGE
        if out["page_table_1"] is not None:
            out["page_table_1"][row, :live] = ids


def patch_cuda(monkeypatch: pytest.MonkeyPatch, is_cuda: bool = True) -> None:
    """Let SGLang's backend take this machine for one with a GPU, and leave DeepGEMM's schedule out."""
    monkeypatch.setattr(dsa_backend, "is_cuda", lambda: is_cuda)
    monkeypatch.setattr(dsa_backend, "resolve_num_sms", lambda: 1)
    monkeypatch.setattr(
        dsa_backend, "resolve_paged_mqa_logits_metadata_fn", lambda: lambda lengths, page, sms: torch.zeros(2, device=lengths.device)
    )


def backend_of(world: World, **fields: Any) -> Any:
    """The backend of `world`, before `init_cuda_graph_state`; `fields` are set last."""
    from sglang.kernels.ops.attention.dsa.metadata import fused_dsa_decode_metadata

    backend = object.__new__(dsa_backend.DeepseekSparseAttnBackend)
    given = {
        "device": world.device, "physical_page_size": PAGE, "token_to_kv_pool": world.pool, "hisparse_coordinator": world.runtime,
        "req_to_token": world.request_pool.req_to_token, "speculative_num_draft_tokens": None, "dsa_index_kpool": 1,
        "use_fused_topk": True, "dsa_topk_backend": DSATopKBackend.SGL_KERNEL, "dsa_index_topk": world.sizes.top_k,
        "dsa_decode_impl": "flashmla_sparse", "dsa_prefill_impl": "flashmla_sparse", "dsa_kv_cache_store_fp8": False,
        "_memory_saver_adapter": SimpleNamespace(region=lambda tag: contextlib.nullcontext()), "_multi_ctas_kv_counter_buffer": None,
        "_arange_buf": torch.arange(1024, dtype=torch.int32, device=world.device), "set_dsa_prefill_impl": lambda forward_batch: None,
        "_build_topk_v2_plan": lambda lengths: None, "experimental_kpool_metadata_fusion": False, "forward_metadata": None,
        "_fused_decode_metadata": documented_metadata if world.device == "cpu" else fused_dsa_decode_metadata,
    }  # fmt: skip
    for name, value in (given | fields).items():
        setattr(backend, name, value)
    return backend


class GraphsOfSizes:
    """Decode graphs for batches of several sizes, the resolver's calls of all layers in each, over SGLang's own metadata."""

    def __init__(self, world: World, backend: Any, sizes: tuple[int, ...]) -> None:
        self.world, self.backend, self.sizes = world, backend, sorted(sizes)
        self.slots, self.lengths = (torch.ones(max(sizes), dtype=torch.int64, device=world.device) for _ in range(2))
        self.top_k = torch.zeros(max(sizes), world.sizes.top_k, dtype=torch.int32, device=world.device)
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self._attend()
        self._replays = {}
        for rows in reversed(self.sizes):  # the largest first, as SGLang captures
            self._prepare(rows)
            self._replays[rows] = captured(world, lambda rows=rows: self._run(rows))

    def _attend(self) -> None:
        self.world.runtime._model_runner.attn_backend = self.backend

    def _prepare(self, rows: int) -> None:
        self.backend._apply_cuda_graph_metadata(
            bs=rows, req_pool_indices=self.slots[:rows], seq_lens=self.lengths[:rows], seq_lens_cpu=None,
            forward_mode=ForwardMode.DECODE, spec_info=None,
        )  # fmt: skip

    def _run(self, rows: int) -> None:
        swap_in = self.world.runtime.swap_in_selected_pages
        self.outputs[rows] = [
            swap_in(self.slots[:rows], self.lengths[:rows], self.top_k[:rows], layer).clone() for layer in range(self.world.sizes.layers)
        ]

    def step(self, clients: list[Client], positions: torch.Tensor) -> list[torch.Tensor]:
        """Device rows int32 [rows of the graph, top_k] of every layer; rows behind `clients` are padding, as SGLang fills it."""
        rows = next(size for size in self.sizes if size >= len(clients))
        self._attend()
        self.world.runtime.num_real_reqs.fill_(len(clients))
        self.slots.zero_()
        self.lengths.fill_(1)
        self.top_k.zero_()
        for row, client in enumerate(clients):
            self.slots[row], self.lengths[row] = client.slot, client.length
        self.top_k[: len(clients)] = positions.to(self.world.device)
        self._prepare(rows)
        self._replays[rows]()
        return [output.cpu() for output in self.outputs[rows]]
