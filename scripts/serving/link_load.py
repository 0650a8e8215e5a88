"""Copies pinned host memory to the GPU without a pause, so that a server on that GPU has a slow link.

bench_serving.py starts it as a process of its own (`link_load`); run by itself it copies until SIGTERM, then prints one JSON
object: seconds, gb_s (10^9 bytes a second that it has taken). It never reads what it has copied.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

COPY_BYTES = 64 << 20
ROUND_COPIES = 16  # copies that are under way at once, about 20 ms of them


@contextmanager
def link_load(processes: int) -> Iterator[list[float]]:
    """So many processes copy during the block; the list then holds the gb_s of each. Raises ValueError when one did not copy."""
    taken: list[float] = []
    running = [
        subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    try:
        for process in running:
            if process.stdout is None or process.stdout.readline() != "copying\n":
                raise ValueError("a process that loads the link did not begin to copy")
        yield taken
    finally:
        for process in running:
            process.terminate()
        said = [process.communicate(timeout=60)[0] for process in running]
    if any(process.returncode for process in running):
        raise ValueError(f"a process that loads the link ended with {[process.returncode for process in running]}")
    taken.extend(json.loads(text)["gb_s"] for text in said)


def main() -> int:
    """Exit status 0."""
    import torch

    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    print("copying", flush=True)
    start, copies = time.monotonic(), 0
    while not ended:
        for _ in range(ROUND_COPIES):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        copies += ROUND_COPIES
    seconds = time.monotonic() - start
    print(json.dumps({"seconds": round(seconds, 1), "gb_s": round(copies * COPY_BYTES / seconds / 1e9, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
