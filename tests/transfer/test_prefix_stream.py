"""Goal: a streamed extend finds every row of its pages in the scratch, and says so when it would not.

Method: the stream on CPU tensors with made-up tables; tests/gpu drives it with real requests on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.types import StreamPlan, StreamWindow
from sglang_hisparse.transfer.prefix_stream import PrefixStream

LAYERS, PAGE, DIM = 5, 4, 8


class Tiers:
    """Device and host rows of five layers, each row its own number, and a stream of `scratch_pages` over them."""

    def __init__(self, scratch_pages: int = 6, layers: int = LAYERS) -> None:
        self.device = [self._rows(1000 * layer, 8) for layer in range(layers)]
        self.host = [self._rows(1000 * layer + 500, 12) for layer in range(layers)]
        self.stream = PrefixStream(
            like=self.device[0],
            host_bases=torch.tensor([rows.data_ptr() for rows in self.host]),
            device_bases=torch.tensor([rows.data_ptr() for rows in self.device]),
            page_table=torch.zeros(12, dtype=torch.int32),
            page_size=PAGE,
            num_pages=scratch_pages,
        )

    @staticmethod
    def _rows(first: int, pages: int) -> torch.Tensor:
        rows = torch.arange(first, first + pages * PAGE, dtype=torch.float32)
        return rows[:, None, None].expand(-1, 1, DIM).contiguous()

    def expected(self, plan: StreamPlan, layer: int) -> dict[int, torch.Tensor]:
        """Rows of each logical page."""
        found = {int(page): self._page(self.host[layer], int(page)) for page in plan.host_pages}
        pairs = zip(plan.resident_pages, plan.device_pages, strict=True)
        return found | {int(page): self._page(self.device[layer], int(device)) for page, device in pairs}

    @staticmethod
    def _page(rows: torch.Tensor, page: int) -> torch.Tensor:
        return rows[page * PAGE : (page + 1) * PAGE]


def plan_of(host: list[int], resident: dict[int, int]) -> StreamPlan:
    return StreamPlan(*(np.array(pages, dtype=np.int64) for pages in (host, list(resident), list(resident.values()))))


PLANS = [
    plan_of([7, 2, 11], {3: 5, 9: 1}),
    plan_of([4], {}),
    plan_of([], {3: 5}),
    plan_of([1, 2, 3, 4, 5, 6], {}),
]


def test_every_layer_of_every_page() -> None:
    """Goal: host-only and resident rows, of all layers, under the table's numbers. Method: several extends, one stream."""
    tiers = Tiers()
    for plan in PLANS:
        tiers.stream.begin(plan)
        assert tiers.stream.active
        pages = {*plan.host_pages.tolist(), *plan.resident_pages.tolist()}
        assert {int(page) for page in tiers.stream.table.nonzero()} == pages
        for layer in range(LAYERS):
            rows = tiers.stream.stage(layer)
            assert rows is not None and torch.equal(rows, tiers.stream.stage(layer)), "asked again, the same"
            for page, wanted in tiers.expected(plan, layer).items():
                assert torch.equal(tiers._page(rows, int(tiers.stream.table[page])), wanted), (page, layer)
            assert not rows[:PAGE].any(), "the pad page stays empty"
        tiers.stream.finish()
        tiers.stream.end()
        assert not tiers.stream.active
    counts = tiers.stream.counters()
    assert counts["streamed_extends"] == len(PLANS)
    page_bytes = PAGE * DIM * 4
    assert counts["streamed_host_bytes"] == LAYERS * page_bytes * sum(len(plan.host_pages) for plan in PLANS)
    assert counts["streamed_resident_bytes"] == LAYERS * page_bytes * sum(len(plan.device_pages) for plan in PLANS)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers: int) -> None:
    """Goal: nothing is fetched beyond the last layer. Method: models of one, two and three layers."""
    tiers = Tiers(layers=layers)
    tiers.stream.begin(PLANS[0])
    for layer in range(layers):
        rows = tiers.stream.stage(layer)
        for page, wanted in tiers.expected(PLANS[0], layer).items():
            assert torch.equal(tiers._page(rows, int(tiers.stream.table[page])), wanted)
    tiers.stream.finish()
    assert tiers.stream.counters()["streamed_host_bytes"] == layers * 3 * PAGE * DIM * 4


def test_new_rows_are_taken_when_attention_asks() -> None:
    """Goal: rows that the extend itself writes are read. Method: write a layer's page between `begin` and `stage`."""
    tiers = Tiers()
    tiers.stream.begin(PLANS[0])
    for layer in range(LAYERS):
        tiers.stream.note_write(layer)
        tiers.device[layer][5 * PAGE : 6 * PAGE] = -1 - layer
        rows = tiers.stream.stage(layer)
        assert (tiers._page(rows, int(tiers.stream.table[3])) == -1 - layer).all()


def test_misuse_is_an_error_not_a_wrong_row() -> None:
    """Goal: I6 and I7. Method: too many pages, layers out of order, a late write, attention that did not ask."""
    tiers = Tiers(scratch_pages=5)
    with pytest.raises(InvariantError, match="I7: an extend of 6 pages was admitted for 5"):
        tiers.stream.begin(PLANS[3])
    tiers.stream.begin(PLANS[0])
    tiers.stream.stage(0)
    with pytest.raises(InvariantError, match="I6: layer 2 .* is read after layer 0"):
        tiers.stream.stage(2)
    with pytest.raises(InvariantError, match="I6: rows of layer 0 are written after"):
        tiers.stream.note_write(0)
    with pytest.raises(InvariantError, match="I6: attention asked for 1 of 5 layers"):
        tiers.stream.finish()
    tiers.stream.end()
    tiers.stream.finish()


@pytest.mark.parametrize("plan", PLANS)
def test_a_union_holds_what_was_selected(plan: StreamPlan) -> None:
    """Goal: every selected row is the row that a whole stream has, and no other was moved. Method: the same ids through both."""
    whole, union = Tiers(), Tiers()
    random = np.random.default_rng(len(plan.host_pages))
    pages = np.concatenate([plan.host_pages, plan.resident_pages])
    union.stream.scratch.fill_(-7.0)
    whole.stream.begin(plan)
    union.stream.begin(replace(plan, union=True))
    num_rows = 0
    for layer in range(LAYERS):
        want, got = whole.stream.stage(layer), union.stream.stage(layer)
        got[(len(plan.host_pages) + 1) * PAGE :][plan.num_pages * PAGE :] = 0
        got[: (len(plan.host_pages) + 1) * PAGE] = -7.0
        ids = random.choice(pages, (4, 5)) * PAGE + random.integers(0, PAGE, (4, 5))
        ids[random.random(ids.shape) < 0.2] = -1
        selected = torch.from_numpy(ids).int()
        union.stream.select(selected[:2])
        union.stream.select(selected)
        rows = whole.stream.table[selected[selected >= 0] // PAGE] * PAGE + selected[selected >= 0] % PAGE
        assert torch.equal(want[rows.long()], got[rows.long()])
        on_host = {row for row in rows.tolist() if row < (len(plan.host_pages) + 1) * PAGE}
        others = [row for row in range((len(plan.host_pages) + 1) * PAGE) if row not in on_host]
        assert (got[others] == -7.0).all(), "a row was moved that nobody selected"
        num_rows += len(on_host)
    union.stream.finish()
    counts = union.stream.counters()
    assert (counts["streamed_unions"], counts["streamed_union_rows"]) == (1, num_rows)
    assert counts["streamed_host_bytes"] == num_rows * DIM * 4


def test_a_union_that_is_not_asked_for_is_an_error() -> None:
    """Goal: stale rows are never read (I6). Method: select before the first layer, stage past a layer, end without the last."""
    tiers = Tiers()
    tiers.stream.begin(replace(PLANS[0], union=True))
    ids = torch.tensor([[7 * PAGE, -1]], dtype=torch.int32)
    with pytest.raises(InvariantError, match="I6: rows of a union were selected before"):
        tiers.stream.select(ids)
    tiers.stream.stage(0)
    with pytest.raises(InvariantError, match="I6: layer 1 is staged before the union of layer 0"):
        tiers.stream.stage(1)
    for layer in range(LAYERS - 1):
        tiers.stream.stage(layer)
        tiers.stream.select(ids)
    tiers.stream.stage(LAYERS - 1)
    with pytest.raises(InvariantError, match="I6: attention of layer 4 read rows of a union"):
        tiers.stream.finish()


# ---- windows -----------------------------------------------------------------------------------------------------------


def windows_of(*plans: StreamPlan | None) -> list[StreamWindow]:
    return [StreamWindow(plan, 10 * number, 10 * number + 10) for number, plan in enumerate(plans)]


@pytest.mark.parametrize("order", [(0, 1), (0, 2, 1), (3, 0, None, 1, 2), (None, 3), (1, None)])
@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_every_window_of_every_layer(order: tuple[int | None, ...], layers: int) -> None:
    """Goal: as many pages as all windows have together. Method: several windows, one that reads the pool among them."""
    tiers = Tiers(layers=layers)
    plans = [None if number is None else PLANS[number] for number in order]
    for _ in range(2):
        tiers.stream.begin_windows(windows_of(*plans))
        assert tiers.stream.windows == [(10 * number, 10 * number + 10) for number in range(len(plans))]
        for layer in range(layers):
            tiers.stream.note_write(layer)
            tiers.stream.stage(layer)
            for window, plan in enumerate(plans):
                rows = tiers.stream.enter(window)
                if plan is None:
                    assert rows is None
                else:
                    pages = {*plan.host_pages.tolist(), *plan.resident_pages.tolist()}
                    assert {int(page) for page in tiers.stream.table.nonzero()} == pages
                    for page, wanted in tiers.expected(plan, layer).items():
                        assert torch.equal(tiers._page(rows, int(tiers.stream.table[page])), wanted), (page, layer)
                    assert not rows[:PAGE].any(), "the pad page stays empty"
                tiers.stream.leave()
        tiers.stream.finish()
        tiers.stream.end()
    counts, page_bytes = tiers.stream.counters(), PAGE * DIM * 4
    assert (counts["streamed_extends"], counts["streamed_windows"]) == (2, 2 * len(plans))
    assert counts["streamed_host_bytes"] == 2 * layers * page_bytes * sum(len(plan.host_pages) for plan in plans if plan)


def test_windows_of_rows_and_of_pages() -> None:
    """Goal: a window whose few tokens select fetches their rows alone, beside windows of whole pages. Method: stale scratch, ids of
    every window; a window that was not selected from is an error (I6)."""
    tiers = Tiers()
    tiers.stream.scratch[:, PAGE:] = -7.0
    plans = [replace(PLANS[0], union=True), PLANS[1], replace(PLANS[3], union=True), replace(PLANS[1], union=True)]
    random, num_rows = np.random.default_rng(3), 0
    tiers.stream.begin_windows(windows_of(*plans))
    for layer in range(LAYERS):
        tiers.stream.stage(layer)
        for window, plan in enumerate(plans):
            rows = tiers.stream.enter(window)
            pages = np.concatenate([plan.host_pages, plan.resident_pages])
            ids = random.choice(pages, (3, 4)) * PAGE + random.integers(0, PAGE, (3, 4))
            ids[random.random(ids.shape) < 0.2] = -1
            tiers.stream.select(torch.from_numpy(ids).int())
            wanted = tiers.expected(plan, layer)
            for one in np.unique(ids[ids >= 0]).tolist():
                at = int(tiers.stream.table[one // PAGE]) * PAGE + one % PAGE
                assert torch.equal(rows[at], wanted[one // PAGE][one % PAGE])
                num_rows += plan.union and one // PAGE in plan.host_pages
            tiers.stream.leave()
    tiers.stream.finish()
    counts = tiers.stream.counters()
    assert (counts["streamed_unions"], counts["streamed_union_rows"]) == (3, num_rows)
    assert counts["streamed_host_bytes"] == num_rows * DIM * 4 + LAYERS * len(PLANS[1].host_pages) * PAGE * DIM * 4
    tiers.stream.begin_windows(windows_of(*plans))
    with pytest.raises(InvariantError, match="I6: rows of a union were selected before"):
        tiers.stream.select(torch.tensor([[-1]]))
    tiers.stream.stage(0)
    tiers.stream.enter(0)
    tiers.stream.leave()
    with pytest.raises(InvariantError, match="I6: a window of layer 0 is staged before the union of number 0 was fetched"):
        tiers.stream.enter(1)


def test_misuse_of_windows_is_an_error() -> None:
    """Goal: I6. Method: a window left out, entered twice, a layer before all windows of the last one, an early end."""
    tiers = Tiers()
    tiers.stream.begin_windows(windows_of(PLANS[0], PLANS[1]))
    tiers.stream.stage(0)
    with pytest.raises(InvariantError, match="I6: window 1 of layer 0 is read after number -1"):
        tiers.stream.enter(1)
    tiers.stream.enter(0)
    with pytest.raises(InvariantError, match="I6: window 0 of layer 0 is read after number 0"):
        tiers.stream.enter(0)
    with pytest.raises(InvariantError, match="I6: rows of layer 0 are written after"):
        tiers.stream.note_write(0)
    with pytest.raises(InvariantError, match="I6: layer 1 is read before all windows of layer 0"):
        tiers.stream.stage(1)
    with pytest.raises(InvariantError, match="I6: attention asked for 0 of 5 layers"):
        tiers.stream.finish()
    tiers.stream.end()
    with pytest.raises(InvariantError, match="I7: an extend of 6 pages was admitted for 5"):
        Tiers(scratch_pages=5).stream.begin_windows(windows_of(PLANS[0], PLANS[3]))
