"""Admission of prefills in two ledgers.

SGLang's `PrefillBudget` counts tokens of one pool. Here that ledger is the logical one (prompt and expected output, freed by
evicting the tree), and a second one counts device pages, in the two forms that a running request can take:

    being prefilled   every page of its prompt is resident, plus one to grow into
    decoding          at least min(all its pages, hot lease + tail + one to grow into); the rest can be spilled

A request is admitted while the sum over all requests, with itself as being prefilled, fits the device. Spilling can always
reach that sum, so nothing admitted here can fail to get its pages (I7), and one request alone always fits (I8).
All methods are pure: the pass may be dropped (R17). Last of all the admission gate is asked (admission.py), which only counts
its refusals.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from sglang_hisparse.admission import AdmissionPass
from sglang_hisparse.capacity import prefill_pages


class HiSparsePrefillBudget(PrefillBudget):
    """One admission pass; SGLang makes one for each."""

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.free_device_pages = allocator.device_pages.num_pages - allocator.runtime.committed_device_pages()
        self._smallest_pages = allocator.residency.limits.smallest_pages
        self.closed = False
        self._candidate_pages = 0
        self._gate = AdmissionPass(allocator.runtime.gate, tree_cache, self.page_size)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _fits_device(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        self._candidate_pages = prefill_pages(
            self._pages(prompt_tokens), self._pages(prompt_tokens + max_new_tokens), self._smallest_pages
        )
        return self._candidate_pages <= self.free_device_pages

    def has_capacity(self) -> bool:
        return not self.closed and super().has_capacity()

    def check_prefill(self, *, input_tokens: int, max_new_tokens: int, **kwargs: Any) -> tuple[bool, int | None]:
        if self.closed or not self._fits_device(input_tokens, max_new_tokens) or self.allocator.runtime.refuses():
            return False, None
        fits, chunk_limit = super().check_prefill(input_tokens=input_tokens, max_new_tokens=max_new_tokens, **kwargs)
        return (fits, chunk_limit) if fits and self._gate.allows(kwargs["extend_input_len"]) else (False, None)

    def can_allocate_prefill(self, *, extend_input_len: int, max_new_tokens: int, **kwargs: Any) -> bool:
        return (
            not self.closed
            and self._fits_device(extend_input_len, max_new_tokens)
            and super().can_allocate_prefill(extend_input_len=extend_input_len, max_new_tokens=max_new_tokens, **kwargs)
            and self._gate.allows(extend_input_len)
        )

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens of the next chunk of a request already admitted, whole pages; None parks it and closes the pass (R18).

        Its device pages are committed since its admission. Its logical pages are too, unless decoding requests have grown
        beyond their estimate: then it waits for them, and never alone, since one request always fits.
        """
        pages = min(int(self.remaining_total), chunk_limit) // self.page_size
        if pages <= 0:
            pages = min(self._available_and_evictable() - self.page_size, chunk_limit) // self.page_size
        if pages > 0:
            return pages * self.page_size
        self.closed = True
        return None

    def reserve(self, extend_input_len: int, max_new_tokens: int, *, is_chunked_continuation: bool = False, **kwargs: Any) -> None:
        super().reserve(extend_input_len, max_new_tokens, is_chunked_continuation=is_chunked_continuation, **kwargs)
        if not is_chunked_continuation:
            self.free_device_pages -= self._candidate_pages
            self._gate.reserve()
