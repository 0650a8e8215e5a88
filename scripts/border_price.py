#!/usr/bin/env python3
"""What the place of the border between KV and index-K costs or saves: SGLang's own scheduler, with modelled times, without a GPU.

Drives the harness of tests/harness: real Scheduler, pools, allocator, radix tree, coordinator and border. The forward computes nothing and takes
as long as a linear model says, in milliseconds of the small DSA model on an H200: a decode step 1.7 and 0.045 a request, prefilled tokens 0.0064
each, 0.055 for each request that has host-only pages, 0.012 for a page that is promoted. So it compares how many requests run at once and how
many tokens are prefilled; it knows nothing of attention's length, of waits, or of the scheduler's own time.

Loads: `NUMBERxATONCE` prompts of 4,000 tokens, each sent once, 256 tokens out; `agentsN`: N conversations in step, the shape of bench_agent at
a quarter, a pause between turns; `once+agentsN`: a window of prompts sent once before them, on the same server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from child_process import measure_apart

PAGE = 64
CHUNK_BYTES = 1 << 18  # a step is as large, in pages, as one of the small model's with 2 MiB
STEP_MS, REQUEST_MS, TOKEN_MS, MIXED_MS, PROMOTE_MS = 1.7, 0.045, 0.0064, 0.055, 0.012
PAUSE = 50  # iterations without a request between two turns


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens: of plain SGLang, of the host tier, of a hot buffer."""

    device: int
    logical: int
    hot: int = 2560


SMALL, AGENT = Sizes(50_000, 198_000), Sizes(168_000, 756_000)


def config_of(system: str, sizes: Sizes) -> tuple[dict[str, Any] | None, int]:
    """Settings, and device tokens: all of plain's, or what is left of them when index-K of every logical token is paid for."""
    if system == "plain":
        return None, sizes.device
    values = {"top_k": 128, "device_buffer_size": sizes.hot, "prefill_scratch_tokens": 0}
    if system == "elastic":
        return values | {"elastic_border": True, "host_to_device_ratio": sizes.logical / sizes.device}, sizes.device
    # 8 layers with rows of 128 bytes, one of them with index keys of 132 bytes.
    device = (sizes.device * (1024 + 132) - sizes.logical * 132) // 1024 // PAGE * PAGE
    return values | {"host_to_device_ratio": sizes.logical / device}, device


class Clock:
    """Modelled milliseconds of an engine's forwards, in place of its model."""

    def __init__(self, engine: Any) -> None:
        self.ms, self.prefilled = 0.0, 0
        self._engine, self._promoted = engine, 0
        engine.model.forward = self._forward
        engine.model.check_launched_reads = lambda: None
        engine._check_device_tables = engine._follow_refusals = lambda *args: None
        engine._device_tables = dict

    def _forward(self, input_ids: Any, positions: Any, batch: Any) -> Any:
        import torch
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        logits = torch.zeros(batch.batch_size, self._engine.config.vocab_size)
        logits[:, 7] = 1.0
        self.ms += STEP_MS + REQUEST_MS * batch.batch_size
        if not batch.forward_mode.is_decode():
            self.prefilled += len(input_ids)
            self.ms += TOKEN_MS * len(input_ids)
        if (runtime := self._engine.coordinator) is not None:
            residency = runtime.residency
            if batch.forward_mode.is_decode():
                self.ms += MIXED_MS * int((residency.book.host_counts(batch.req_pool_indices.numpy()) > 0).sum())
            self.ms += PROMOTE_MS * (residency.counters.pages_promoted - self._promoted)
            self._promoted = residency.counters.pages_promoted
        return LogitsProcessorOutput(next_token_logits=logits)


@contextlib.contextmanager
def server(system: str, sizes: Sizes, max_running: int = 64) -> Iterator[tuple[Any, Clock]]:
    """An engine of that system, and the clock of its forwards."""
    from harness.engine import make_scheduler
    from harness.hisparse import small_chunks
    from sglang.srt.environ import envs

    config, device = config_of(system, sizes)
    shape = {"max_running_requests": max_running, "chunked_prefill_size": 8192, "num_layers": 8, "index_topk_freq": 8}
    with (
        small_chunks(CHUNK_BYTES),
        make_scheduler(config, device_tokens=device, overlap=True, context_length=32768, **shape) as engine,
        envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.override(0),
    ):
        yield engine, Clock(engine)


def play_once(engine: Any, clock: Clock, count: int, at_once: int, seed: int) -> float:
    """`count` prompts, so many at a time. Returns output tokens a second."""
    import numpy as np

    rng, live, began, out = np.random.default_rng(seed), [], clock.ms, 256
    sent = 0
    while sent < count or live:
        while sent < count and len(live) < at_once:
            live.append(engine.submit(rng.integers(10, 1000, 4000).tolist(), out))
            sent += 1
        engine.step()
        live = [handle for handle in live if not handle.finished]
    return 1e3 * count * out / (clock.ms - began)


def play_agents(engine: Any, clock: Clock, count: int, seed: int) -> dict[str, Any]:
    """`count` conversations in step. Returns output tokens a second, and the tokens that each turn had to prefill."""
    import numpy as np

    rng, histories, turns = np.random.default_rng(seed), [[] for _ in range(count)], []
    began, first, later, out, num_turns = clock.ms, 18_540, 188, 55, 13
    for turn in range(num_turns):
        before = clock.prefilled
        handles = [engine.submit(history + rng.integers(10, 1000, later if turn else first).tolist(), out) for history in histories]
        while not all(handle.finished for handle in handles):
            engine.step()
        histories = [[*handle.prompt, *handle.output] for handle in handles]
        turns.append(clock.prefilled - before)
        engine.step(PAUSE)
    return {"tok_s": 1e3 * count * out * num_turns / (clock.ms - began), "prefilled": turns}


def place(engine: Any) -> dict[str, Any]:
    """Where the border stands, how often it has gone back, and whether prompts return rarely."""
    runtime = engine.coordinator
    counts = {} if runtime is None or runtime.border is None else runtime.border.counters()
    return {key: count for key, count in counts.items() if key in ("border_steps", "border_returns", "prefixes_return_rarely")}


def measure(load: str, system: str, hot: int = 2560, max_running: int = 64) -> dict[str, Any]:
    """Figures of one server under one load."""
    once, agents = load.startswith("once"), load.rpartition("agents")[2] if "agents" in load else ""
    sizes = replace(AGENT if agents else SMALL, hot=hot)
    with server(system, sizes, max_running) as (engine, clock):
        figures: dict[str, Any] = {"load": load, "system": system, "hot": hot, "max_running": max_running}
        if once:
            figures["once_tok_s"] = play_once(engine, clock, 220, 48, 1)
            figures["after_once"] = place(engine)
        if agents:
            figures |= play_agents(engine, clock, int(agents), 2)
        else:
            figures["tok_s"] = play_once(engine, clock, *map(int, load.split("x")), 1)
        return figures | place(engine)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="+", default=["16x16", "48x48", "192x48", "agents32"])
    parser.add_argument("--systems", nargs="+", default=["plain", "fixed", "elastic"])
    parser.add_argument("--hot", type=int, default=2560, help="rows of a hot buffer")
    parser.add_argument("--max-running", type=int, default=64)
    args = parser.parse_args(argv)
    for load in args.loads:
        plain = None
        for system in args.systems:
            figures = measure_apart("border_price", load, system, args.hot, args.max_running)
            plain = figures["tok_s"] if system == "plain" else plain
            print(json.dumps(figures | {"of_plain": round(figures["tok_s"] / plain, 3) if plain else None}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
