"""Goal: the structural check sees each kind of corruption and names it. Method: corrupt one table entry at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from residency.stage import Stage
from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency import Owner, PageState
from sglang_hisparse.residency.invariants import check


def scene() -> Stage:
    """Slot 1 mixed (page 1 host-only), slot 2 being prefilled, page 9 cached and CLEAN, page 10 DIRTY; one copy under
    way."""
    stage = Stage(device=16)
    pages = stage.extend(1, 5)
    stage.coordinator.acquire_lease(1)
    stage.mirror_all()
    stage.coordinator.spill(pages[:1])
    stage.coordinator.on_completed([2, 3, 4, 5])
    stage.extend(2, 3, ends=False)
    (clean,) = stage.cache(3, 1)
    stage.coordinator.mirror([clean])
    stage.coordinator.on_completed([6])
    stage.cache(3, 1)
    assert (clean, stage.sent[-1].transfer_id) == (9, 6)
    return stage


def _set(array: str, index: int, value: int) -> Callable[[Stage], None]:
    def corrupt(stage: Stage) -> None:
        getattr(stage.book, array)[index] = value

    return corrupt


def _swap_owner(stage: Stage) -> None:
    stage.pages.owner_id[int(stage.book.device_page[9])] = 10


def _share_device_page(stage: Stage) -> None:
    stage.book.device_page[9] = stage.book.device_page[10]


def _forget_device_page(stage: Stage) -> None:
    stage.pages.owner[stage.pages._free.pop()] = Owner.RESIDENT


def _shrink_lease(stage: Stage) -> None:
    stage.coordinator.hot_lease[1].pop()


def _lose_lease(stage: Stage) -> None:
    stage.coordinator.hot_lease.clear()


def _free_twice(stage: Stage) -> None:
    stage.pages._free.append(stage.pages._free[-1])


def _free_logical_twice(stage: Stage) -> None:
    stage.book._free.append(stage.book._free[-1])


def _drop_host_write(stage: Stage) -> None:
    stage.coordinator._in_flight.clear()


def _drop_transfer(stage: Stage) -> None:
    stage.coordinator._transfers.clear()
    stage.coordinator._in_flight.clear()


def _drop_backlog(stage: Stage) -> None:
    stage.coordinator._dirty.pop(10)


CORRUPTIONS: dict[str, tuple[str, Callable[[Stage], None]]] = {
    "host-only page whose copy is not enqueued": ("I1", _set("enqueued", 1, 0)),
    "state without device page": ("I1|I2", _set("device_page", 9, 0)),
    "host-only page with a device page": ("I1", _set("state", 9, PageState.HOST)),
    "copy that does not exist": ("I1", _set("state", 9, PageState.MIRRORING)),
    "sealed border beyond the row": ("I1", _set("sealed", 2, 7)),
    "open page below the sealed border": ("I1", _set("state", 6, PageState.OPEN)),
    "backlog without a DIRTY page": ("I1", _drop_backlog),
    "device page with two owners": ("I2", _share_device_page),
    "device page of another logical page": ("I2", _swap_owner),
    "device page lost": ("I2", _forget_device_page),
    "device page free twice": ("I2", _free_twice),
    "logical page free twice": ("I2", _free_logical_twice),
    "users miscounted": ("I2", _set("users", 9, 1)),
    "lease of the wrong size": ("I3", _shrink_lease),
    "lease lost": ("I2", _lose_lease),
    "free page with a transfer": ("I5", _set("transfer", 20, 3)),
    "settled page with a transfer": ("I5", _set("transfer", 9, 3)),
    "used page that is free": ("I2|I1|I5", _set("state", 7, PageState.FREE)),
    "transfer that has ended": ("I5", _drop_transfer),
    "host write miscounted": ("R7", _drop_host_write),
    "released slot with traces": ("R12", _set("prefilling", 3, 1)),
    "lease mark without lease": ("R19", _set("leased", 2, 1)),
    "tail not held": ("R19", _set("held_from", 1, 5)),
    "holds miscounted": ("R19", _set("holds", 9, 1)),
    "users without lease miscounted": ("R19", _set("unleased", 1, 1)),
}


def test_the_scene_is_sound() -> None:
    """Goal: the corruptions below are the only thing wrong. Method: check the scene as it is."""
    check(scene().coordinator)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_named(name: str) -> None:
    """Goal: one corrupt entry is seen, under its invariant. Method: corrupt the scene, check."""
    invariant, corrupt = CORRUPTIONS[name]
    stage = scene()
    corrupt(stage)
    with pytest.raises(InvariantError, match=rf"^({invariant}): "):
        check(stage.coordinator)


def test_host_only_page_of_an_unleased_user() -> None:
    """Goal: R19 with the counts in order. Method: end a lease that is still needed."""
    stage = scene()
    stage.coordinator.release_lease(1)
    with pytest.raises(InvariantError, match="R19: a host-only page"):
        check(stage.coordinator)


def test_check_changes_nothing() -> None:
    """Goal: it may run at any idle moment. Method: compare every array of the book before and after."""
    stage = scene()
    arrays = {
        name: value.copy() for name, value in vars(stage.book).items() if isinstance(value, np.ndarray)
    }
    check(stage.coordinator)
    for name, before in arrays.items():
        assert (getattr(stage.book, name) == before).all(), name
