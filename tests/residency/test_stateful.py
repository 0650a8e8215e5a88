"""Goal: no short sequence of legal calls breaks a promise of the page pool or of the coordinator with its policy.

Method: Hypothesis state machines against models of sets and dicts; failures shrink to a few calls. Acknowledgements
come late, in any order, twice or never; slots and page ids are reused at once. Long runs with streams and content are
the simulator's part (tests/sim).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import (
    DevicePages,
    Mirroring,
    Owner,
    PageState,
    ResidencyMode,
    ResidencyPolicy,
    SpillPolicy,
)
from sglang_hisparse.residency.invariants import check

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
OPEN, DIRTY, MIRRORING, CLEAN, HOST = (
    PageState.OPEN,
    PageState.DIRTY,
    PageState.MIRRORING,
    PageState.CLEAN,
    PageState.HOST,
)
SEALED = (DIRTY, MIRRORING, CLEAN, HOST)


class DevicePagesMachine(RuleBasedStateMachine):
    """The pool against a dict: page -> (owner, id)."""

    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.pages = DevicePages(size)
        self.owned: dict[int, tuple[Owner, int]] = {}

    @rule(count=st.integers(0, 9), owner=st.sampled_from([Owner.RESIDENT, Owner.HOT]), owner_id=st.integers(0, 3))
    def lease(self, count: int, owner: Owner, owner_id: int) -> None:
        free = self.pages.num_pages - len(self.owned)
        taken = self.pages.lease(count, owner, owner_id)
        assert (taken is None) == (count > free)
        assert not set(taken or ()) & set(self.owned) and 0 not in (taken or ())
        self.owned.update({page: (owner, owner_id) for page in taken or ()})

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.owned)))
        self.pages.release([page], *self.owned.pop(page))

    @rule(page=st.integers(1, 8), owner=st.sampled_from(list(Owner)), owner_id=st.integers(0, 3))
    def release_what_is_not_mine(self, page: int, owner: Owner, owner_id: int) -> None:
        if page > self.pages.num_pages or self.owned.get(page) == (owner, owner_id) or owner == Owner.FREE:
            return
        with pytest.raises(InvariantError, match="I2"):
            self.pages.release([page], owner, owner_id)

    @rule(page=st.integers(1, 8), owner_id=st.integers(0, 3))
    def transfer(self, page: int, owner_id: int) -> None:
        if page > self.pages.num_pages:
            return
        if self.owned.get(page, (Owner.FREE, 0))[0] == Owner.RESIDENT:
            self.pages.transfer(page, owner_id)
            self.owned[page] = (Owner.RESIDENT, owner_id)
        else:
            with pytest.raises(InvariantError, match="I2"):
                self.pages.transfer(page, owner_id)

    @rule()
    def clear(self) -> None:
        self.pages.clear()
        self.owned.clear()

    @invariant()
    def equals_the_model(self) -> None:
        for owner in (Owner.RESIDENT, Owner.HOT):
            assert self.pages.count(owner) == sum(kind == owner for kind, _ in self.owned.values())
        assert self.pages.num_free == self.pages.count(Owner.FREE) == self.pages.num_pages - len(self.owned)


@dataclass(slots=True)
class SlotModel:
    """One request: its pages, how many rows launched forwards have written, whether its prefill has ended."""

    row: list[int]
    num_shared: int
    num_rows: int = 0
    prefilling: bool = True


@dataclass(slots=True)
class CopyModel:
    """One transfer: its page and that page's generation when it was planned."""

    page: int
    generation: int
    acknowledged: set[str] = field(default_factory=set)


class CoordinatorMachine(RuleBasedStateMachine):
    """The coordinator and its policy against dicts: state, users and copies of every page."""

    @initialize(
        mode=st.sampled_from(list(ResidencyMode)), mirroring=st.sampled_from(list(Mirroring)),
        promote=st.integers(0, 2), low=st.sampled_from([0.0, 0.3]), tail=st.integers(1, 2), auto_ack=st.booleans(),
    )  # fmt: skip
    def start(
        self, mode: ResidencyMode, mirroring: Mirroring, promote: int, low: float, tail: int, auto_ack: bool
    ) -> None:
        policy = ResidencyPolicy(
            mode, mirroring, low, low + 0.1, mirror_pages_per_step=2, promote_pages_per_step=promote
        )
        self.stage = Stage(
            device=9, logical=12, slots=4, hot=2, page_size=2, tail=tail, auto_ack=auto_ack, policy=policy
        )
        self.coordinator = self.stage.coordinator
        self.slots: dict[int, SlotModel] = {}
        self.tree: list[int] = []  # pages of one cached prefix chain
        self.state: dict[int, PageState] = {}
        self.copies: dict[int, CopyModel] = {}
        self.generation = dict.fromkeys(range(13), 0)
        self.num_sent = 0
        self.table = self.stage.book.device_page.copy()  # as it was before the policy acted
        self.wait_wanted = 0  # the next plan must wait for this copy, or a later one
        self.resets_wanted: set[int] = set()  # slots whose hot rows the next plan must forget

    # -- the model's side -------------------------------------------------------------------------------------------

    def users(self, page: int) -> list[int]:
        return [slot for slot, model in self.slots.items() if page in model.row]

    def held(self, page: int) -> bool:
        tail = self.stage.limits.tail_pages
        return any(m.prefilling or page in m.row[-tail:] for m in self.slots.values() if page in m.row)

    def live_copy(self, page: int) -> tuple[int, CopyModel]:
        """The last transfer of the page's present owner; id 0 where there is none."""
        live = [
            item for item in self.copies.items() if item[1].page == page and item[1].generation == self.generation[page]
        ]
        return live[-1] if live else (0, CopyModel(page, 0))

    def observe(self) -> None:
        """After the policy has acted: every move must have been allowed; then the model follows."""
        for transfer in self.stage.sent[self.num_sent :]:
            page = transfer.logical_page
            assert self.state[page] == DIRTY and transfer.device_page == self.table[page]
            self.state[page] = MIRRORING
            acknowledged = {"enqueued"} if self.stage.auto_ack else set()
            self.copies[transfer.transfer_id] = CopyModel(page, self.generation[page], acknowledged)
        self.num_sent = len(self.stage.sent)
        for page, before in self.state.items():
            now = PageState(int(self.stage.book.state[page]))
            if now == before:
                continue
            if now == HOST:
                transfer_id, copy = self.live_copy(page)
                assert "enqueued" in copy.acknowledged, (page, before)
                if "completed" not in copy.acknowledged:
                    self.wait_wanted = max(self.wait_wanted, transfer_id)
                assert not self.held(page) and all(slot in self.coordinator.hot_lease for slot in self.users(page))
            else:
                assert before == HOST and now in (MIRRORING, CLEAN), (page, before, now)
            self.state[page] = now
        self.table = self.stage.book.device_page.copy()

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            del self.state[page]
            self.generation[page] += 1

    # -- requests ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.slots) < 3)
    @rule(shared=st.integers(0, 4), count=st.integers(1, 4))
    def admit(self, shared: int, count: int) -> None:
        slot = next(slot for slot in (1, 2, 3) if slot not in self.slots)  # the lowest: reuse at once
        prefix, book = self.tree[:shared], self.stage.book
        if book.num_free < count:
            return
        book.hold(prefix, +1)
        on_host = [page for page in prefix if self.state[page] == HOST]
        if self.stage.policy.make_room(count + len(on_host)):
            assert self.coordinator.promote(on_host)
            self.observe()
            self.coordinator.attach(slot, prefix, final_pages=8)
            self.slots[slot] = SlotModel([*prefix], len(prefix), num_rows=2 * len(prefix))
            self.extend_row(slot, count)
        book.hold(prefix, -1)
        self.observe()

    def extend_row(self, slot: int, count: int) -> None:
        pages = self.stage.grow(slot, count)
        self.slots[slot].row += pages
        self.state.update(dict.fromkeys(pages, OPEN))
        self.table = self.stage.book.device_page.copy()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), rows=st.integers(1, 5), ends=st.booleans())
    def launch(self, data: st.DataObject, rows: int, ends: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        model = self.slots[slot]
        if not model.prefilling:
            rows = 1
        need = -(-(model.num_rows + rows) // 2) - len(model.row)
        if len(model.row) + need > 8:
            return
        if need > 0:
            if self.stage.book.num_free < need or not self.stage.policy.make_room(need):
                self.observe()
                return
            self.observe()
            self.extend_row(slot, need)
        self.stage.policy.tick()
        self.observe()
        plan = self.coordinator.take_plan()
        assert dict(plan.table).keys() >= {promotion.logical_page for promotion in plan.promotions}
        assert plan.wait_transfer_id >= self.wait_wanted
        assert {change.slot for change in plan.leases} >= self.resets_wanted
        self.wait_wanted, self.resets_wanted = 0, set()
        self.coordinator.check_step(sorted(self.slots))
        model.num_rows += rows
        self.coordinator.note_launch([slot], [model.num_rows], [ends])
        for page in model.row[: model.num_rows // 2]:
            if self.state[page] == OPEN:
                self.state[page] = DIRTY
        model.prefilling = model.prefilling and not ends

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), insert=st.booleans(), twice=st.booleans())
    def end(self, data: st.DataObject, insert: bool, twice: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        model = self.slots.pop(slot)
        keep = model.num_shared
        # The tree's chain grows by what follows it; a request that left the chain early gives its pages back.
        if insert and model.row[:keep] == self.tree:
            sealed = model.num_rows // 2
            self.tree += model.row[keep:sealed]
            keep = max(keep, sealed)
        freed = self.coordinator.unmap(slot, keep, len(model.row))
        assert freed == model.row[keep:]
        self.coordinator.free(freed)
        self.forget(freed)
        for _ in range(1 + twice):
            self.coordinator.release(slot)

    @precondition(lambda self: self.tree)
    @rule(data=st.data())
    def dedup(self, data: st.DataObject) -> None:
        """A request's own sealed pages turn out to equal the chain's: it takes the chain's."""
        slots = [s for s, m in self.slots.items() if m.row[: m.num_shared] == self.tree[: m.num_shared]]
        if not slots:
            return
        slot = data.draw(st.sampled_from(sorted(slots)))
        model = self.slots[slot]
        count = min(len(self.tree), model.num_rows // 2)
        old, new = model.row[:count], self.tree[:count]
        replaced = [mine for mine, theirs in zip(old, new, strict=True) if mine != theirs]
        assert self.coordinator.replace(slot, 0, new) == replaced
        for mine, theirs in zip(old, new, strict=True):
            if mine != theirs and self.state[theirs] == HOST and self.state[mine] != HOST:
                self.state[theirs] = PageState(int(self.stage.book.state[theirs]))
                assert self.state[theirs] in (MIRRORING, CLEAN)
        if replaced and slot in self.coordinator.hot_lease:
            self.resets_wanted.add(slot)
        self.table = self.stage.book.device_page.copy()
        self.coordinator.free(replaced)
        self.forget(replaced)
        model.row[:count] = new
        model.num_shared = max(model.num_shared, count)

    @precondition(lambda self: self.tree)
    @rule()
    def evict_leaf(self) -> None:
        if not self.users(self.tree[-1]):
            page = self.tree.pop()
            self.coordinator.free([page])
            self.forget([page])

    @rule()
    def flush(self) -> None:
        self.coordinator.clear()
        self.slots.clear()
        self.tree.clear()
        self.forget(list(self.state))
        for copy in self.copies.values():
            copy.acknowledged.add("flushed")
        self.wait_wanted, self.resets_wanted = 0, set()
        assert self.coordinator.take_plan().is_empty

    # -- pressure and acknowledgements ------------------------------------------------------------------------------

    @rule(count=st.integers(1, 9))
    def make_room(self, count: int) -> None:
        done = self.stage.policy.make_room(count)
        assert done == (self.stage.pages.num_free >= count)
        self.observe()

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), kind=st.sampled_from(["enqueued", "completed", "failed"]))
    def acknowledge(self, data: st.DataObject, kind: str) -> None:
        """Any transfer ever planned, in any order, again and again; only an unacknowledged one can fail."""
        transfer_id = data.draw(st.sampled_from(sorted(self.copies)))
        copy = self.copies[transfer_id]
        if "failed" in copy.acknowledged - {kind}:
            return  # a failed copy never reaches the stream
        if kind == "failed" and copy.acknowledged & {"enqueued", "completed"}:
            return  # a copy on the stream does not fail
        is_live = copy.generation == self.generation[copy.page] and kind not in copy.acknowledged
        getattr(self.coordinator, f"on_{kind}")([transfer_id])
        copy.acknowledged.add(kind)
        if not is_live:
            return
        page = copy.page
        if kind == "failed":
            self.state[page] = DIRTY
        elif {"enqueued", "completed"} <= copy.acknowledged and self.state[page] == MIRRORING:
            self.state[page] = CLEAN

    def _keep_figures(self) -> None:
        """What the policy has kept is what a policy finds that looks for the first time. What the book keeps of all slots is held
        against its tables by the check that follows the next rule."""
        kept, fresh = self.stage.policy, SpillPolicy(self.coordinator)
        for policy in (kept, fresh):
            policy._room_to_promote()
        assert (kept._fewest_host_pages, kept._num_unused) == (fresh._fewest_host_pages, fresh._num_unused)
        self.stage.book.host_counts(np.arange(self.stage.limits.num_slots))
        self.stage.book.committed_pages()

    @invariant()
    def equals_the_model(self) -> None:
        check(self.coordinator)
        self._keep_figures()
        book = self.stage.book
        for page, state in self.state.items():
            assert book.state[page] == state, (page, PageState(int(book.state[page])), state)
            assert (book.device_page[page] == 0) == (state == HOST)
        assert book.num_free == self.stage.limits.num_logical_pages - len(self.state)
        for slot, model in self.slots.items():
            assert self.stage.row(slot) == model.row
        writing = {
            copy.page for copy in self.copies.values() if not copy.acknowledged & {"completed", "failed", "flushed"}
        }
        for page in range(1, 13):
            assert self.coordinator.is_landing_target(page) == (page not in writing)
        resident = sum(state != HOST for state in self.state.values())
        hot = 2 * len(self.coordinator.hot_lease)
        assert self.stage.pages.num_free + resident + hot == self.stage.limits.num_device_pages


TestDevicePages = DevicePagesMachine.TestCase
TestDevicePages.settings = settings(max_examples=1000 if THOROUGH else 80, stateful_step_count=30)
TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(max_examples=3000 if THOROUGH else 200, stateful_step_count=40)
