"""The protocol with the real ledger, without SGLang. Shared by memory/test_ledger.py and memory/test_shared_ledger.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from budget_calls import Cached, checked
from runtime_world import PAGE

from sglang_hisparse.capacity import PrefillRule
from sglang_hisparse.memory.budget import HiSparsePrefillBudget
from sglang_hisparse.memory.extends import Extends
from sglang_hisparse.residency import (
    DevicePages,
    ResidencyCoordinator,
    ResidencyLimits,
    ResidencyMode,
    ResidencyPolicy,
    SpillPolicy,
)
from sglang_hisparse.residency.invariants import check


class Device:
    """The protocol with the real ledger, without SGLang: requests with nested shared prefixes on a few device pages.

    chunk_pages: prefills longer than the device are streamed in chunks of that many pages; 0: none is.
    """

    def __init__(
        self,
        device_pages: int,
        hot_pages: int,
        mode: ResidencyMode = ResidencyMode.HYBRID,
        chunk_pages: int = 0,
        windows: bool = False,
    ) -> None:
        limits = ResidencyLimits(4000, device_pages, 40, 200, hot_pages)
        policy, pages = ResidencyPolicy(mode=mode), DevicePages(device_pages)
        self.residency = ResidencyCoordinator(limits, policy, pages, lambda batch: [t.transfer_id for t in batch])
        self.policy = SpillPolicy(self.residency)
        self.limits = limits
        rule = PrefillRule(
            num_device_pages=device_pages,
            hot_pages=hot_pages,
            smallest_pages=limits.smallest_pages,
            scratch_pages=150 if chunk_pages else 0,
            chunk_pages=chunk_pages,
            short_extend_tokens=3 * PAGE,
            has_windows=windows,
        )
        self.extends = Extends(self.residency, self.policy.make_room, rule, object() if chunk_pages else None)
        self.lengths: dict[int, int] = {}
        self.finals: dict[int, int] = {}

    def budget(self) -> HiSparsePrefillBudget:
        allocator = SimpleNamespace(
            page_size=PAGE,
            device_pages=self.residency.device_pages,
            residency=self.residency,
            available_size=lambda: 1 << 30,
            runtime=SimpleNamespace(
                defers_to_border=lambda num_pages: False,
                committed_device_pages=self.residency.book.committed_pages,
                refuses=lambda: False,
                gate=None,
                extends=self.extends,
            ),
        )
        tree: Any = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0, prefix_pages=list)
        return HiSparsePrefillBudget(allocator, tree)

    def start(self, prefix: list[int], own: int, grows: int) -> list[int] | None:
        """Admit, hold, make room, promote, allocate, prefill. None: the budget refused."""
        prompt, final = len(prefix) + own, len(prefix) + own + grows
        budget = self.budget()
        budget.consider(Cached(prefix))
        if not checked(budget, prompt * PAGE, new=grows * PAGE, extend=own * PAGE):
            return None
        residency, book, slot = self.residency, self.residency.book, len(self.lengths) + 1
        free = residency.device_pages.num_usable - book.committed_pages()
        if (prefill := self.extends.decide(prefix, prompt * PAGE, final * PAGE, free)).is_streamed:
            return self._stream(slot, prefix, own, grows, prefill.chunk_pages)
        book.hold(prefix, +1)
        on_host = [page for page in prefix if book.is_host_only(page)]
        assert self.policy.make_room(len(on_host) + own), "an admitted prefill found no device pages"
        assert not on_host or residency.promote(on_host)
        residency.attach(slot, prefix, prompt_pages=prompt, final_pages=final)
        book.hold(prefix, -1)
        assert residency.append(slot, book.allocate(own))
        self.lengths[slot], self.finals[slot] = prompt, final
        self._launch([slot])
        return book.pages(slot).tolist()

    def _stream(self, slot: int, prefix: list[int], own: int, grows: int, chunk_pages: int) -> list[int]:
        """Prefill chunk by chunk; the others decode in between."""
        residency, book, hot = self.residency, self.residency.book, self.limits.hot_pages
        final = len(prefix) + own + grows
        for done in range(0, own, chunk_pages):
            count = min(chunk_pages, own - done)
            needed = count + (hot if done == 0 else 0)
            assert self.policy.make_room(needed), "a chunk of an admitted prefill found no device pages"
            if done == 0:
                residency.attach(slot, prefix, prompt_pages=hot + chunk_pages, final_pages=final, streamed=True)
            assert residency.append(slot, book.allocate(count))
            length = len(prefix) + done + count
            self.policy.tick()
            residency.take_plan()
            residency.check_step([slot])
            residency.plan_stream([slot])
            residency.note_launch([slot], [length * PAGE], [done + count == own])
            check(residency)
            self.grow()
        self.lengths[slot], self.finals[slot] = len(prefix) + own, final
        return book.pages(slot).tolist()

    def grow(self) -> None:
        """Every request that has not reached its end takes one page more, all in one step."""
        slots = [slot for slot, length in self.lengths.items() if length < self.finals[slot]]
        assert self.policy.make_room(len(slots)), "a decode step within the ledger found no device pages"
        for slot in slots:
            assert self.residency.append(slot, self.residency.book.allocate(1))
            self.lengths[slot] += 1
        self._launch(slots)

    def _launch(self, slots: list[int]) -> None:
        self.policy.tick()
        self.residency.take_plan()
        self.residency.check_step(slots)
        self.residency.note_launch(slots, [self.lengths[slot] * PAGE for slot in slots], [True] * len(slots))
        check(self.residency)
