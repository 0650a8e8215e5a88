"""Checks of the kernels that the tests and scripts/gpu_kernel_check.py share; each raises on a fault and returns what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from resolver_world import Shape, World

from sglang_hisparse.kernels.build import load_cpu, load_cuda
from sglang_hisparse.kernels.hot_state import table_entries
from sglang_hisparse.kernels.page_copy import Direction, copy_pages, fetch_union, gather_rows
from sglang_hisparse.kernels.resolver import apply_table_diff, audit_rows, read_rows, resolve, write_rows

SMALL = [
    Shape(),
    Shape(k=1, buffer_size=4, page_size=4, rows=2),
    Shape(k=7, buffer_size=8, page_size=8, row_bytes=16, layers=1),
    Shape(k=33, buffer_size=64, page_size=1, max_pages=90, rows=3, num_slots=3),
    Shape(k=64, buffer_size=64, page_size=16, max_pages=9, layers=3, row_bytes=80, host_row_bytes=112),
    Shape(k=20, buffer_size=48, page_size=16, max_pages=9, layers=2, row_bytes=656, rows=4, num_slots=4),
    Shape(k=20, buffer_size=48, page_size=16, max_pages=9, layers=1, row_bytes=1152, rows=4, num_slots=4),
    Shape(k=20, buffer_size=32, page_size=16, max_pages=9, layers=1, row_bytes=2624, rows=4, num_slots=4),
    Shape(k=24, buffer_size=48, page_size=8, row_bytes=656, evicts_by_score=True),
]
SERVING = [
    Shape(k=2048, buffer_size=4096, page_size=64, rows=3, num_slots=3, max_pages=100, layers=1, row_bytes=1152),
    Shape(k=2048, buffer_size=6144, page_size=64, rows=2, num_slots=2, max_pages=140, layers=1, row_bytes=656),
    Shape(k=2048, buffer_size=2048, page_size=64, rows=2, num_slots=2, max_pages=80, layers=4, row_bytes=656),
    Shape(k=1024, buffer_size=8192, page_size=64, rows=2, num_slots=2, max_pages=150, layers=1, row_bytes=128),
    Shape(k=512, buffer_size=32768, page_size=64, rows=2, num_slots=2, max_pages=600, layers=1, row_bytes=16),
    Shape(
        k=2048, buffer_size=4096, page_size=64, rows=2, num_slots=2, max_pages=100, row_bytes=656, evicts_by_score=True
    ),
]


def fetches(shape: Shape) -> list[Shape]:
    """The same world over every way to fetch and to launch."""
    return [
        replace(
            shape,
            cluster_blocks=blocks,
            translated_pages=blocks % 4 == 0,
            overlap_launch=overlap,
        )
        for blocks in (0, 1, 2, 4, 8)
        for overlap in (True, False)
    ]


def build() -> str:
    """Both libraries compile and load."""
    load_cpu()
    load_cuda()
    return "CPU and CUDA libraries"


def lives(device: str, shape: Shape, seed: int, steps: int) -> None:
    world = World(shape, device, seed)
    for _ in range(steps):
        world.random_step()


def fuzz(device: str, steps: int, seed: int) -> str:
    """Random lives of small shapes, every step against the oracle."""
    done, per_world = 0, 15
    while done < steps:
        shape = SMALL[(seed + done // per_world) % len(SMALL)]
        options = fetches(shape)
        lives(device, options[(seed + done) % len(options)], seed + done, per_world)
        done += per_world
    return f"{done} steps, seed {seed}"


def serving_shapes(device: str, steps: int = 6) -> str:
    """Sizes of real models; every entry and byte against the oracle."""
    for shape in SERVING:
        world = World(shape, device, 1)
        for _ in range(steps):
            world.decode_step()
    return f"{len(SERVING)} shapes x {steps} steps"


@dataclass(slots=True)
class Recorder:
    """Keeps the outputs of every launch."""

    outputs: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, **arguments: Any) -> None:
        resolve(**arguments)
        self.outputs.append(arguments["out"].cpu())


def same_as_cpu(device: str) -> str:
    """Outputs and state equal the CPU library's bit by bit."""
    compared = 0
    for shape in [*SMALL, SERVING[0], SERVING[3]]:
        for variant in fetches(shape)[:: 3 if shape in SMALL else 7]:
            worlds = [World(variant, where, 3) for where in ("cpu", device)]
            recorders = [Recorder(), Recorder()]
            for _ in range(6 if shape in SMALL else 3):
                for world, recorder in zip(worlds, recorders, strict=True):
                    step = world.random_step if shape in SMALL else world.decode_step
                    step(launch=recorder)
            pairs = [*zip(recorders[0].outputs, recorders[1].outputs, strict=True)]
            pairs += [
                (getattr(worlds[0].state, name), getattr(worlds[1].state, name).cpu()) for name in ("tags", "header")
            ]
            held = worlds[0].state.tags >= 0  # the stamp of an empty slot means nothing
            pairs.append((worlds[0].state.stamps[held], worlds[1].state.stamps.cpu()[held]))
            for want, got in pairs:
                assert torch.equal(want, got), f"{variant}: differs from the CPU library"
                compared += want.numel()
    return f"{compared} numbers equal"


class GraphLauncher:
    """Captures the first call and replays it for all later ones: inputs are copied into the captured tensors."""

    MOVING = ("top_k", "page_rows", "seq_lens", "req_slots", "out")

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fixed: dict[str, torch.Tensor] = {}

    def __call__(self, **arguments: Any) -> None:
        if self.graph is None:
            self.fixed = {name: arguments[name].clone() for name in self.MOVING}
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                resolve(**{**arguments, **self.fixed})
        for name, tensor in self.fixed.items():
            tensor.copy_(arguments[name])
        self.graph.replay()
        arguments["out"].copy_(self.fixed["out"])


def tables(device: str) -> str:
    """The slot table holds one entry for every held row and no other: rows that leave are taken out. Not for the CPU library."""
    entries = 0
    for blocks in (1, 4):
        world = World(replace(SMALL[0], rows=4, cluster_blocks=blocks), device, 11)
        for _ in range(12):
            world.random_step()
            header, table = world.state.header.cpu(), world.state.table.cpu()
            for slot in (header[:, 0] == header[:, 1]).nonzero().flatten().tolist():
                held = world.state.tags[slot].cpu() >= 0
                entries_of = table[slot, : table_entries(world.shape.buffer_size)]
                slots = entries_of[entries_of != -1] & (world.shape.buffer_size - 1)
                assert sorted(slots.tolist()) == held.nonzero().flatten().tolist(), f"slot {slot}: {slots}, tags {held}"
                entries += len(slots)
    assert entries, "nothing was held"
    return f"{entries} entries"


def graph_replay(device: str, steps: int = 25) -> str:
    """One captured call serves batches, page tables and leases that change after the capture."""
    for shape in (SMALL[0], SMALL[5], replace(SERVING[0], row_bytes=64)):
        world, launcher = World(shape, device, 4), GraphLauncher()
        for _ in range(steps):
            world.random_step(launch=launcher)
    return f"3 graphs x {steps} replays"


def no_sync(device: str) -> str:
    """Resolve, reset, counters and table diffs never wait for the device: torch raises if they do."""
    world = World(SMALL[0], device, 1)
    for slot in range(3):
        world.admit(slot, num_pages=8, resident=0.5)
    slots = torch.tensor([1], device=device)
    index = torch.tensor([1, 2], dtype=torch.int32, device=device)

    def launch(**arguments: Any) -> None:
        resolve(**arguments)  # compiled and loaded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            world.state.reset(slots)
            resolve(**arguments)
            world.state.counters()
            apply_table_diff(torch.zeros(4, dtype=torch.int32, device=device), index, index)
            read_rows(index, arguments["page_table"], 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    inputs = World.launch_arguments(world, {0: np.zeros(world.shape.k, dtype=np.int32)})
    launch(**inputs)
    return "no call waited"


def page_copies(device: str) -> str:
    """Pages go where they are sent in both directions, and nowhere else."""
    random = np.random.default_rng(0)
    for page_bytes, layers, pages in ((64, 1, 5), (41984, 3, 9), (73728, 2, 17)):
        host = torch.from_numpy(random.integers(0, 255, (layers, 24, page_bytes), dtype=np.uint8))
        host = host.pin_memory() if device == "cuda" else host
        kv = torch.from_numpy(random.integers(0, 255, (layers, 24, page_bytes), dtype=np.uint8)).to(device)
        host_pages, device_pages = random.permutation(24)[:pages], random.permutation(24)[:pages]
        for direction in Direction:
            want_host, want_kv = host.clone(), kv.cpu().clone()
            if direction is Direction.TO_HOST:
                want_host[:, host_pages] = want_kv[:, device_pages]
            else:
                want_kv[:, device_pages] = want_host[:, host_pages]
            copy_pages(
                direction=direction,
                host_bases=torch.tensor([layer.data_ptr() for layer in host], device=device),
                device_bases=torch.tensor([layer.data_ptr() for layer in kv], device=device),
                host_pages=torch.from_numpy(host_pages).int().to(device),
                device_pages=torch.from_numpy(device_pages).int().to(device),
                page_bytes=page_bytes,
                max_blocks=3,
            )
            got = kv.cpu()  # waits for the copy
            assert torch.equal(got, want_kv) and torch.equal(host, want_host), (
                f"{direction.name}, pages of {page_bytes} bytes"
            )
            kv = torch.from_numpy(random.integers(0, 255, tuple(kv.shape), dtype=np.uint8)).to(device)
    return "both directions"


def gathers(device: str) -> str:
    """Scattered rows arrive, of every row size and from a padded pitch."""
    random = np.random.default_rng(1)
    for row_bytes, pitch, layers, count in (
        (16, 16, 1, 3),
        (656, 704, 2, 100),
        (1152, 1152, 1, 300),
        (4608, 4608, 2, 65),
    ):
        host = torch.from_numpy(random.integers(0, 255, (layers, 400, pitch), dtype=np.uint8))
        host = host.pin_memory() if device == "cuda" else host
        kv = torch.zeros((layers, 400, row_bytes), dtype=torch.uint8, device=device)
        source, target = random.permutation(400)[:count], random.permutation(400)[:count]
        gather_rows(
            host_bases=torch.tensor([layer.data_ptr() for layer in host], device=device),
            device_bases=torch.tensor([layer.data_ptr() for layer in kv], device=device),
            host_rows=torch.from_numpy(source).int().to(device),
            device_rows=torch.from_numpy(target).int().to(device),
            row_bytes=row_bytes,
            host_row_bytes=pitch,
        )
        want = torch.zeros(layers, 400, row_bytes, dtype=torch.uint8)
        want[:, target] = host[:, source, :row_bytes]
        assert torch.equal(kv.cpu(), want), f"rows of {row_bytes} bytes"
    return "4 row sizes"


def unions(device: str) -> str:
    """Each selected row on a host place arrives once, in two calls; other rows and marks stay, of every row size."""
    random = np.random.default_rng(2)
    logical_pages, places, page = 90, 40, 16
    for row_bytes, count in ((16, 1), (656, 700), (1152, 5000), (1152, 90_000), (4608, 300)):
        host = torch.from_numpy(random.integers(1, 255, (logical_pages * page, row_bytes), dtype=np.uint8))
        host = host.pin_memory() if device == "cuda" else host
        scratch = torch.zeros((places + 11) * page, row_bytes, dtype=torch.uint8, device=device)
        table = np.zeros(logical_pages, dtype=np.int32)
        table[random.permutation(np.arange(1, logical_pages))[: places + 10]] = np.arange(1, places + 11)
        marks = torch.zeros(-(-len(scratch) // 32), dtype=torch.int32, device=device)
        fetched = torch.zeros(1, dtype=torch.int64, device=device)
        ids = random.integers(-1, logical_pages * page + 40, count)
        want = np.zeros(scratch.shape, dtype=np.uint8)
        for row in {*ids.tolist()}:
            place = table[row // page] if 0 <= row < logical_pages * page else 0
            if 1 <= place <= places:
                want[place * page + row % page] = host[row].numpy()
        for part in (ids[: count // 2], ids):
            fetch_union(
                ids=torch.from_numpy(part).int().to(device),
                table=torch.from_numpy(table).to(device),
                host_base=torch.tensor([host.data_ptr()], device=device),
                scratch_base=torch.tensor([scratch.data_ptr()], device=device),
                marks=marks,
                fetched=fetched,
                host_places=places,
                row_bytes=row_bytes,
                page_size=page,
            )
        assert torch.equal(scratch.cpu(), torch.from_numpy(want)), f"{count} ids, rows of {row_bytes} bytes"
        bits = np.unpackbits(marks.cpu().numpy().view(np.uint8), bitorder="little")[: len(want)]
        assert (bits == want.any(axis=1)).all() and int(fetched) == bits.sum()
    return "5 unions"


def translations(device: str) -> str:
    """Readers get -1 and writers the pad page for what is not resident; the input stays as it is."""
    table = torch.tensor([0, 3, 0, 7], dtype=torch.int32, device=device)
    ids = [-1, 0, 5, 16, 21, 32, 47, 48, 63, 64, 2**30]
    readable = [-1, -1, -1, 48, 53, -1, -1, 112, 127, -1, -1]
    writable = [0, 0, 5, 48, 53, 0, 15, 112, 127, 0, 0]
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor(ids, dtype=dtype, device=device)
        read, written = read_rows(tensor.view(1, -1), table, 16), write_rows(tensor, table, 16)
        assert read.dtype == torch.int32 and read.tolist() == [readable]
        assert written.dtype == dtype and written.tolist() == writable
        assert tensor.tolist() == ids
    diff = torch.tensor([1, 3], dtype=torch.int32, device=device)
    apply_table_diff(table, diff, torch.tensor([0, 9], dtype=torch.int32, device=device))
    assert table.tolist() == [0, 0, 0, 9]
    return "both types"


def audits(device: str) -> str:
    """The audit counts every host-only entry and finds exactly the rows that were spoilt."""
    world = World(replace(SMALL[5], rows=2), device, 2)
    world.admit(0, num_pages=6, resident=0.3)
    positions = np.arange(world.shape.k, dtype=np.int32) * 4
    positions[3] = -1
    arguments = world.launch_arguments({0: positions})
    resolve(**arguments)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    names = (
        "top_k",
        "page_rows",
        "seq_lens",
        "num_real_rows",
        "page_table",
        "host_bases",
        "device_bases",
        "row_bytes",
        "page_size",
    )

    def audit() -> list[int]:
        counts.zero_()
        audit_rows(rows=arguments["out"], counts=counts, **{name: arguments[name] for name in names})
        return counts.tolist()

    request = world.requests[0]
    pages = world.page_table.tolist()
    entries = [i for i, p in enumerate(positions) if 0 <= p < request.seq_len and pages[request.pages[p // 16]] == 0]
    assert len(entries) > 3 and audit() == [len(entries), 0], audit()
    world.kv[1, int(arguments["out"][0, entries[1]]), -1] ^= 1
    arguments["out"][0, entries[2]] = -1
    assert audit() == [len(entries), 2], audit()
    return f"{len(entries)} entries"


def tiny(device: str) -> None:
    """Little enough for a sanitizer, with every kernel in it."""
    for shape in (SMALL[0], SMALL[4]):
        for variant in fetches(shape)[::3]:  # both ways to launch, and every number of blocks but two
            lives(device, variant, 7, 4)
    world = World(replace(SERVING[0], rows=2, num_slots=2, cluster_blocks=2), device, 1)
    for _ in range(2):
        world.decode_step()
    page_copies(device)
    gathers(device)
    unions(device)
    translations(device)
    audits(device)


def all_checks(device: str, steps: int, seed: int) -> dict[str, Callable[[], str]]:
    """What gpu_kernel_check runs, in order."""
    return {
        "translations": lambda: translations(device),
        "page copies": lambda: page_copies(device),
        "gathers": lambda: gathers(device),
        "unions": lambda: unions(device),
        "oracle fuzz": lambda: fuzz(device, steps, seed),
        "serving shapes": lambda: serving_shapes(device),
        "same as CPU library": lambda: same_as_cpu(device),
        "slot tables": lambda: tables(device),
        "audit": lambda: audits(device),
        "graph replay": lambda: graph_replay(device),
        "no sync": lambda: no_sync(device),
    }
