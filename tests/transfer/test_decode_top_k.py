"""Goal: positions from SGLang's fused top-k are those of its unfused one. Method: SGLang's own metadata and backend; on the CPU its
kernel is stood in for by what its documentation says, on a GPU it is the kernel itself, short and long rows, few and many.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_world import Sizes, make_world

pytest.importorskip("sglang", reason="sglang is not installed")

from sglang.kernels.ops.attention.dsv4 import topk as sglang_topk
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hisparse import hooks
from sglang_hisparse.transfer.decode_top_k import TOP_K_VARIABLE, DecodeTopK, TopKTap

PAGE, K = 64, 2048


def documented_kernel(
    scores: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, page_size: int, plan: torch.Tensor
) -> None:
    """Each row's highest scores within its length through its row of the page table, unordered; -1 behind them."""
    assert plan.shape == (len(scores) + 1, 2) and pages.stride(1) == 1 and page_size == PAGE
    out.fill_(-1)
    for row, length in enumerate(lengths.tolist()):
        chosen = scores[row, :length].topk(min(out.shape[1], length)).indices.sort().values.int()
        out[row, : len(chosen)] = pages[row, (chosen // page_size).long()] * page_size + chosen % page_size


def metadata_of(lengths: torch.Tensor, backend: DSATopKBackend = DSATopKBackend.SGL_KERNEL, **step: Any) -> DSAIndexerMetadata:
    """Of a decode step under HiSparse: SGLang's own, with a page table that is not in order."""
    rows, pages = len(lengths), -(-int(lengths.max()) // PAGE)
    plan = torch.zeros(rows + 1, 2, dtype=torch.int32)
    if lengths.is_cuda:
        plan = sglang_topk.plan_topk_v2(lengths)
    given = {
        "dsa_seqlens_expanded": lengths, "topk_v2_plan": plan, "page_size": PAGE, "cu_seqlens_q": None,
        "topk_indices_offset": None, "real_page_table": torch.randperm(rows * pages).int().view(rows, pages) + 1,
    } | step  # fmt: skip
    return DSAIndexerMetadata(SimpleNamespace(**given), TopkTransformMethod.PAGED, backend, force_unfused_topk=True)


def chosen(positions: torch.Tensor) -> list[list[int]]:
    return [sorted(row) for row in positions.tolist()]


@pytest.mark.parametrize("lengths", [[5000], [100, 2048, 2049, 9000], [0, 64, 70000]])
def test_positions_are_those_of_the_unfused_top_k(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: the same set a row, valid ones first. Method: torch's top-k through SGLang's unfused path beside it."""
    monkeypatch.setattr(sglang_topk, "topk_transform_paged_v2", documented_kernel)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    logits = torch.rand(len(lengths), -(-max(lengths) // PAGE) * PAGE)
    kernel = DecodeTopK(2000, torch.device("cpu"))
    with envs.SGLANG_OPT_USE_TOPK_V2.override(True), caplog.at_level(logging.INFO, "sglang_hisparse"):
        for _ in range(2):
            found = TopKTap(metadata_of(sizes), kernel).topk_transform(logits, K)
    assert [record.getMessage() for record in caplog.records] == ["HiSparse top-k of decode steps: plain SGLang's fused kernel"]
    wanted = metadata_of(sizes, DSATopKBackend.TORCH).topk_transform(logits, K)
    assert found.dtype == torch.int32 and chosen(found) == chosen(wanted)
    assert ((found >= 0).sum(1) == sizes.clamp(max=K)).all() and all((found[i, :n] >= 0).all() for i, n in enumerate(sizes.clamp(max=K).tolist()))


@pytest.mark.parametrize(
    "change",
    [
        {"backend": DSATopKBackend.TORCH}, {"topk_v2_plan": None}, {"topk_v2_plan": torch.zeros(9, 2, dtype=torch.int32)},
        {"real_page_table": torch.zeros(7, 40, dtype=torch.int32)},
    ],
    ids=["backend", "no plan", "plan of others", "rows"],
)  # fmt: skip
def test_otherwise_sglang_chooses(change: dict[str, Any]) -> None:
    """Goal: nothing is launched that SGLang would not launch for such a step. Method: each condition by itself, and the kernel's own."""
    lengths = torch.tensor([3000, 100], dtype=torch.int32)
    backend = change.pop("backend", DSATopKBackend.SGL_KERNEL)
    kernel, metadata = DecodeTopK(50, torch.device("cpu")), metadata_of(lengths, backend, **change)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(True):
        assert kernel.select(metadata, torch.rand(2, 3008), K) is None
        whole = metadata_of(lengths)
        for logits, k in ((torch.rand(2, 3008).half(), K), (torch.rand(2, 3007), K), (torch.rand(3008, 2).T, K), (torch.rand(2, 3008), 4096)):
            assert kernel.select(whole, logits, k) is None
    for variable in (envs.SGLANG_OPT_USE_TOPK_V2, envs.SGLANG_DSA_FUSE_TOPK):
        with envs.SGLANG_OPT_USE_TOPK_V2.override(True), variable.override(False):
            assert kernel.select(whole, torch.rand(2, 3008), K) is None


def test_it_is_on_in_decode_steps_only_unless_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what the variable says. Method: the metadata that the indexer sees, through the hook."""
    seen: list[Any] = []

    def indexer(self: Any, batch: Any, layer: int, q: Any, weights: Any, metadata: Any) -> None:
        seen.append(type(metadata))

    given = metadata_of(torch.tensor([10], dtype=torch.int32))
    for value in ("0", "1"):
        monkeypatch.setenv(TOP_K_VARIABLE, value)
        with make_world(Sizes()) as world:
            for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
                batch = SimpleNamespace(hisparse_coordinator=world.runtime, forward_mode=mode)
                hooks.around_topk_paged(indexer, None, batch, 0, None, None, given)
    assert seen == [DSAIndexerMetadata, DSAIndexerMetadata, TopKTap, DSAIndexerMetadata]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 64])
@pytest.mark.parametrize("longest", [1500, 8000, 16000, 60000, 160000])
def test_the_kernel_itself(rows: int, longest: int) -> None:
    """Goal: on a GPU too, eager and replayed with other lengths. Method: torch's top-k of normal scores. (Of uniform ones too many
    of 160,000 fall into one bin of the kernel, which then drops some of them, for plain SGLang too.)"""
    device = torch.device("cuda")
    generator = torch.Generator("cuda").manual_seed(rows + longest)
    logits = torch.randn(rows, -(-longest // 256) * 256, device=device, generator=generator)
    lengths = torch.randint(1, longest + 1, (rows,), device=device, generator=generator).int()
    lengths[0] = longest
    kernel, metadata = DecodeTopK(-(-longest // PAGE), device), metadata_of(lengths)
    metadata.attn_metadata.real_page_table = metadata.attn_metadata.real_page_table.to(device)

    def check(found: torch.Tensor) -> None:
        for row, length in enumerate(lengths.tolist()):
            mine = found[row, : min(length, K)]
            assert (found[row, min(length, K) :] == -1).all() and len(mine.unique()) == len(mine)
            assert mine.min() >= 0 and mine.max() < length
            wanted = logits[row, :length].topk(min(length, K)).values.sort().values
            assert torch.equal(logits[row, mine.long()].sort().values, wanted), "ties aside, the same positions"

    check(kernel.select(metadata, logits, K))
    graph, static = torch.cuda.CUDAGraph(), metadata.attn_metadata
    with torch.cuda.graph(graph):
        captured = kernel.select(metadata, logits, K)
    for _ in range(3):
        logits.copy_(torch.randn(logits.shape, device=device, generator=generator))
        lengths.copy_(torch.randint(1, longest + 1, (rows,), device=device, generator=generator).int())
        static.topk_v2_plan.copy_(sglang_topk.plan_topk_v2(lengths))
        graph.replay()
        check(captured)
