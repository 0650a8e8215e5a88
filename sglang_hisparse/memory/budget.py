"""Admission of prefills in two ledgers.

SGLang's `PrefillBudget` counts tokens of one pool. Here that ledger is the logical one (prompt and expected output, freed by
evicting the tree), and a second one counts device pages, in the two forms that a running request can take:

    being prefilled   every page of its prompt is resident, plus one to grow into; where its prefill is streamed, a hot lease,
                      its longest chunk, and one to grow into (which of the two: capacity.PrefillRule)
    decoding          at least min(all its pages, hot lease + tail + one to grow into); the rest can be spilled

A request is admitted while the sum over all requests, with itself as being prefilled, fits the device. Spilling can always
reach that sum, so nothing admitted here can fail to get its pages (I7), and one request alone always fits (I8). A batch with a
streamed prefill has room for all its pages in the scratch, unless attention reads it in windows.
The pass may be dropped (R17): nothing outside it changes but what allocation is told a candidate was charged, which the next pass
forgets. Last of all the admission gate is asked (admission.py), which only counts its refusals.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hisparse.admission import AdmissionPass
from sglang_hisparse.capacity import Prefill


class HiSparsePrefillBudget(PrefillBudget):
    """One admission pass; SGLang makes one for each."""

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.free_device_pages = allocator.device_pages.num_usable - allocator.runtime.committed_device_pages()
        self._extends = allocator.runtime.extends
        self._extends.begin_pass()
        self.closed = False
        self._req: Any = None  # the candidate, where SGLang has named it
        self._candidate_req: Any = None  # the same, until it is reserved
        self._candidate = Prefill(0)
        self._candidate_pages = 0  # of its sequence, up to the end of its next chunk
        self._batch_pages = 0  # the same of all that this pass has taken
        self._batch_streams = False
        self._gate = AdmissionPass(allocator.runtime.gate, tree_cache, self.page_size)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def consider(self, req: Any) -> None:
        """SGLang asks about `req` next."""
        self._req = req

    def _fits(self, prompt_tokens: int, max_new_tokens: int, extend_tokens: int, chunk_limit: int | None) -> bool:
        """Whether the candidate's device pages are free in the ledger, and the scratch holds what its batch then reads."""
        cached, req = (prompt_tokens - extend_tokens) // self.page_size, self._req
        self._req, self._candidate_req = None, req
        is_known = cached and req is not None and self._extends.stream is not None
        pages = self.tree_cache.prefix_pages(req) if is_known else range(0)
        total = prompt_tokens + max_new_tokens
        self._candidate = self._extends.decide(pages, prompt_tokens, total, self.free_device_pages, num_prefix_pages=cached)
        if self._candidate.pages > self.free_device_pages:
            return False
        limits = (extend_tokens, chunk_limit, self._candidate.chunk_pages * self.page_size or None)
        self._candidate_pages = cached + self._pages(min(limit for limit in limits if limit is not None))
        if not (self._batch_streams or self._candidate.is_streamed):
            return True
        if self._extends.rule.shares_batch(self._batch_pages + self._candidate_pages):
            return True
        self._extends.note_refusal()
        return False

    def has_capacity(self) -> bool:
        return not self.closed and super().has_capacity()

    def check_prefill(self, *, input_tokens: int, max_new_tokens: int, **kwargs: Any) -> tuple[bool, int | None]:
        extend_tokens, chunk_limit = kwargs["extend_input_len"], kwargs["chunk_limit"]
        fits = not self.closed and self._fits(input_tokens, max_new_tokens, extend_tokens, chunk_limit)
        if not fits or self.allocator.runtime.refuses():
            return False, None
        if self.allocator.runtime.defers_to_border(self._pages(kwargs["total_tokens"] + self.total_offset)):
            return False, None
        fits, chunk_limit = super().check_prefill(input_tokens=input_tokens, max_new_tokens=max_new_tokens, **kwargs)
        if not fits or not self._gate.allows(extend_tokens):
            return False, None
        if self._candidate.is_streamed and chunk_limit is not None:
            chunk_limit = min(chunk_limit, self._candidate.chunk_pages * self.page_size)
        return True, chunk_limit

    def can_allocate_prefill(self, *, extend_input_len: int, max_new_tokens: int, **kwargs: Any) -> bool:
        return (
            not self.closed
            and self._fits(extend_input_len, max_new_tokens, extend_input_len, kwargs["chunk_limit"])
            and super().can_allocate_prefill(extend_input_len=extend_input_len, max_new_tokens=max_new_tokens, **kwargs)
            and self._gate.allows(extend_input_len)
        )

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens of the next chunk of a request already admitted, whole pages; None parks it and closes the pass (R18).

        Its device pages are committed since its admission. Its logical pages are too, unless decoding requests have grown
        beyond their estimate: then it waits for them, and never alone, since one request always fits.
        """
        so_far, streamed_pages = self._extends.continued_chunk() or (0, 0)
        if streamed_pages:
            chunk_limit = min(chunk_limit, streamed_pages * self.page_size)
        pages = min(int(self.remaining_total), chunk_limit) // self.page_size
        if pages <= 0:
            pages = min(self._available_and_evictable() - self.page_size, chunk_limit) // self.page_size
        if pages > 0:
            self._batch_streams |= streamed_pages > 0
            self._batch_pages += so_far + pages
            return pages * self.page_size
        self.closed = True
        return None

    def reserve(self, extend_input_len: int, max_new_tokens: int, *, is_chunked_continuation: bool = False, **kwargs: Any) -> None:
        super().reserve(extend_input_len, max_new_tokens, is_chunked_continuation=is_chunked_continuation, **kwargs)
        if not is_chunked_continuation:
            self.free_device_pages -= self._candidate.pages
            if self._candidate_req is not None:
                self._extends.promise(self._candidate_req, self._candidate)
            self._batch_pages += self._candidate_pages
            self._batch_streams |= self._candidate.is_streamed
            self._gate.reserve()
