"""Goal: host rows are where logical ids say, pinned memory is given back. Method: real pools, a recording CUDA API."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.memory import host_memory
from sglang_hisparse.memory.host_memory import HostMemory, HostMemoryError, chunk_ranges
from sglang_hisparse.memory.host_tier import HostTier
from sglang_hisparse.memory.pool import HiSparsePool

PAGE = 64


def make_pool(dtype: torch.dtype = torch.bfloat16, kv_cache_dim: int = 576, device: str = "cpu") -> HiSparsePool:
    return HiSparsePool(
        size=4 * PAGE,
        page_size=PAGE,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=3,
        device=device,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=kv_cache_dim,
        start_layer=0,
        end_layer=3,
        host_to_device_ratio=2.5,
    )


class FakeCudart:
    """Records registrations; fails at the call numbered `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.live: list[int] = []
        self.calls: list[tuple[str, int, int]] = []
        self.fail_at = fail_at

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
        if len(self.calls) == self.fail_at:
            return 2
        self.calls.append(("register", pointer, num_bytes))
        self.live.append(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append(("unregister", pointer, 0))
        self.live.remove(pointer)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: fake.calls.append(("synchronize", index, 0)))
    monkeypatch.setattr(host_memory, "_check_device_address", lambda pointer: None)
    yield fake


@pytest.mark.parametrize("granularity", [4096, 656 * PAGE, 1152 * PAGE, 9_600])
@pytest.mark.parametrize("num_bytes", [1, 4096, 1_000_000, 7_777_777])
def test_chunks_cover_without_splitting(num_bytes: int, granularity: int) -> None:
    """Goal: chunks cover the bytes, inner borders split neither a 4 KiB page nor a copy unit. Method: walk them."""
    ranges = chunk_ranges(num_bytes, granularity=granularity, max_chunk_bytes=1 << 20)
    end = 0
    for start, size in ranges:
        assert start == end and 0 < size <= 1 << 20
        assert start % 4096 == 0 and start % granularity == 0
        end = start + size
    assert end == num_bytes


def test_chunk_smaller_than_a_copy_unit_is_refused() -> None:
    """Goal: a unit that no chunk can hold is an error. Method: a page larger than the limit."""
    with pytest.raises(HostMemoryError):
        chunk_ranges(1 << 20, granularity=4097, max_chunk_bytes=1 << 20)


def test_cpu_memory_is_zeroed_and_not_registered(cudart: FakeCudart) -> None:
    """Goal: device cpu registers nothing. Method: allocate with pin on, look at the recorder and the bytes."""
    memory = HostMemory.allocate(10_000_001, device="cpu")
    assert memory.tensor is not None and memory.tensor.shape == (10_000_001,) and not memory.tensor.any()
    assert memory.tensor.data_ptr() == memory.address and memory.address % 4096 == 0
    assert not memory.pinned and cudart.calls == []


def test_registered_in_chunks_and_released_in_reverse(cudart: FakeCudart) -> None:
    """Goal: every chunk is registered once and released once, last first, after a sync. Method: recorded calls."""
    memory = HostMemory.allocate(10_000, device="cuda:0", max_chunk_bytes=4096)
    registered = [call[1] for call in cudart.calls]
    assert registered == [memory.address, memory.address + 4096, memory.address + 8192] and memory.pinned
    assert cudart.calls[-1][2] == 10_000 - 8192
    memory.release()
    memory.release()
    assert cudart.calls[3] == ("synchronize", 0, 0)
    assert [call[1] for call in cudart.calls[4:]] == registered[::-1]
    assert cudart.live == [] and memory.tensor is None and not memory.pinned


def test_collected_memory_is_unregistered(cudart: FakeCudart) -> None:
    """Goal: memory that is dropped without release is still unregistered. Method: delete the only reference."""
    memory = HostMemory.allocate(10_000, device="cuda:0")
    kept = memory.tensor
    assert kept is not None and len(cudart.live) == 1
    del memory
    gc.collect()
    assert cudart.live == []
    kept[0] = 7  # a view keeps the mapping itself
    assert int(kept.sum()) == 7


def test_failed_registration_is_undone(cudart: FakeCudart) -> None:
    """Goal: a failure half way leaves nothing registered. Method: the third call fails."""
    cudart.fail_at = 2
    with pytest.raises(HostMemoryError, match="host_pool_gib"):
        HostMemory.allocate(100_000, device="cuda:0", max_chunk_bytes=4096)
    assert cudart.live == [] and len([c for c in cudart.calls if c[0] == "unregister"]) == 2


def test_numa_node_lookup(tmp_path: Path) -> None:
    """Goal: the node is read where it is told and None elsewhere. Method: a made-up sysfs tree."""
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    assert host_memory._numa_node_of("0000:3b:00.0", tmp_path) is None
    for text, node in (("1\n", 1), ("-1\n", None), ("x", None)):
        (device / "numa_node").write_text(text)
        assert host_memory._numa_node_of("0000:3b:00.0", tmp_path) == node


def test_unknown_node_costs_nothing() -> None:
    """Goal: placement never fails the allocation. Method: ask for a node that no machine has."""
    memory = HostMemory.allocate(1 << 20, device="cpu")
    assert host_memory.prefer_numa_node(memory.address, 1 << 20, 1000) is False


def test_touch_reaches_every_page() -> None:
    """Goal: parallel touching writes each 4 KiB page. Method: a marked array, three threads, odd size."""
    view = np.full(5 * 4096 + 17, 9, dtype=np.uint8)
    host_memory.touch_pages(view, threads=3)
    assert list(np.flatnonzero(view == 0)) == [0, 4096, 8192, 12288, 16384, 20480]


@pytest.mark.parametrize(("dtype", "dim", "row_bytes"), [(torch.bfloat16, 576, 1152), (torch.float8_e4m3fn, 656, 656)])
def test_row_number_is_logical_id(dtype: torch.dtype, dim: int, row_bytes: int) -> None:
    """Goal: row r of layer l lies at base[l] + r * row_bytes. Method: write through views, read raw memory."""
    pool = make_pool(dtype, dim)
    tier = HostTier.create(pool, pool.logical_tokens, PAGE, pin=True)
    assert (tier.row_bytes, tier.page_bytes) == (row_bytes, PAGE * row_bytes)
    assert tier.logical_tokens == 10 * PAGE and tier.size == 11 * PAGE and tier.page_num == 11
    assert tier.kv_buffer.shape == (3, 11 * PAGE, 1, dim) and tier.kv_buffer.dtype == pool.store_dtype
    assert tier.kv_buffer[0].shape[1:] == pool.kv_buffer[0].shape[1:]
    bases = tier.layer_bases()
    assert bases.dtype == torch.int64 and (bases[1:] - bases[:-1] == 11 * PAGE * row_bytes).all()
    for layer, row in ((0, 0), (1, 77), (2, 11 * PAGE - 1)):
        tier.layer_rows(layer)[row] = layer * 50 + row % 50 + 1
        raw = (np.ctypeslib.ctypes.c_uint8 * row_bytes).from_address(int(bases[layer]) + row * row_bytes)
        assert set(raw) == {layer * 50 + row % 50 + 1}
    assert int((tier.kv_buffer.view(torch.uint8) != 0).sum()) == 3 * row_bytes
    tier.destroy()


def test_no_allocator_of_its_own() -> None:
    """Goal: identity stays with the logical allocator. Method: call what SGLang's host pools offer."""
    pool = make_pool()
    tier = HostTier.create(pool, pool.logical_tokens, PAGE)
    with pytest.raises(InvariantError):
        tier.alloc(PAGE)
    with pytest.raises(InvariantError):
        tier.alloc_page(1)
    with pytest.raises(InvariantError):
        tier.free(torch.arange(PAGE))
    assert tier.available_size() == pool.logical_tokens
    free = [5 * PAGE]
    tier.bind_available(lambda: free[0])
    assert tier.available_size() == 5 * PAGE
    tier.clear()
    assert tier.available_size() == 5 * PAGE
    assert not hasattr(tier, "free_slots") and not hasattr(tier, "slot_used")
    tier.destroy()


def test_tier_is_pinned_and_destroyed_once(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a tier of a GPU pool is registered and destroy gives it back. Method: fake API, pool claimed to be CUDA."""
    pool = make_pool()
    info = pool.get_device_pool_infos()[0].buffer_info
    monkeypatch.setattr(HostMemory, "allocate", _allocate_as_cuda(HostMemory.allocate))
    monkeypatch.setattr(pool, "device", "cuda")
    assert info.device.type == "cpu"
    tier = HostTier.create(pool, pool.logical_tokens, PAGE)
    assert tier.pin_memory and len(cudart.live) == 1
    tier.destroy()
    tier.destroy()
    assert cudart.live == [] and tier.kv_buffer is None


def _allocate_as_cuda(original):
    def allocate(num_bytes: int, **kwargs: object) -> HostMemory:
        return original(num_bytes, **{**kwargs, "device": "cuda:0"})

    return allocate


@pytest.mark.gpu
def test_pinned_rows_reach_the_gpu_at_their_host_address() -> None:
    """Goal: registration in chunks works on a device. Method: copy rows of every chunk to the GPU and back."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    memory = HostMemory.allocate(20_000, device="cuda", max_chunk_bytes=8192)
    assert memory.tensor is not None and len(memory.registered) == 3
    memory.tensor.copy_(torch.arange(20_000, dtype=torch.int64).to(torch.uint8))
    for start, size in chunk_ranges(20_000, max_chunk_bytes=8192):
        part = memory.tensor[start : start + size]
        assert torch.equal(part.cuda(non_blocking=True).cpu(), part)
    memory.release()
