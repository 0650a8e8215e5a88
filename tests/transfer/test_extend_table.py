"""Goal: an extend reads the rows that it has selected, whether its table or its selections are translated, and no other forward is
touched. Method: SGLang's DSA backend on the CPU makes its own tables; top-k is a look-up in them, as SGLang's kernels make it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runtime_world import make_world
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.state_capturer import indexer_topk

from sglang_hisparse.hooks import HOOKS, around_forward_raw
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.residency.types import StreamPlan
from sglang_hisparse.transfer.extend_table import TABLE_VARIABLE, after_init_forward_metadata
from sglang_hisparse.transfer.prefix_stream import PrefixStream

PAGE, DIM, TOP_K = 64, 24, 8
LENGTHS, NEW = [300, 70], [40, 70]  # the first request has a prefix of 260 tokens


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TABLE_VARIABLE, "1")


@pytest.fixture(autouse=True)
def _no_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang would ask its process groups, which no test has."""
    for name in ("is_dsa_enable_prefill_cp", "can_dsa_prefill_cp_interleave"):
        monkeypatch.setattr(dsa_backend, name, lambda *batch: False)
    monkeypatch.setattr(dsa_backend, "pad_dsa_cache_seqlens", lambda batch, lengths: lengths)


def make_pool() -> HiSparsePool:
    """A pool of twelve logical pages, of which some are on the device, where other pages lie."""
    pool = object.__new__(HiSparsePool)
    pool.size, pool.page_size, pool.start_layer, pool.layer_num = 11 * PAGE, PAGE, 0, 2
    pool.dtype = pool.store_dtype = torch.bfloat16
    pool.kv_buffer = [torch.randn(12 * PAGE, 1, DIM) for _ in range(2)]
    pool.page_table = torch.zeros(13, dtype=torch.int32)
    for logical, device in ((7, 2), (2, 9), (11, 1), (3, 4), (9, 6), (5, 10), (12, 3)):
        pool.page_table[logical] = device
    pool.prefix_stream = pool.layer_transfer_counter = None
    return pool


def make_backend(pool: HiSparsePool) -> Any:
    """SGLang's DSA backend, as far as an extend asks it; the rows of both requests by hand, with rubbish behind their ends."""
    rows = torch.full((4, 400), 12 * PAGE + 5, dtype=torch.int32)
    for slot, pages in ((3, [7, 2, 11, 3, 9]), (1, [5, 12])):
        ids = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
        rows[slot, : len(ids)] = ids.int()
    rows[1, 200] = -9
    backend = object.__new__(dsa_backend.DeepseekSparseAttnBackend)
    given = {
        "token_to_kv_pool": pool, "hisparse_coordinator": object(), "req_to_token": rows, "device": torch.device("cpu"),
        "req_to_token_pool": SimpleNamespace(req_to_token=rows), "_kv_shard_pool": None, "dsa_index_kpool": 1,
        "physical_page_size": PAGE, "dsa_index_topk": TOP_K, "use_mha": False, "supports_mha_one_shot": False,
        "dsa_prefill_impl": "flashmla_sparse", "dsa_decode_impl": "flashmla_sparse", "dsa_kv_cache_store_fp8": False,
        "enable_auto_select_prefill_impl": False, "use_fused_topk": True, "speculative_num_draft_tokens": 0,
        "dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: True, should_use_topk_v2=lambda: False),
        "get_device_int32_arange": lambda count: torch.arange(count, dtype=torch.int32),
        "_build_topk_v2_plan": lambda lengths: None, "_init_kpool_metadata": lambda metadata, batch, **rest: metadata,
        "_is_in_breakable_cuda_graph": lambda: False, "_is_in_tc_piecewise_cuda_graph": lambda: False,
        "_get_device_sm": lambda: 90, "_is_blackwell": lambda: False,
    }  # fmt: skip
    for name, value in given.items():
        setattr(backend, name, value)
    return backend


def make_batch(mode: ForwardMode = ForwardMode.EXTEND, new: list[int] = NEW) -> Any:
    lengths = torch.tensor(LENGTHS)
    prefixes = [length - count for length, count in zip(LENGTHS, new, strict=True)]
    return SimpleNamespace(
        batch_size=2, seq_lens=lengths, seq_lens_cpu=lengths, seq_lens_sum=sum(LENGTHS), req_pool_indices=torch.tensor([3, 1]),
        extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new, extend_prefix_lens=torch.tensor(prefixes),
        extend_prefix_lens_cpu=prefixes, extend_num_tokens=sum(new), forward_mode=mode, get_max_chunk_capacity=lambda: 1 << 17,
    )  # fmt: skip


def init(backend: Any, batch: Any) -> None:
    """SGLang's own tables, and our hook behind them."""
    # Other tests of this process may have applied the hooks.
    original = inspect.unwrap(dsa_backend.DeepseekSparseAttnBackend.init_forward_metadata)
    result = original(backend, batch)
    after_init_forward_metadata(result, backend, batch)


def selected(backend: Any, seed: int) -> torch.Tensor:
    """What SGLang's top-k gives: entries of the table at random positions below each token's length, -1 behind the last."""
    random, table, rows = np.random.default_rng(seed), backend.forward_metadata.page_table_1, []
    for request, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        for end in range(length - new + 1, length + 1):
            count = min(end, TOP_K)
            row = np.full(TOP_K, -1)
            row[:count] = table[request, random.choice(end, count, replace=False)].numpy()
            rows.append(row)
    return torch.from_numpy(np.stack(rows)).int()


def attention_rows(backend: Any, batch: Any, ids: torch.Tensor, layer: int) -> torch.Tensor:
    """The rows that SGLang's `forward_extend` gives to its kernel."""
    seen = []
    backend._forward_flashmla_sparse = lambda *, page_table_1, **rest: seen.append(page_table_1)
    query = torch.zeros(len(ids), 1, DIM)
    layer = SimpleNamespace(layer_id=layer, is_cross_attention=False, tp_q_head_num=1, head_dim=DIM, v_head_dim=16, scaling=0.2)
    backend.forward_extend(query, None, None, layer, batch, topk_indices=ids)
    return seen[0]


@pytest.fixture
def other() -> Iterator[Any]:
    """A backend that translates what its layers select, as they do where nothing is hooked."""
    backend, batch = make_backend(make_pool()), make_batch()
    init(backend, batch)
    yield backend


def test_rows_are_those_of_translated_selections(other: Any) -> None:
    """Goal: both ways lead to the same rows, in every layer, also where layers share selections. Method: SGLang's extend, twice."""
    pool, batch = make_pool(), make_batch()
    backend = make_backend(pool)
    with pool.forward():
        init(backend, batch)
        assert not torch.equal(backend.forward_metadata.page_table_1, other.forward_metadata.page_table_1)
        for layer in (0, 1):
            mine, plain = selected(backend, layer), selected(other, layer)
            kept = mine.clone()
            rows = attention_rows(backend, batch, mine, layer)
            assert torch.equal(rows, attention_rows(other, batch, plain, layer)) and rows.dtype == torch.int32
            assert (rows[:, 0] > 0).all() and (rows == -1).any() and torch.equal(mine, kept)
            assert torch.equal(attention_rows(backend, batch, mine, layer), rows), "a follower reads the same tensor again"


def test_only_the_table_of_single_rows_changes(other: Any) -> None:
    """Goal: the indexer still finds its keys by logical page, and nobody's tensor is written. Method: all other fields, and the
    request pool, before and after."""
    pool = make_pool()
    backend = make_backend(pool)
    before = backend.req_to_token.clone()
    with pool.forward():
        init(backend, make_batch())
    mine, plain = backend.forward_metadata, other.forward_metadata
    assert torch.equal(mine.page_table_1, pool.read_rows(plain.page_table_1)) and torch.equal(backend.req_to_token, before)
    assert torch.equal(mine.real_page_table, plain.real_page_table) and mine.real_page_table[0, 0] == 7
    differing = [name for name in vars(plain) if name != "page_table_1" and not _same(getattr(mine, name), getattr(plain, name))]
    assert differing == []


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("case", ["streamed", "mixed", "outside", "dense", "ragged", "no coordinator", "shown", "switched off"])
def test_where_layers_translate_for_themselves(case: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a table of rows is never read as ids, nor ids as rows. Method: forwards whose selections are translated, one by one."""
    pool = make_pool()
    backend, mode = make_backend(pool), ForwardMode.MIXED if case == "mixed" else ForwardMode.EXTEND
    if case == "streamed":
        host = [torch.randn(14 * PAGE, 1, DIM) for _ in range(2)]
        bases = [torch.tensor([rows.data_ptr() for rows in side]) for side in (host, pool.kv_buffer)]
        pool.prefix_stream = PrefixStream(like=pool.kv_buffer[0], host_bases=bases[0], device_bases=bases[1],
                                          page_table=pool.page_table, page_size=PAGE, num_pages=6)  # fmt: skip
        pool.prefix_stream.begin(StreamPlan(np.array([7, 2]), np.array([11]), np.array([1])))
    if case == "dense":
        backend.set_dsa_prefill_impl = lambda batch: setattr(backend, "use_mha", True)
    if case == "ragged":
        backend.get_topk_transform_method = lambda mode: dsa_backend.TopkTransformMethod.RAGGED
    if case == "shown":  # to clients, as --enable-return-indexer-topk does
        monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: object())
    if case == "switched off":
        monkeypatch.delenv(TABLE_VARIABLE)
    if case == "no coordinator":
        backend.hisparse_coordinator = None
    with nullcontext() if case == "outside" else pool.forward():
        init(backend, make_batch(mode))
        assert torch.equal(backend.forward_metadata.page_table_1, other.forward_metadata.page_table_1)
        ids = torch.tensor([[7 * PAGE + 1, -1]], dtype=torch.int32)
        rows = pool.translate_loc_to_hisparse_device(ids)
        assert rows is not ids and rows[0, 1] == -1
        assert rows[0, 0] == (PAGE + 1 if case == "streamed" else 2 * PAGE + 1)


def test_it_ends_with_its_forward() -> None:
    """Goal: the next forward, a decode step or one that failed before it, finds ids to be ids. Method: translations after an extend
    that ended, after one that raised, and at the begin of another."""
    pool, ids = make_pool(), torch.tensor([[7 * PAGE + 1]], dtype=torch.int32)
    with pool.forward():
        init(make_backend(pool), make_batch())
        assert pool.translate_loc_to_hisparse_device(ids) is ids
        assert pool.translate_loc_to_hisparse_device(ids[0].long()).tolist() == [2 * PAGE + 1], "writers always have ids"
    assert pool.translate_loc_to_hisparse_device(ids).item() == 2 * PAGE + 1
    with pytest.raises(RuntimeError), pool.forward():
        init(make_backend(pool), make_batch())
        raise RuntimeError
    assert pool.translate_loc_to_hisparse_device(ids).item() == 2 * PAGE + 1
    with pool.forward():
        assert pool.translate_loc_to_hisparse_device(ids).item() == 2 * PAGE + 1


@pytest.mark.parametrize("case", ["one token each", "decode"])
def test_the_last_table_counts(case: str) -> None:
    """Goal: tables that are made again within a forward are read as what they are. Method: a table that is translated, then one that
    is not."""
    pool, ids = make_pool(), torch.tensor([[7 * PAGE + 1]], dtype=torch.int32)
    backend, again = make_backend(pool), make_batch(new=[1, 1])
    backend._build_paged_mqa_schedule_2d_ctx_lens = lambda *given: None
    if case == "decode":
        again.forward_mode = ForwardMode.DECODE
    with pool.forward():
        init(backend, make_batch())
        assert pool.translate_loc_to_hisparse_device(ids) is ids
        init(backend, again)
        assert backend.forward_metadata.page_table_1[0, 1] == 7 * PAGE + 1
        assert pool.translate_loc_to_hisparse_device(ids).item() == 2 * PAGE + 1
        init(backend, make_batch())
        assert pool.translate_loc_to_hisparse_device(ids) is ids


def test_a_server_says_when_a_forward_runs() -> None:
    """Goal: the hook around SGLang's forward lets tables be translated, in it alone. Method: a forward that asks, with the runtime."""
    with make_world() as world:
        runner, ids = SimpleNamespace(hisparse_coordinator=world.runtime), torch.tensor([[PAGE]])
        found = around_forward_raw(lambda runner: world.pool.translate_table(ids), runner)
        assert found.shape == (1, 1) and world.pool.translate_table(ids) is None


def test_other_pools_and_the_hook() -> None:
    """Goal: without HiSparse nothing changes, and the hook is where tables are made. Method: a backend of another pool; the list."""
    backend = SimpleNamespace(token_to_kv_pool=object())
    after_init_forward_metadata(None, backend, make_batch())
    assert not hasattr(backend, "forward_metadata")
    assert [hook.kind for hook in HOOKS if hook.function is after_init_forward_metadata] == ["AFTER"]


def _stub_top_k(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's two kernels on the CPU, each with the table that it is given; the names of those that were called."""
    called: list[str] = []

    def by_pages(logits: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, size: int, plan: Any) -> None:
        called.append("pages")
        for row, length in enumerate(lengths.tolist()):
            chosen = torch.arange(min(length, TOP_K))
            out[row] = -1
            out[row, : len(chosen)] = pages[row, chosen // size] * size + chosen % size

    def by_tokens(score: torch.Tensor, lengths: torch.Tensor, page_table_size_1: torch.Tensor, cu_seqlens_q: torch.Tensor,
                  topk: int, row_starts: Any) -> torch.Tensor:  # fmt: skip
        called.append("tokens")
        out = torch.full((len(score), topk), -1, dtype=torch.int32)
        for row, length in enumerate(lengths.tolist()):
            request = int(torch.searchsorted(cu_seqlens_q, row, right=True)) - 1
            out[row, : min(length, topk)] = page_table_size_1[request, : min(length, topk)]
        return out

    monkeypatch.setattr("sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2", by_pages)
    fake = SimpleNamespace(fast_topk_transform_fused=by_tokens, fast_topk_transform_ragged_fused=None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", fake)
    return called


@pytest.mark.parametrize(("new", "kernel"), [([1, 1], "pages"), ([2, 1], "tokens"), ([40, 70], "tokens")])
def test_rows_where_top_k_looks_at_pages(new: list[int], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an extend with one new token a request, for which SGLang's top-k reads the table of pages, reads its own rows too.
    Method: SGLang's own choice of the kernel, as its indexer asks for short requests; what attention is given, against the page table."""
    called = _stub_top_k(monkeypatch)
    pool, batch = make_pool(), make_batch(new=new)
    backend = make_backend(pool)
    backend.dsa_topk_backend = DSATopKBackend.SGL_KERNEL
    backend._build_topk_v2_plan = lambda lengths: torch.zeros(len(lengths) + 1)
    with pool.forward():
        init(backend, batch)
        ids = backend.get_indexer_metadata(0, batch).topk_transform(torch.zeros(sum(new), TOP_K), TOP_K)
        rows = attention_rows(backend, batch, ids, 0)
    assert called == [kernel]
    first = torch.arange(TOP_K)
    wanted = torch.stack([page * PAGE + first for page, count in zip((2, 10), new, strict=True) for _ in range(count)])
    ends = torch.tensor([end for length, count in zip(LENGTHS, new, strict=True) for end in range(length - count + 1, length + 1)])
    assert torch.equal(rows.long(), torch.where(first < ends[:, None], wanted, -1))


@pytest.mark.gpu
def test_sglangs_kernel_gives_entries_of_the_table() -> None:
    """Goal: a translated table gives the rows that translated selections would. Method: SGLang's own fused top-k over random scores of
    an extend of two requests, with the table of ids and with that of rows; on the device, row by row, in any order."""
    kernel = pytest.importorskip("sgl_kernel").fast_topk_transform_fused
    random, lengths, new, most, top_k = np.random.default_rng(3), [3000, 2500], [40, 70], 3008, 2048
    pages = random.permutation(np.arange(1, 2 * most // PAGE + 1)).reshape(2, -1)
    table = torch.from_numpy((pages[:, :, None] * PAGE + np.arange(PAGE)).reshape(2, -1)).int().cuda()
    device_pages = torch.from_numpy(random.permutation(np.arange(pages.max() + 1))).int().cuda()
    ends = np.concatenate([np.arange(length - count, length) + 1 for length, count in zip(lengths, new, strict=True)])
    starts = np.repeat([0, lengths[0]], new)
    scores = torch.from_numpy(random.permutation(sum(new) * sum(lengths)).reshape(sum(new), -1)).float().cuda()

    def translate(ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, ids, device_pages[ids.clamp(min=0) // PAGE] * PAGE + ids.clamp(min=0) % PAGE)

    def select(entries: torch.Tensor) -> torch.Tensor:
        return kernel(
            score=scores,
            lengths=torch.from_numpy(ends).int().cuda(),
            page_table_size_1=entries.int(),
            cu_seqlens_q=torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device="cuda"),
            topk=top_k,
            row_starts=torch.from_numpy(starts).int().cuda(),
        )

    assert torch.equal(select(translate(table)).sort().values, translate(select(table)).sort().values)
