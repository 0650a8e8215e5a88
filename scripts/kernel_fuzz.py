"""Many random cases of the resolver on a GPU, every one judged by the plain-Python oracle and by the CPU library.

A case is one step of a random life (tests/resolver_world.py): requests enter and leave, pages move, a batch resolves. The world
lives on the CPU, where the oracle checks answers, tags, victims, counts and bytes; the same step runs on the GPU from the same
inputs, and every number that it leaves must be equal. Several processes share the GPU, since the oracle is slow.

    python scripts/kernel_fuzz.py --cases 10000 --processes 12
    python scripts/kernel_fuzz.py --cases 200 --processes 1 --device cpu     # shows that the script works
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kernel_checks import SMALL, fetches
from resolver_world import Shape, World

from sglang_hisparse.kernels.resolver import HotGroupState, resolve

STEPS_PER_LIFE = 20


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on `device` whose rows lie as far apart as the original's."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, copy=True)
    return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Twin:
    """The hot state of a world and its like on `device`: what is forgotten in one is forgotten in both."""

    def __init__(self, state: HotGroupState, world: World, device: str) -> None:
        self.here = state
        shape = world.shape
        self.there = HotGroupState.allocate(
            shape.num_slots, shape.buffer_size, device, evicts_by_score=shape.evicts_by_score
        )
        self.device, self.world, self.kv = device, world, torch.empty_like(world.kv, device=device)
        self.host = world.host.pin_memory() if device == "cuda" else world.host.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here, name)

    def reset(self, slots: torch.Tensor) -> None:
        self.here.reset(slots)
        self.there.reset(slots.to(self.device))

    def launch(self, **arguments: Any) -> None:
        """Resolve here and there from equal inputs; whatever comes out must be equal. Raises AssertionError."""
        self.host.copy_(self.world.host)
        self.kv.copy_(self.world.kv)
        there = {
            name: moved(value, self.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        } | {
            "group": self.there,
            "host_bases": torch.tensor([layer.data_ptr() for layer in self.host], device=self.device),
            "device_bases": torch.tensor([layer.data_ptr() for layer in self.kv], device=self.device),
        }
        resolve(**{**arguments, "group": self.here})
        resolve(**there)
        held = self.here.tags >= 0  # the stamp of an empty slot means nothing
        pairs = {
            "out": (arguments["out"], there["out"].cpu()),
            "tags": (self.here.tags, self.there.tags.cpu()),
            "header": (self.here.header, self.there.header.cpu()),
            "stamps": (self.here.stamps[held], self.there.stamps.cpu()[held]),
            "rows": (self.world.kv, self.kv.cpu()),
        }
        if self.here.slot_pages is not None:
            pairs["slot pages"] = (self.here.slot_pages[held], self.there.slot_pages.cpu()[held])
        for name, (want, got) in pairs.items():
            assert torch.equal(want, got), f"{name}: the two libraries differ"


def random_shape(random: np.random.Generator) -> Shape:
    """Sizes of one life: mostly small, so that every victim and every collision counts, some of hundreds of rows."""
    if random.random() < 0.3:
        shape = SMALL[int(random.integers(len(SMALL)))]
    else:
        page = int(random.choice([1, 4, 8, 16, 64]))
        k = int(2 ** random.uniform(0, 8))
        pages = -(-k // page) + int(random.integers(0, 5))
        shape = Shape(
            k=k,
            buffer_size=pages * page,
            page_size=page,
            rows=int(random.integers(1, 7)),
            num_slots=int(random.integers(2, 7)),
            max_pages=int(random.integers(1, 2 * pages + 4)),
            layers=int(random.integers(1, 4)),
            row_bytes=16 * int(random.integers(1, 9)),
            evicts_by_score=bool(random.random() < 0.25),
        )
        if random.random() < 0.3:
            shape = dataclasses.replace(shape, host_row_bytes=shape.row_bytes + 16 * int(random.integers(1, 5)))
    options = fetches(shape)
    return options[int(random.integers(len(options)))]


def fuzz(cases: int, seed: int, device: str, until: float) -> dict[str, Any]:
    """Random lives until `cases` steps are done or time.time() reaches `until`. A fault is reported with what repeats it."""
    done = rows = life = 0
    while done < cases and time.time() < until:
        life_seed = seed * 1_000_003 + life
        shape = random_shape(np.random.default_rng(life_seed))
        world = World(shape, "cpu", life_seed)
        world.state = twin = Twin(world.state, world, device)
        try:
            for _ in range(STEPS_PER_LIFE):
                world.random_step(launch=twin.launch)
                rows += int(world.num_real_rows)
                done += int(world.num_real_rows) > 0  # a step of padding alone is checked too, but is no case
                if done == cases:
                    break
        except Exception as error:  # noqa: BLE001 - the parent reports it, with what repeats it
            traceback.print_exc()
            return {"cases": done, "rows": rows, "fault": f"life seed {life_seed}, {shape}: {error!r}"[:900]}
        life += 1
    return {"cases": done, "rows": rows, "fault": None}


def _work(job: tuple[int, int, str, float]) -> dict[str, Any]:
    torch.set_num_threads(1)  # tensors are small and the processes many
    return fuzz(*job)


def fuzz_in_processes(cases: int, seed: int, device: str, processes: int, seconds: float) -> dict[str, Any]:
    """`cases` shared out over `processes`; what they found in all. Fewer cases than asked for if `seconds` are over."""
    began = time.time()
    share = -(-cases // processes)
    jobs = [
        (min(share, cases - i * share), seed * 1000 + i, device, began + seconds)
        for i in range(processes)
        if i * share < cases
    ]
    if processes == 1:
        results = [fuzz(*jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            results = pool.map(_work, jobs)
    return {
        "cases": sum(result["cases"] for result in results),
        "rows": sum(result["rows"] for result in results),
        "seed": seed,
        "processes": processes,
        "faults": [result["fault"] for result in results if result["fault"]],
        "seconds": round(time.time() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=100, help="stop after this time, whatever is left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = fuzz_in_processes(arguments.cases, arguments.seed, arguments.device, arguments.processes, arguments.seconds)
    print(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["faults"]) or found["cases"] < arguments.cases)


if __name__ == "__main__":
    sys.exit(main())
