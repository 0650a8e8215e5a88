"""Lives of an engine that several tests want: seeded, repeatable sequences of client events.

Called by tests and by long soak runs. The seed decides everything; two runs with one seed are equal step by step.
"""

from __future__ import annotations

import numpy as np

from .checks import assert_residency_sound
from .engine import Engine, Handle


def random_life(
    engine: Engine, *, seed: int, num_events: int, max_prompt: int = 1000, max_new: int = 90
) -> list[Handle]:
    """Submit, abort, retract, pause and flush at random, look at the pools after each event, then run to the end."""
    rng = np.random.default_rng(seed)
    half = max_prompt // 2
    prefixes = [rng.integers(10, 1000, int(rng.integers(64, half))).tolist() for _ in range(3)]
    handles: list[Handle] = []
    for _ in range(num_events):
        event = rng.random()
        running = [handle for handle in handles if not handle.finished]
        if event < 0.25 and len(running) < 10:
            prompt = prefixes[int(rng.integers(3))] + rng.integers(10, 1000, int(rng.integers(1, half))).tolist()
            handles.append(engine.submit(prompt, int(rng.integers(1, max_new))))
        elif event < 0.30 and running:
            engine.abort(running[int(rng.integers(len(running)))])
        elif event < 0.33:
            engine.retract()
        elif event < 0.34:
            engine.pause("retract")
            engine.flush()
            engine.resume()
        elif event < 0.35:
            engine.pause("in_place")
            engine.resume()
        engine.step(int(rng.integers(1, 6)))
        if engine.coordinator is not None:
            assert_residency_sound(engine)
    engine.run_until_idle()
    return handles
