"""Goal: plans are executed in order and acknowledged right. Method: the real worker on small tensors, CPU and CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_hisparse.residency.types import LeaseChange, PageTransfer, Promotion, StepPlan
from sglang_hisparse.transfer.worker import TransferWorker

DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PAGE_BYTES, LAYERS, PAGES = 4096, 3, 12
POISON = 0xEE


@dataclass(slots=True)
class Hot:
    """Stands where HotBuffers stands: remembers which slots were reset, and what the tables held then."""

    worker: Any = None
    resets: list[tuple[list[int], torch.Tensor, torch.Tensor]] | None = None

    def reset(self, slots: torch.Tensor) -> None:
        self.resets.append((slots.tolist(), self.worker.page_table.clone(), self.worker.hot_pages.clone()))


class Link:
    """Host and device pages with recognisable bytes, and a worker between them."""

    def __init__(self, device: str) -> None:
        shape = (LAYERS, PAGES, PAGE_BYTES)
        self.device_pages = torch.randint(0, 255, shape, dtype=torch.uint8).to(device)
        self.host_pages = torch.randint(0, 255, shape, dtype=torch.uint8)
        if device == "cuda":
            self.host_pages = self.host_pages.pin_memory()
        self.hot = Hot(resets=[])
        self.worker = TransferWorker(
            host_bases=self._bases(self.host_pages).to(device),
            device_bases=self._bases(self.device_pages).to(device),
            page_bytes=PAGE_BYTES,
            page_table=torch.zeros(PAGES, dtype=torch.int32, device=device),
            hot_pages=torch.zeros((4, 2), dtype=torch.int32, device=device),
            hot_state=self.hot,
        )
        self.hot.worker = self.worker

    @staticmethod
    def _bases(pages: torch.Tensor) -> torch.Tensor:
        return torch.tensor([layer.data_ptr() for layer in pages], dtype=torch.int64)

    def device_page(self, page: int) -> torch.Tensor:
        return self.device_pages[:, page].cpu()


def plan(**parts: Any) -> StepPlan:
    return StepPlan(**{"step": 1, "wait_transfer_id": 0, "promotions": (), "table": (), "leases": (), **parts})


@DEVICE
def test_a_mirror_copies_all_layers(device: str) -> None:
    """Goal: a page reaches its home in every layer, and no other. Method: two pages to far homes; compare all bytes."""
    link = Link(device)
    expected = link.host_pages.clone()
    expected[:, 7], expected[:, 2] = link.device_page(3), link.device_page(11)
    assert link.worker.mirror([PageTransfer(1, 7, 3), PageTransfer(2, 2, 11)]) == [1, 2]
    link.worker.drain()
    assert torch.equal(link.host_pages, expected)
    assert link.worker.bytes_to_host == 2 * LAYERS * PAGE_BYTES


@DEVICE
def test_acknowledgements_come_once_and_in_order(device: str) -> None:
    """Goal: each copy is reported complete once. Method: three batches, polled after they are done."""
    link = Link(device)
    for first in (1, 3, 5):
        link.worker.mirror([PageTransfer(first, 1, 1), PageTransfer(first + 1, 2, 2)])
    assert link.worker.in_flight
    link.worker.drain()
    assert link.worker.poll() == [1, 2, 3, 4, 5, 6] and link.worker.poll() == []
    assert not link.worker.in_flight


@DEVICE
def test_a_plan_is_applied_in_its_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: promotions, then the table, then leases, then resets. Method: what each step finds written when it runs."""
    link = Link(device)
    worker, seen = link.worker, []
    copy = worker._copy

    def watched_copy(*arguments: Any) -> None:
        seen.append(worker.page_table.tolist())
        copy(*arguments)

    monkeypatch.setattr(worker, "_copy", watched_copy)
    worker.apply(
        plan(
            promotions=(Promotion(4, 9), Promotion(5, 2)),
            table=((4, 9), (5, 2), (6, 0)),
            leases=(LeaseChange(3, (7, 8)), LeaseChange(1, ())),
        )
    )
    assert seen == [[0] * PAGES]
    assert torch.equal(link.device_page(9), link.host_pages[:, 4]) and torch.equal(
        link.device_page(2), link.host_pages[:, 5]
    )
    ((slots, table, hot_pages),) = link.hot.resets
    assert slots == [3, 1] and table.tolist()[4:7] == [9, 2, 0]
    assert hot_pages.tolist() == [[0, 0], [0, 0], [0, 0], [7, 8]]
    assert worker.bytes_to_device == 2 * LAYERS * PAGE_BYTES


@DEVICE
def test_an_empty_plan_does_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a step without changes uploads nothing. Method: uploads are made to fail."""
    link = Link(device)
    monkeypatch.setattr(link.worker, "_to_device", lambda rows: pytest.fail("uploaded"))
    link.worker.apply(plan())
    assert link.hot.resets == []


@DEVICE
def test_after_a_flush_the_next_plan_finds_empty_tables(device: str) -> None:
    """Goal: nothing of the old life is read, and the next plan counts. Method: flush, then a plan with new entries."""
    link = Link(device)
    link.worker.apply(plan(table=((1, 5), (2, 6)), leases=(LeaseChange(2, (3, 4)),)))
    link.worker.mirror([PageTransfer(1, 1, 1)])
    link.worker.drain()
    link.worker.forget_all()
    assert not link.worker.in_flight and link.worker.poll() == []
    assert link.worker.page_table.tolist()[1:3] == [5, 6], "tables change between forwards only"
    link.worker.apply(plan(table=((3, 7),)))
    assert link.worker.page_table.tolist() == [0, 0, 0, 7, *[0] * (PAGES - 4)]
    assert not link.worker.hot_pages.any()
    link.worker.apply(plan())
    assert link.worker.page_table.tolist()[3] == 7, "the tables are emptied once"


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_copy_is_ordered_before_the_pages_next_writer(waits: bool) -> None:
    """Goal: I1 and I6 on a GPU. Method: a copy stream that is held up; the page is poisoned at once; without the wait it shows."""
    link = Link("cuda")
    worker, content = link.worker, link.device_page(3)
    with torch.cuda.stream(worker._copy_stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
    worker.mirror([PageTransfer(1, 7, 3)])
    assert worker.poll() == [], "the copy has not been made yet"
    worker.apply(plan(wait_transfer_id=1 if waits else 0, table=((7, 0),)))
    link.device_pages[:, 3] = POISON  # the page's next owner, on the forward stream
    torch.cuda.synchronize()
    assert torch.equal(link.host_pages[:, 7], content) == waits
    assert worker.poll() == [1]


@pytest.mark.gpu
def test_a_copy_waits_for_the_last_launched_forward() -> None:
    """Goal: R8, sealed rows are copied after they are written. Method: a slow forward on its own stream writes, then mirror."""
    link = Link("cuda")
    link.worker.forward_stream = torch.cuda.Stream()
    with torch.cuda.stream(link.worker.forward_stream):
        torch.cuda._sleep(200_000_000)
        link.device_pages[:, 3] = POISON
    link.worker.mirror([PageTransfer(1, 7, 3)])
    link.worker.drain()
    assert (link.host_pages[:, 7] == POISON).all()


@pytest.mark.gpu
def test_a_promotion_reads_what_the_copy_wrote() -> None:
    """Goal: a page that leaves and comes back in one plan is whole. Method: a held-up copy, spilled and promoted at once."""
    link = Link("cuda")
    content = link.device_page(3)
    with torch.cuda.stream(link.worker._copy_stream):
        torch.cuda._sleep(200_000_000)
    link.worker.mirror([PageTransfer(1, 7, 3)])
    link.worker.apply(plan(wait_transfer_id=1, promotions=(Promotion(7, 10),), table=((7, 10),)))
    assert torch.equal(link.device_page(10), content)
