"""Goal: attention of an extend reads rows that it has selected, and no other, in every configuration that is accepted.

A scratch whose rows were fetched as a union holds stale rows, and SGLang has paths that would read them: a dense prefill of short
contexts, and a prefill that unpacks whole prefixes of fp8 rows (test_validation.py: what is refused). Method: SGLang's DSA backend on the CPU, with
a plain kernel that treats an entry without a row as FlashMLA does: it reads a row of page 0 and gives it the weight 0.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.residency.types import StreamPlan, StreamWindow
from sglang_hisparse.transfer.attention_windows import around_flashmla_kv, around_flashmla_sparse
from sglang_hisparse.transfer.prefix_stream import PrefixStream

pytest.importorskip("sglang", reason="sglang is not installed")

# As test_validation.py finds them.
ACCEPTED = {("bfloat16", "flashmla_sparse"), ("fp8_e4m3", "flashmla_kv"), ("fp8_e4m3", "flashinfer_sparse_mla")}
LAYERS, PAGE, DIM, VALUE_DIM, HEADS = 3, 64, 24, 16, 2


@pytest.fixture(scope="module")
def sglang_dsa() -> Any:
    """The module of SGLang's DSA backend."""
    from sglang.srt.layers.attention import dsa_backend

    return dsa_backend


def _backend(sglang_dsa: Any, impl: str, **fields: Any) -> Any:
    """SGLang's DSA backend with HiSparse as far as its dispatch of a prefill reads it."""
    backend = object.__new__(sglang_dsa.DeepseekSparseAttnBackend)
    given = {
        "dsa_prefill_impl": impl, "dsa_decode_impl": impl, "dsa_kv_cache_store_fp8": impl == "flashmla_kv",
        "hisparse_coordinator": object(), "dsa_index_kpool": 1, "use_mha": False, "use_fused_topk": True,
        "supports_mha_one_shot": True, "enable_auto_select_prefill_impl": False,
        "dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: True),
        "_is_in_breakable_cuda_graph": lambda: False, "_is_in_tc_piecewise_cuda_graph": lambda: False,
        "_get_device_sm": lambda: 90, "_is_blackwell": lambda: False,
    }  # fmt: skip
    for name, value in (given | fields).items():
        setattr(backend, name, value)
    return backend


def test_no_accepted_backend_unpacks_whole_prefixes(sglang_dsa: Any) -> None:
    """Goal: extends take positions that are translated row by row. Method: SGLang's choice, and where it would be another."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    paged, ragged = sglang_dsa.TopkTransformMethod.PAGED, sglang_dsa.TopkTransformMethod.RAGGED
    for dtype, impl in ACCEPTED:
        backend = _backend(sglang_dsa, impl, dsa_kv_cache_store_fp8=dtype == "fp8_e4m3")
        assert backend.get_topk_transform_method(ForwardMode.EXTEND) is paged
    backend = _backend(sglang_dsa, "flashmla_sparse", dsa_kv_cache_store_fp8=True)
    assert backend.get_topk_transform_method(ForwardMode.EXTEND) is ragged


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv"])
def test_short_contexts_are_not_read_densely(sglang_dsa: Any, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no prefill attends to all of a short prefix. Method: SGLang's decision for 100 tokens, with HiSparse and without."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    monkeypatch.setattr(sglang_dsa, "is_dsa_enable_prefill_cp", lambda: False)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, seq_lens_cpu=torch.tensor([100]), get_max_chunk_capacity=lambda: 1 << 17
    )
    backend = _backend(sglang_dsa, impl, token_to_kv_pool=SimpleNamespace(dtype=torch.bfloat16))
    backend.set_dsa_prefill_impl(batch)
    assert backend.use_mha is False
    backend.hisparse_coordinator = None
    backend.set_dsa_prefill_impl(batch)
    assert backend.use_mha, "SGLang no longer decides here: look where it does"


# ---- what attention makes of the scratch -----------------------------------------------------------------------------


def _pool(host: list[torch.Tensor], device: list[torch.Tensor]) -> HiSparsePool:
    """The pool as attention asks it, its rows those of `device`, with a stream over them."""
    pool = object.__new__(HiSparsePool)
    pool.page_size, pool.start_layer, pool.layer_num = PAGE, 0, LAYERS
    pool.dtype = pool.store_dtype = torch.float32
    pool.page_table = torch.zeros(12, dtype=torch.int32)
    pool.prefix_stream = PrefixStream(
        like=device[0],
        host_bases=torch.tensor([rows.data_ptr() for rows in host]),
        device_bases=torch.tensor([rows.data_ptr() for rows in device]),
        page_table=pool.page_table,
        page_size=PAGE,
        num_pages=6,
    )
    return pool


def _attention(*, q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Values [tokens, heads, VALUE_DIM]. Entries of -1 read the last row of page 0 with the weight 0, as FlashMLA does."""
    rows = rows.long()
    taken = cache.view(-1, DIM)[torch.where(rows < 0, PAGE - 1, rows)]
    scores = torch.einsum("thd,tkd->thk", q, taken) * scale
    weights = scores.masked_fill((rows < 0)[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    weights = torch.where((rows < 0)[:, None], 0.0, weights)
    return torch.einsum("thk,tkd->thd", weights, taken[..., :VALUE_DIM])


def _extend(backend: Any, selected: list[torch.Tensor], queries: list[torch.Tensor]) -> list[torch.Tensor]:
    """All layers of SGLang's prefill of the tokens in `queries`, on rows that are there already."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    found = []
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    for number, (ids, query) in enumerate(zip(selected, queries, strict=True)):
        layer = SimpleNamespace(
            layer_id=number,
            is_cross_attention=False,
            tp_q_head_num=HEADS,
            head_dim=DIM,
            v_head_dim=VALUE_DIM,
            scaling=0.2,
        )
        found.append(backend.forward_extend(query, None, None, layer, batch, topk_indices=ids))
    return found


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv"])
@pytest.mark.parametrize("stale", [7.0, float("nan")])
def test_stale_rows_do_not_reach_a_result(sglang_dsa: Any, impl: str, stale: float) -> None:
    """Goal: a union gives what the whole prefix gives. Method: SGLang's forward_extend twice, all other rows stale or NaN."""
    random = np.random.default_rng(4)
    host, device = ([torch.randn(12 * PAGE, 1, DIM) for _ in range(LAYERS)] for _ in range(2))
    plan = StreamPlan(np.array([7, 2, 11]), np.array([3]), np.array([5]))
    pages = np.array([7, 2, 11, 3])
    selected = []
    for _ in range(LAYERS):
        ids = random.choice(pages, (5, 9)) * PAGE + random.integers(0, PAGE, (5, 9))
        ids[random.random(ids.shape) < 0.2] = -1
        ids[4] = -1
        selected.append(torch.from_numpy(ids).int())
    queries = [torch.randn(5, HEADS, DIM) for _ in range(LAYERS)]
    results = []
    for union in (False, True):
        pool = _pool(host, device)
        if union:
            pool.prefix_stream.scratch[:, PAGE:] = stale
        kernel = _kernel_of(impl)
        backend = _backend(
            sglang_dsa,
            impl,
            token_to_kv_pool=pool,
            forward_metadata=SimpleNamespace(dsa_cache_seqlens_int32=None),
            **kernel,
        )
        pool.prefix_stream.begin(replace(plan, union=union))
        results.append(_extend(backend, selected, queries))
        pool.prefix_stream.finish()
        assert not pool.prefix_stream.scratch[:, :PAGE].any(), "page 0 is read for entries without a row"
    for whole, part in zip(*results, strict=True):
        assert torch.equal(whole, part) and not whole.isnan().any() and whole[:4].any() and not whole[4].any()


def _in_windows(backend: Any, impl: str) -> None:
    """The hook around the backend's call of its kernel, as in a server."""
    name = f"_forward_{impl}"
    original, hook = getattr(backend, name), around_flashmla_kv if impl == "flashmla_kv" else around_flashmla_sparse
    setattr(backend, name, lambda **given: hook(lambda _, **cut: original(**cut), backend, **given))


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv"])
@pytest.mark.parametrize("padding", [0, 2])
def test_windows_give_what_the_whole_scratch_gives(sglang_dsa: Any, impl: str, padding: int) -> None:
    """Goal: attention cut between requests is attention. Method: SGLang's forward_extend of three requests with pages of their own,
    one of them read from the pool, whole and in windows; rows of padding behind the last one."""
    random = np.random.default_rng(5)
    host, device = ([torch.randn(12 * PAGE, 1, DIM) for _ in range(LAYERS)] for _ in range(2))
    plans = [StreamPlan(np.array(h), np.array(r), np.array(d)) for h, r, d in (([7, 2], [3], [5]), ([11, 2], [], []), ([], [9], [8]))]
    whole = StreamPlan(np.array([7, 2, 11]), np.array([3, 9]), np.array([5, 8]))
    tokens = [3, 1, 4]
    spans = np.cumsum([0, *tokens])
    ids = np.full((LAYERS, spans[-1] + padding, 9), -1)
    for number, plan in enumerate(plans):
        pages = np.concatenate([plan.host_pages, plan.resident_pages])
        shape = (LAYERS, tokens[number], 9)
        drawn = random.choice(pages, shape) * PAGE + random.integers(0, PAGE, shape)
        ids[:, spans[number] : spans[number + 1]] = np.where(random.random(shape) < 0.2, -1, drawn)
    selected = [torch.from_numpy(rows).int() for rows in ids]
    queries = [torch.randn(len(ids[0]), HEADS, DIM) for _ in range(LAYERS)]
    lengths = torch.arange(len(ids[0]), dtype=torch.int32)
    results, seen = [], []
    for cut in (False, True):
        pool = _pool(host, device)
        pool.page_table[9] = 8
        pool.kv_buffer, pool.layer_transfer_counter = device, None
        backend = _backend(
            sglang_dsa,
            impl,
            token_to_kv_pool=pool,
            forward_metadata=SimpleNamespace(dsa_cache_seqlens_int32=lengths, flashmla_metadata="of the batch", other=5),
            **_kernel_of(impl, seen),
            _compute_flashmla_metadata=lambda cache_seqlens, seq_len_q: ("of", cache_seqlens.tolist()),
        )
        _in_windows(backend, impl)
        if cut:
            windows = zip([*plans[:2], None], spans, spans[1:], strict=False)
            pool.prefix_stream.begin_windows([StreamWindow(plan, int(a), int(b)) for plan, a, b in windows])
        else:
            pool.prefix_stream.begin(whole)
        results.append(_extend(backend, selected, queries))
        pool.prefix_stream.finish()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other) and not one.isnan().any() and one[: spans[-1]].any()
    last = len(lengths)
    assert seen == LAYERS * [(0, last)] + LAYERS * [(0, 3), (3, 4), (4, last)], "each kernel gets the lengths of its rows"


def test_the_kernel_above_would_show_a_row_of_page_0(sglang_dsa: Any) -> None:
    """Goal: the test before can fail. Method: NaN in page 0, read for an entry without a row."""
    cache = torch.randn(2 * PAGE, DIM)
    cache[:PAGE] = torch.nan
    rows = torch.tensor([[PAGE + 1, -1], [PAGE + 1, PAGE + 2]])
    values = _attention(q=torch.randn(2, HEADS, DIM), cache=cache, rows=rows, scale=0.2)
    assert values[0].isnan().all() and not values[1].isnan().any()


def _kernel_of(impl: str, seen: list[tuple[int, int]] | None = None) -> dict[str, Any]:
    """The backend's call of its kernel, replaced by `_attention`; `seen` gets the first and last length of its rows."""

    def run(
        *, q_all: torch.Tensor, kv_cache: torch.Tensor, page_table_1: torch.Tensor, sm_scale: float, **given: Any
    ) -> torch.Tensor:
        if seen is not None:
            metadata = given.get("metadata")
            lengths = given["topk_length"] if metadata is None else metadata.dsa_cache_seqlens_int32
            if metadata is not None:
                own = ("of", lengths.tolist()) if metadata.flashmla_metadata != "of the batch" else "of the batch"
                assert metadata.flashmla_metadata == own and metadata.other == 5
            assert len(lengths) == len(q_all) == len(page_table_1)
            seen.append((int(lengths[0]), int(lengths[-1]) + 1))
        return _attention(q=q_all, cache=kv_cache, rows=page_table_1, scale=sm_scale)

    return {f"_forward_{impl}": run}
