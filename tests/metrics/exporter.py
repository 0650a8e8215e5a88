"""A served scheduler on the CPU whose metrics can be scraped: a process of its own, started by `test_prometheus`.

Sets up what a server sets up for --enable-metrics (SGLang's multiprocess folder, SGLang's /metrics application on a
loopback port), then runs waves of requests that do not fit the device until its standard input ends. Prints the port on the
first line of its standard output, "wave" after each wave; logs go to standard error as in a server.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from sglang.srt.utils import add_prometheus_middleware, set_prometheus_multiproc_dir

PROMPTS = (420, 450, 500, 470, 440, 490)


def serve_metrics() -> int:
    """SGLang's /metrics on a free loopback port, in a thread; returns the port."""
    app = FastAPI()
    add_prometheus_middleware(app)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        threading.Event().wait(0.05)
    return server.servers[0].sockets[0].getsockname()[1]


def run_wave(engine: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for length in PROMPTS:
        engine.submit(rng.integers(10, 1000, length).tolist(), 150)
    engine.run_until_idle()
    engine.flush()


def main() -> None:
    set_prometheus_multiproc_dir()
    port = serve_metrics()
    os.environ["SGLANG_HISPARSE_AUDIT"] = "1"
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    from harness.engine import make_scheduler

    with make_scheduler(
        {"top_k": 128, "device_buffer_size": 256, "host_to_device_ratio": 4},
        device_tokens=32 * 64,
        index_topk_freq=3,  # groups of three layers and of one
        overlap=True,
        enable_metrics=True,
        decode_log_interval=20,
        served_model_name="fake-dsa",
    ) as engine:
        logging.getLogger("sglang_hisparse").setLevel(logging.INFO)
        logging.getLogger("sglang").setLevel(logging.INFO)
        print(port, flush=True)
        seed = 0
        while not ended.is_set():
            run_wave(engine, seed)
            seed += 1
            print("wave", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    main()
