"""Decode batches between allocation and forward, and which of their steps change no page.

Owned by the runtime, which calls it around SGLang's `alloc_for_decode`. A batch that goes on with the same requests begins or
fills a page in few of its steps; of the others only the number is known beforehand, and nothing is looked up for them. It
decides nothing: a step that it calls quiet would take the same ids and seal no page if it were looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_hisparse.memory.extends import Launch


class DecodeSteps:
    """`slots`: request slots int64 [n] of the decode batch. `is_quiet`: no request of the step that was begun last begins or
    fills a page, and the requests are those of the step before."""

    def __init__(self, page_size: int, num_slots: int) -> None:
        self.slots = np.zeros(0, dtype=np.int64)
        self.is_quiet = False
        self._page_size = page_size
        self._all_end = np.ones(num_slots, dtype=bool)
        self._rows: Any = None  # SGLang's tensor of `slots`: it makes a new one whenever the batch changes
        self._allocated = -1  # tokens of the first request after the last step
        self._num_quiet = 0  # steps to come in which no request begins or fills a page
        self._quiet_launch: Launch  # of such a step

    def begin(self, batch: Any) -> None:
        """SGLang allocates the next token of each request of `batch`."""
        rows = batch.req_pool_indices_cpu
        # Held, so that no other tensor can be taken for it; the length says that no step has gone by unseen.
        self.is_quiet = self._num_quiet > 0 and rows is self._rows and batch.reqs[0].kv.kv_allocated_len == self._allocated
        if not self.is_quiet:
            self._num_quiet = 0
        if rows is not self._rows:
            self._rows, self.slots = rows, rows.numpy()
            self._quiet_launch = Launch(self.slots, (), (), is_extend=False, changes_pages=False)

    def end(self, batch: Any) -> Launch:
        """It has; the batch's lengths do not count the new tokens yet."""
        if self.is_quiet:
            self._num_quiet -= 1
            self._allocated += 1
            return self._quiet_launch
        lengths = batch.seq_lens_cpu.numpy()
        if len(lengths):
            # A request fills a page when it ends on one's last row, and begins one in the step after.
            self._num_quiet = self._page_size - 2 - int((lengths % self._page_size).max())
            self._allocated = batch.reqs[0].kv.kv_allocated_len
        return Launch(self.slots, lengths + 1, self._all_end[: len(lengths)], is_extend=False)
