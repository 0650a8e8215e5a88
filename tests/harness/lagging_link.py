"""A copy stream that lags: host copies run late, as late as the protocol allows.

On a CPU pool the transfer worker copies at once, which hides every missing wait. Here a copy enqueued by `mirror` stays
undone until somebody is entitled to see it done: a plan that waits for its transfer, a `drain`, or the link itself,
which works off a random number of batches, in order, whenever the worker polls. That is the freedom that a copy stream
has on a GPU, where a copy runs anywhere between its enqueueing and the first wait for its event.

Installed by `engine` on one runtime; it replaces methods of its transfer worker.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _LateBatch:
    """Stands in for the host-write event of a batch: complete once its copies have run."""

    transfers: list[Any]
    done: bool = False

    def query(self) -> bool:
        return self.done


class LaggingLink:
    """Takes over the host copies of a HiSparseRuntime. max_batches: how many batches one poll works off at most."""

    def __init__(self, runtime: Any, *, seed: int, max_batches: int = 2) -> None:
        from sglang_hisparse.kernels.page_copy import Direction

        worker = self._worker = runtime.worker
        self._random = random.Random(seed)
        self._max_batches = max_batches
        self._pending: deque[_LateBatch] = deque()
        self._to_host = Direction.TO_HOST
        self._poll, self._apply, self._drain = worker.poll, worker.apply, worker.drain
        worker.launch, worker.poll, worker.apply, worker.drain = self.launch, self.poll, self.apply, self.drain
        self.num_waited = 0  # batches that ran only because a forward had to wait for them
        self.num_unasked = 0  # batches that ran because the link got around to them

    def launch(self, transfers: Sequence[Any]) -> list[int]:
        """Enqueue: nothing is copied yet."""
        ids = [transfer.transfer_id for transfer in transfers]
        late = _LateBatch(list(transfers))
        self._pending.append(late)
        self._worker.note_enqueued(ids, late)
        return ids

    def poll(self) -> list[int]:
        """The link makes some progress of its own, then the worker looks."""
        self.num_unasked += self._run(self._random.randint(-self._max_batches, self._max_batches))
        return self._poll()

    def apply(self, plan: Any) -> None:
        """What the plan waits for is done first, and everything enqueued before it; no more than that."""
        if plan.wait_transfer_id:
            while self._pending and self._pending[0].transfers[0].transfer_id <= plan.wait_transfer_id:
                self.num_waited += self._run(1)
        self._apply(plan)

    def drain(self) -> None:
        self._run(len(self._pending))
        self._drain()

    def _run(self, count: int) -> int:
        count = max(0, min(count, len(self._pending)))
        for _ in range(count):
            late = self._pending.popleft()
            self._worker._copy(
                self._to_host,
                [transfer.logical_page for transfer in late.transfers],
                [transfer.device_page for transfer in late.transfers],
            )
            late.done = True
        return count
