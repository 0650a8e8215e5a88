"""Admission of prefills in two ledgers.

SGLang's `PrefillBudget` counts tokens of one pool. Here that ledger is the logical one (prompt and expected output, freed by
evicting the tree), and a second one counts device pages, in the two forms that a running request can take:

    being prefilled   every page of its prompt is resident, plus one to grow into; where its prefill is streamed, a hot lease,
                      its longest chunk, and one to grow into (which of the two: capacity.PrefillRule)
    decoding          at least min(all its pages, hot lease + tail + one to grow into); the rest can be spilled

Or it is *kept*: all its pages stay resident to its end, and pages that several kept requests share are charged once
(residency/sharing.py). A request is charged as a kept one while that is free, else as the other; where neither is, the cheapest
choice of who is kept, among all live requests and those of this pass, has the last word.

A request is admitted while the sum over all requests, with itself as being prefilled, fits the device. Spilling can always
reach that sum, so nothing admitted here can fail to get its pages (I7), and one request alone always fits (I8). A batch with a
streamed prefill has room for all its pages in the scratch, unless attention reads it in windows.
The pass may be dropped (R17): nothing outside it changes but what allocation is told a candidate was charged, which the next pass
forgets. Last of all the admission gate is asked (admission.py), which only counts its refusals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hisparse.admission import AdmissionPass
from sglang_hisparse.capacity import Prefill, prefill_pages
from sglang_hisparse.memory.extends import is_bounded
from sglang_hisparse.residency.sharing import Candidate


class HiSparsePrefillBudget(PrefillBudget):
    """One admission pass; SGLang makes one for each."""

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self._device_pages = allocator.device_pages.num_usable
        self.free_device_pages = self._device_pages - allocator.runtime.committed_device_pages()
        self._extends = allocator.runtime.extends
        self._sharing = self._extends.begin_pass()
        self.closed = False
        self._req: Any = None  # the candidate, where SGLang has named it
        self._candidate_req: Any = None  # the same, until it is reserved
        self._candidate = Prefill(0)
        self._shared = Candidate(np.zeros(0, dtype=np.int64), 0, 0, is_free=False)  # the same, where shared pages count once
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
        if not self._charge(req, cached, prompt_tokens, prompt_tokens + max_new_tokens):
            return False
        limits = (extend_tokens, chunk_limit, self._candidate.chunk_pages * self.page_size or None)
        self._candidate_pages = cached + self._pages(min(limit for limit in limits if limit is not None))
        if not (self._batch_streams or self._candidate.is_streamed):
            return True
        if self._extends.rule.shares_batch(self._batch_pages + self._candidate_pages):
            return True
        self._extends.note_refusal()
        return False

    def _charge(self, req: Any, cached: int, prompt_tokens: int, total_tokens: int) -> bool:
        """Find the candidate's form and charge; whether its device pages are free. cached: pages of its prefix."""
        extends, sharing = self._extends, self._sharing
        may_be_kept = req is not None and sharing.can_keep and is_bounded(req)
        prompt, total = self._pages(prompt_tokens), self._pages(total_tokens)
        need, smallest = max(prompt + 1, total), extends.rule.smallest_pages
        # Looking at a long prefix costs; with hundreds waiting most of them cannot fit, whatever they share.
        least = min(need - cached, smallest) if may_be_kept else min(need, smallest)
        if least > self.free_device_pages and not sharing.could_fit(least, self._device_pages):
            return False
        is_known = cached and req is not None and (may_be_kept or extends.stream is not None)
        prefix = np.asarray(self.tree_cache.prefix_pages(req) if is_known else (), dtype=np.int64)
        kept, free = sharing.price(prefix, need) if may_be_kept else None, self.free_device_pages
        found = {"num_prefix_pages": cached, "kept_pages": kept}
        self._candidate = prefill = extends.decide(prefix, prompt_tokens, total_tokens, free, **found)
        resident = prefill_pages(prompt, total, smallest)
        whole = Candidate(prefix, need, resident, is_free=may_be_kept, kept=prefill.kept)
        streamed = Candidate(prefix, need, prefill.pages, is_free=False)
        self._shared = streamed if prefill.is_streamed else whole
        if prefill.pages <= free:
            return True
        if resident <= extends.rule.num_device_pages and self._refit(whole, Prefill(resident)):
            return True
        return prefill.is_streamed and self._refit(streamed, prefill)

    def _refit(self, candidate: Candidate, prefill: Prefill) -> bool:
        """Whether the candidate fits, charged as `prefill` where it is not kept, when others are kept than now. It costs a look at
        all requests, so it comes last."""
        if not self._sharing.make_fit(candidate, self._device_pages):
            return False
        self.free_device_pages = self._device_pages - self._sharing.charged_pages()
        if candidate.kept:
            prefill = Prefill(self._sharing.price(candidate.prefix, candidate.need), kept=True)
        self._candidate, self._shared = prefill, candidate
        return True

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
                self._extends.promise(self._candidate_req, self._candidate, self._shared)
            self._sharing.take(self._shared)
            self._batch_pages += self._candidate_pages
            self._batch_streams |= self._candidate.is_streamed
            self._gate.reserve()
