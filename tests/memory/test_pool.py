"""Goal: SGLang's DSA pool serves logical ids from device pages. Method: the real pool on the CPU, rows by hand."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVWriteLoc

from sglang_hisparse.errors import ConfigError, InvariantError
from sglang_hisparse.memory import pool as pool_module
from sglang_hisparse.memory.pool import ZERO_ROW, HiSparsePool, rows_for_reading, rows_for_writing

PAGE = 64
LAYERS = 4


def make_pool(*, ratio: float = 2.5, pages: int = 4, start_layer: int = 0, **kwargs: object) -> HiSparsePool:
    arguments = {
        "size": pages * PAGE,
        "page_size": PAGE,
        "kv_lora_rank": 512,
        "dtype": torch.bfloat16,
        "qk_rope_head_dim": 64,
        "layer_num": LAYERS,
        "device": "cpu",
        "index_head_dim": 128,
        "enable_memory_saver": False,
        "kv_cache_dim": 576,
        "start_layer": start_layer,
        "end_layer": start_layer + LAYERS,
        "host_to_device_ratio": ratio,
    }
    return HiSparsePool(**{**arguments, **kwargs})


def make_bound_pool(**kwargs: object) -> HiSparsePool:
    pool = make_pool(**kwargs)
    table = torch.zeros(pool.num_logical_pages + 1, dtype=torch.int32)
    table[1], table[2], table[7] = 3, 1, 4
    pool.bind_page_table(table)
    return pool


def layer(layer_id: int) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id)


def test_constructor_is_the_built_ins() -> None:
    """Goal: SGLang can construct us as it constructs its own pool. Method: compare parameter names and order."""
    ours = list(inspect.signature(HiSparsePool.__init__).parameters)
    assert ours == list(inspect.signature(HiSparseDSATokenToKVPool.__init__).parameters)


@pytest.mark.parametrize(("ratio", "pages"), [(1, 4), (2, 8), (2.5, 10), (3.13, 12)])
def test_fractional_ratio_sizes_index_k(ratio: float, pages: int) -> None:
    """Goal: index-K spans all logical pages and the pad page, KV the device pages. Method: buffer shapes."""
    pool = make_pool(ratio=ratio)
    assert pool.num_logical_pages == pages and pool.logical_tokens == pages * PAGE
    assert {tuple(b.shape) for b in pool.kv_buffer} == {(5 * PAGE, 1, 576)}
    assert {tuple(b.shape) for b in pool.index_k_with_scale_buffer} == {(pages + 1, PAGE * 132)}
    assert (pool.row_bytes, pool.page_bytes, pool.num_rows) == (1152, 1152 * PAGE, 5 * PAGE)


def test_followers_own_no_index_k() -> None:
    """Goal: only leader layers pay for index-K. Method: a group of two, then a group of two."""
    pool = make_pool(skip_topk_layers=[False, True, False, True])
    assert [b.shape[0] for b in pool.index_k_with_scale_buffer] == [11, 0, 11, 0]


def test_fp8_rows() -> None:
    """Goal: packed fp8 rows are 656 bytes. Method: row_bytes and the raw view of a layer."""
    pool = make_pool(dtype=torch.float8_e4m3fn, kv_cache_dim=656)
    assert pool.row_bytes == 656 and pool.layer_rows(1).shape == (5 * PAGE, 656)
    assert pool.layer_rows(1).data_ptr() == int(pool.device_bases()[1]) == pool.kv_buffer[1].data_ptr()


def test_refuses_pooled_index_and_broken_pages() -> None:
    """Goal: what page identity cannot follow is refused at once. Method: index_kpool 2; a size in mid-page."""
    with pytest.raises(ConfigError, match="index_kpool"):
        make_pool(index_kpool=2)
    with pytest.raises(InvariantError, match="whole number"):
        make_pool(size=100)


def test_table_is_bound_once() -> None:
    """Goal: the table captured by graphs cannot be swapped, no other map is taken. Method: bad and second tables."""
    pool = make_pool()
    with pytest.raises(InvariantError, match="no page table"):
        pool.write_rows(torch.tensor([64]))
    with pytest.raises(InvariantError):
        pool.bind_page_table(torch.zeros(11, dtype=torch.int64))
    with pytest.raises(InvariantError):
        pool.bind_page_table(torch.zeros(10, dtype=torch.int32))
    table = torch.zeros(11, dtype=torch.int32)
    pool.bind_page_table(table)
    pool.bind_page_table(table)
    with pytest.raises(InvariantError, match="fixed for life"):
        pool.bind_page_table(table.clone())
    with pytest.raises(InvariantError, match="bind_page_table"):
        pool.register_mapping(torch.zeros(11, dtype=torch.int64))


def test_readers_get_minus_one_and_writers_the_pad_page() -> None:
    """Goal: R23, two translations told apart by rank. Method: resident, padded and host-only ids through both."""
    pool = make_bound_pool()
    ids = [PAGE, -1, 3 * PAGE + 5, 7 * PAGE + 63, 0]
    read = pool.translate_loc_to_hisparse_device(torch.tensor([ids], dtype=torch.int32))
    assert read.dtype == torch.int32 and read.tolist() == [[3 * PAGE, -1, -1, 4 * PAGE + 63, -1]]
    write = pool.translate_loc_to_hisparse_device(torch.tensor(ids))
    assert write.dtype == torch.int64 and write.tolist() == [3 * PAGE, 0, 5, 4 * PAGE + 63, 0]


def test_translation_is_never_in_place() -> None:
    """Goal: follower layers still find logical ids. Method: compare the input before and after, and its storage."""
    pool = make_bound_pool()
    ids = torch.tensor([[PAGE, -1, 3 * PAGE]], dtype=torch.int32)
    before = ids.clone()
    assert pool.read_rows(ids).data_ptr() != ids.data_ptr() and torch.equal(ids, before)
    loc = torch.tensor([PAGE])
    assert pool.write_rows(loc).data_ptr() != loc.data_ptr() and loc.tolist() == [PAGE]


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    ids=st.lists(st.integers(-3, 12 * 16 - 1), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_translations_against_plain_python(table: list[int], ids: list[int], dtype: torch.dtype) -> None:
    """Goal: both translations follow the definition of the table. Method: loops over lists, page size 16."""
    pages = [0, *table]
    ids = [i for i in ids if i // 16 < len(pages)] or [0]
    tensor, page_table = torch.tensor(ids, dtype=dtype), torch.tensor(pages, dtype=torch.int32)
    read = [pages[i // 16] * 16 + i % 16 if i >= 0 and pages[i // 16] else -1 for i in ids]
    write = [pages[i // 16] * 16 + i % 16 if i >= 0 else 0 for i in ids]
    assert rows_for_reading(tensor, page_table, 16).tolist() == read
    got = rows_for_writing(tensor, page_table, 16)
    assert got.tolist() == write and got.dtype == dtype


@pytest.mark.gpu
def test_kernel_translations_equal_the_plain_ones() -> None:
    """Goal: on a GPU the kernels answer as the CPU does. Method: the same ids, 1-D and strided 2-D, on both."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    table = torch.randint(0, 40, (101,), dtype=torch.int32)
    table[0] = 0
    loc = torch.randint(0, 101 * PAGE, (777,))
    ids = torch.randint(-9, 101 * PAGE, (33, 2048), dtype=torch.int32)
    assert torch.equal(rows_for_writing(loc.cuda(), table.cuda(), PAGE).cpu(), rows_for_writing(loc, table, PAGE))
    for view in (ids, ids[:, ::2]):
        assert torch.equal(rows_for_reading(view.cuda(), table.cuda(), PAGE).cpu(), rows_for_reading(view, table, PAGE))


@pytest.mark.parametrize("start_layer", [0, 30])
def test_writes_land_in_the_device_page(start_layer: int) -> None:
    """Goal: set_mla_kv_buffer and get_mla_kv_buffer agree by logical id. Method: write, look at raw rows, read back."""
    pool = make_bound_pool(start_layer=start_layer)
    loc = torch.tensor([PAGE + 2, 7 * PAGE, 0])
    latent = torch.randn(3, 1, 512).bfloat16()
    rope = torch.randn(3, 1, 64).bfloat16()
    for layer_id in range(start_layer, start_layer + LAYERS):
        pool.set_mla_kv_buffer(layer(layer_id), KVWriteLoc(loc), latent, rope)
    for buffer in pool.kv_buffer:
        assert torch.equal(buffer[3 * PAGE + 2, 0, :512], latent[0, 0])
        assert torch.equal(buffer[4 * PAGE, 0, 512:], rope[1, 0])
        assert not buffer[ZERO_ROW].any() and int((buffer != 0).any(-1).sum()) == 2
    got_latent, got_rope = pool.get_mla_kv_buffer(layer(start_layer), loc)
    assert torch.equal(got_latent[:2], latent[:2]) and torch.equal(got_rope[:2], rope[:2])
    host_only, _ = pool.get_mla_kv_buffer(layer(start_layer), torch.tensor([5 * PAGE + 9]))
    assert not host_only.any()


def test_set_kv_buffer_translates() -> None:
    """Goal: the combined-row door writes to the same rows. Method: write by logical id, read the raw row."""
    pool = make_bound_pool()
    row = torch.randn(1, 1, 576).bfloat16()
    pool.set_kv_buffer(layer(2), torch.tensor([2 * PAGE + 7]), row, None)
    assert torch.equal(pool.kv_buffer[2][PAGE + 7], row[0])


def count_translations(pool: HiSparsePool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counting(loc: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
        calls.append(loc.data_ptr())
        return rows_for_writing(loc, table, page_size)

    monkeypatch.setattr(pool_module, "rows_for_writing", counting)
    return calls


def test_locations_are_translated_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one translation per forward; a changed table counts from the next forward. Method: count calls."""
    pool = make_bound_pool()
    calls = count_translations(pool, monkeypatch)
    static = torch.tensor([PAGE, PAGE + 1, 0, 0])
    data = torch.ones(2, 1, 512).bfloat16(), torch.ones(2, 1, 64).bfloat16()
    for step, device_page in enumerate((3, 2)):
        assert pool.page_table is not None
        pool.page_table[1] = device_page
        for layer_id in range(LAYERS):
            pool.set_mla_kv_buffer(layer(layer_id), static[:2], *data)  # a new view of one buffer per layer
        assert len(calls) == step + 1
        assert pool.kv_buffer[LAYERS - 1][device_page * PAGE, 0, 0] == 1
        assert pool._write_rows is None


def test_other_locations_are_never_served_from_the_cache() -> None:
    """Goal: a reused address or longer view is not taken for the forward's own. Method: other tensors mid-forward."""
    pool = make_bound_pool()
    static = torch.tensor([PAGE, PAGE + 1, 7 * PAGE])
    first = pool._rows_of_forward(0, static[:1])
    assert pool._rows_of_forward(1, static[:1]) is first
    assert pool._rows_of_forward(1, static).tolist() == [3 * PAGE, 3 * PAGE + 1, 4 * PAGE]
    assert pool._rows_of_forward(1, static[1:2]).tolist() == [3 * PAGE + 1]
    loc = torch.tensor([2 * PAGE])
    address = loc.data_ptr()
    pool._rows_of_forward(2, loc)
    del loc
    assert all(torch.tensor([7 * PAGE]).data_ptr() != address for _ in range(50))


def test_index_k_stays_logical() -> None:
    """Goal: the indexer's rows are addressed by logical id, to the last one. Method: the plain pool's own accessor."""
    pool = make_bound_pool(skip_topk_layers=[False, True, False, False])
    view = pool.get_index_k_with_scale_buffer(0)
    assert view.shape == (pool.num_logical_pages + 1, PAGE * 132)
    assert isinstance(pool, DSATokenToKVPool) and "set_index_k_scale_buffer" not in HiSparsePool.__dict__


def test_what_is_not_done_says_so() -> None:
    """Goal: calls that would corrupt or lie are refused in words. Method: call each."""
    pool = make_bound_pool()
    ids = torch.tensor([PAGE])
    for call in (
        lambda: pool.get_cpu_copy(ids),
        lambda: pool.load_cpu_copy({}, ids),
        lambda: pool.move_kv_cache(ids, ids),
        lambda: pool.transfer_values_on_device(ids, ids),
    ):
        with pytest.raises(InvariantError):
            call()
    assert not hasattr(pool, "full_to_hisparse_device_index_mapping")


@pytest.mark.gpu
def test_one_captured_translation_follows_the_table() -> None:
    """Goal: under a CUDA graph all layers follow the table of each replay. Method: capture, remap, replay, compare."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pool = make_pool(device="cuda")
    table = torch.zeros(pool.num_logical_pages + 1, dtype=torch.int32, device="cuda")
    pool.bind_page_table(table)
    loc = torch.zeros(2, dtype=torch.int64, device="cuda")
    latent = torch.ones(2, 1, 512, dtype=torch.bfloat16, device="cuda")
    rope = torch.ones(2, 1, 64, dtype=torch.bfloat16, device="cuda")

    def forward() -> None:
        for layer_id in range(LAYERS):
            pool.set_mla_kv_buffer(layer(layer_id), loc, latent, rope)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for page, device_page in ((1, 2), (5, 3)):
        table.zero_()
        table[page] = device_page
        loc.copy_(torch.tensor([page * PAGE, page * PAGE + 9]))
        for buffer in pool.kv_buffer:
            buffer.zero_()
        graph.replay()
        for buffer in pool.kv_buffer:
            rows = (buffer != 0).any(-1).flatten().nonzero().flatten().tolist()
            assert rows == [device_page * PAGE, device_page * PAGE + 9]
