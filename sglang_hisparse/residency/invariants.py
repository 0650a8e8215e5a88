"""The structural invariants of the residency protocol, checked against nothing but the coordinator's own tables.

Called by the runtime whenever the server is idle, by the simulator and by tests. It must never change anything, and it
holds between transactions only: inside one (pages held for an allocation, a replaced page that is about to be freed)
the counts are allowed to differ. A few dozen vectorised operations over the pages and slots, no loop over pages.

What it cannot see is content: whether the host copy that a state promises was really made is for the simulator and the
row audit to say. It reads private tables of its sister modules: nobody else needs them.
"""

from __future__ import annotations

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.coordinator import ResidencyCoordinator
from sglang_hisparse.residency.device_pages import Owner
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import NO_TRANSFER, PAD_PAGE, PageState

_FREE, _OPEN, _DIRTY, _MIRRORING, _CLEAN, _HOST = (int(state) for state in PageState)


def check(coordinator: ResidencyCoordinator) -> None:
    """Raise InvariantError, naming the invariant and a page or slot, if the coordinator's tables contradict each
    other."""
    _check_device_pages(coordinator)
    _check_logical_pages(coordinator)
    _check_slots(coordinator)
    _check_counts(coordinator)
    _check_transfers(coordinator)
    _check_kept_figures(coordinator.book)


def _require(bad: np.ndarray, message: str) -> None:
    """`bad`: bool per page or slot, the first one that is set is named."""
    if bad.any():
        raise InvariantError(f"{message} (number {int(np.argmax(bad))}, {int(np.count_nonzero(bad))} in all)")


def _check_device_pages(coordinator: ResidencyCoordinator) -> None:
    """I2 and I3: free, resident and hot pages are disjoint and complete, and owners agree with those who think they
    own."""
    pages, book = coordinator.device_pages, coordinator.book
    free = np.asarray(pages._free, dtype=np.int64)
    times_free = np.bincount(free, minlength=pages.num_pages + 1)
    _require(times_free > 1, "I2: a device page is twice in the free list")
    _require((times_free == 1) != (pages.owner == Owner.FREE) & (np.arange(pages.num_pages + 1) > 0),
             "I2: the free list and the owner of a device page disagree")  # fmt: skip
    if pages.owner[PAD_PAGE] != Owner.FREE:
        raise InvariantError("I2: the pad page has an owner")

    holders = np.flatnonzero(book.device_page)
    held = book.device_page[holders]
    times_held = np.bincount(held, minlength=pages.num_pages + 1)
    _require(times_held > 1, "I2: two logical pages name one device page")
    _require(
        (times_held == 1) != (pages.owner == Owner.RESIDENT), "I2: a resident device page and the page table disagree"
    )
    owner_of = np.zeros(pages.num_pages + 1, dtype=np.int64)
    owner_of[held] = holders
    _require(
        (pages.owner == Owner.RESIDENT) & (pages.owner_id != owner_of),
        "I2: a device page belongs to another logical page",
    )

    owner_of.fill(-1)
    num_hot = 0
    for slot, lease in coordinator.hot_lease.items():
        if len(lease) != coordinator.limits.hot_pages:
            raise InvariantError(
                f"I3: request slot {slot} leases {len(lease)} pages, not {coordinator.limits.hot_pages}"
            )
        owner_of[lease] = slot
        num_hot += len(lease)
    is_hot = pages.owner == Owner.HOT
    _require(is_hot != (owner_of >= 0), "I2: a hot device page and the leases disagree")
    _require(is_hot & (pages.owner_id != owner_of), "I2: a hot device page belongs to another request slot")
    withheld = pages.owner == Owner.WITHHELD
    _require(
        withheld != (np.arange(pages.num_pages + 1) > pages.num_usable), "I10: a device page above the border has an owner"
    )
    if free.size + holders.size + num_hot + (num_withheld := int(np.count_nonzero(withheld))) != pages.num_pages:
        raise InvariantError(
            f"I3: {free.size} free + {holders.size} resident + {num_hot} hot + {num_withheld} withheld device pages, "
            f"not {pages.num_pages}"
        )


def _check_logical_pages(coordinator: ResidencyCoordinator) -> None:
    """States agree with device pages and free list; what is free has no trace of its last owner."""
    book = coordinator.book
    state = book.state
    resident = (state >= _OPEN) & (state <= _CLEAN)
    _require(resident != (book.device_page != 0), "I1: state and device page of a logical page disagree")
    times_free = np.bincount(np.asarray(book.free_pages(), dtype=np.int64), minlength=state.size)
    _require(times_free > 1, "I2: a logical page is twice in the free list")
    _require((times_free == 1) & (state != _FREE), "I2: a logical page in the free list is in use")
    beyond = np.arange(state.size) > book.num_usable
    _require(beyond & ((times_free > 0) | (state != _FREE)), "I10: a logical page without index-K was handed out")
    _require(np.isin(np.arange(state.size), book._free) & (np.arange(state.size) > book.fill_limit),
             "I2: a logical page that comes last is among those that come first")  # fmt: skip
    if state[PAD_PAGE] != _FREE or times_free[PAD_PAGE]:
        raise InvariantError("I2: the pad page is in use")
    traces = (
        (book.users != 0) | (book.unleased != 0) | (book.holds != 0) | (book.transfer != NO_TRANSFER) | book.enqueued
    )
    _require((state == _FREE) & traces, "I5: a free logical page keeps traces of its last owner")


def _mapped(book: PageBook) -> np.ndarray:
    """Bool [slots, positions]: the slot has a page there."""
    positions = np.arange(book.slot_pages.shape[1])
    return (positions < book.num_pages[:, None]) & (book.slot_pages != PAD_PAGE)


def _check_slots(coordinator: ResidencyCoordinator) -> None:
    book, limits = coordinator.book, coordinator.limits
    leases = np.zeros(book.live.shape, dtype=bool)
    leases[list(coordinator.hot_lease)] = True
    _require(book.leased != leases, "R19: the lease mark of a request slot and its lease disagree")
    traces = (book.num_pages != 0) | (book.held_from != 0) | (book.sealed != 0) | book.prefilling | book.leased
    _require(~book.live & traces, "R12: a request slot that was released keeps traces of its request")
    streams = book.prefilling & book.leased
    wanted = np.where(book.prefilling, np.where(streams, book.sealed, 0), np.maximum(book.num_pages - limits.tail_pages, 0))
    _require(
        book.live & (book.held_from != wanted),
        "R19: a request slot does not hold exactly its tail, all while prefilling, or what a streamed prefill has not sealed",
    )
    _require(book.sealed > book.num_pages, "I1: more pages of a request slot are sealed than it has")


def _check_counts(coordinator: ResidencyCoordinator) -> None:
    """Users, users without a lease and holds follow from the slots alone; what is used exists; R19."""
    book = coordinator.book
    mapped = _mapped(book)
    num_pages = book.state.size
    slots, positions = np.nonzero(mapped)
    pages = book.slot_pages[slots, positions]
    _require(book.users != np.bincount(pages, minlength=num_pages), "I2: the users of a logical page are miscounted")
    unleased = ~book.leased[slots]
    count = np.bincount(pages[unleased], minlength=num_pages)
    _require(book.unleased != count, "R19: the users without a lease of a logical page are miscounted")
    count = np.bincount(pages[book.kept[slots]], minlength=num_pages)
    _require(book.keepers != count, "I7: the kept users of a logical page are miscounted")
    _require(book.kept & (book.leased | ~book.live | ~book.bounded), "I7: a request slot is kept that cannot be")
    held = positions >= book.held_from[slots]
    _require(
        book.holds != np.bincount(pages[held], minlength=num_pages), "R19: the holds of a logical page are miscounted"
    )
    state = book.state[pages]
    _require(_mark(num_pages, pages[state == _FREE]), "I5: a request uses a logical page that is free")
    on_host = (state == _HOST) & unleased & ~book.prefilling[slots]
    _require(_mark(num_pages, pages[on_host]), "R19: a host-only page has a user without a hot lease")
    unsealed = (state == _OPEN) & (positions < book.sealed[slots])
    _require(_mark(num_pages, pages[unsealed]), "I1: a page below the sealed border of its user is still open")


def _check_kept_figures(book: PageBook) -> None:
    """What is kept until a move is still what the tables say: every change that matters has been noted as one."""
    counted = np.flatnonzero(book._counted_at == book.moves)
    on_host = np.count_nonzero(book.state[book.slot_pages[counted]] == _HOST, axis=1)
    _require(book._host_counts[counted] != on_host, "R19: the host-only pages of a request slot changed without a move")
    if book._committed[0] == book.moves and book._committed[1] != book.fresh_committed_pages():
        raise InvariantError(f"I7: {book._committed[1]} committed pages are not those of the live requests any more")


def _mark(size: int, pages: np.ndarray) -> np.ndarray:
    marks = np.zeros(size, dtype=bool)
    marks[pages] = True
    return marks


def _check_transfers(coordinator: ResidencyCoordinator) -> None:
    """I1 and I5: a host-only page has had its copy enqueued; transfers, states and the list of DIRTY pages agree."""
    book = coordinator.book
    state, moving = book.state, book.transfer != NO_TRANSFER
    _require((state == _HOST) & moving & ~book.enqueued, "I1: a page is host-only before its copy was enqueued")
    _require((state == _MIRRORING) & ~moving, "I1: a page waits for a copy that does not exist")
    settled = (state == _OPEN) | (state == _DIRTY) | (state == _CLEAN)
    _require(settled & (moving | book.enqueued), "I5: a page that is not being copied has a transfer")
    known, in_flight = coordinator._transfers, np.zeros(state.size, dtype=np.int64)
    if known:
        np.add.at(in_flight, np.fromiter(known.values(), dtype=np.int64, count=len(known)), 1)
    recorded = np.zeros(state.size, dtype=np.int64)
    for page, count in coordinator._in_flight.items():
        recorded[page] = count
    _require(recorded != in_flight, "R7: the host writes in flight to a logical page are miscounted")
    for page in np.flatnonzero(moving).tolist():
        transfer_id = int(book.transfer[page])
        if known.get(transfer_id, coordinator._completed_early.get(transfer_id)) != page:
            raise InvariantError(
                f"I5: page {page} waits for transfer {transfer_id}, which is another page's or has ended"
            )
    if not np.array_equal(np.sort(np.fromiter(coordinator._dirty, dtype=np.int64)), np.flatnonzero(state == _DIRTY)):
        raise InvariantError("I1: the backlog of pages without a host copy and their states disagree")
