"""Goal: the audit sees every wrong row and no other: changed resident rows, stale reads of ended requests, wrong hot rows.

Method: small worlds on the CPU in which damage is planted, and SGLang's scheduler, in which none is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.checks import assert_outputs, assert_prefix_of_reference
from harness.hisparse import engine_for, finish, submit
from harness.scenarios import random_life
from runtime_world import PAGE, Client, World, make_world

from sglang_hisparse.audit import AUDIT_VARIABLE, MOST_REPORTS, SAMPLED
from sglang_hisparse.page_audit import POISON_BYTE, row_sums


@pytest.fixture(autouse=True)
def audit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUDIT_VARIABLE, "1")


@pytest.fixture
def world() -> Iterator[World]:
    with make_world() as world:
        yield world


@pytest.fixture
def bare() -> Iterator[World]:
    """Without a radix cache: what ends is freed."""
    with make_world(radix=False) as world:
        yield world


def tally(world: World) -> tuple[int, int]:
    """(rows audited, mismatches): the counters lag by one call."""
    world.runtime.counters()
    counters = world.runtime.counters()
    return counters["audited_rows"], counters["mismatches"]


def first_rows(world: World, client: Client, num: int = 64) -> torch.Tensor:
    """Positions 0..num-1 of the request, as top-k [1, top_k] with holes behind them."""
    positions = torch.full((1, world.sizes.top_k), -1, dtype=torch.int32)
    positions[0, :num] = torch.arange(num, dtype=torch.int32)
    return positions


def sealed(world: World, length: int = 700, seed: int = 0) -> Client:
    """A request whose prompt is written, sealed and has its checksums."""
    client = world.start(length, seed=seed)
    world.settle()
    return client


def sweep(world: World, client: Client) -> None:
    """Look at the request's first page until every row of it has been among the sampled ones."""
    for _ in range(-(-world.sizes.top_k // SAMPLED)):
        world.resolve([client], first_rows(world, client))


# ---- checksums -------------------------------------------------------------------------------------------------------


def test_resident_rows_are_looked_at(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a resident row that changes is found, wherever it lies. Method: one byte of one row, in each layer of a group."""
    client = sealed(world)
    sweep(world, client)
    seen, wrong = tally(world)
    assert seen >= world.sizes.top_k and wrong == 0
    page = world.pages(client)[0]
    row = int(world.book.device_page[page]) * PAGE + 37
    for layer in (0, 1):
        world.pool.layer_rows(layer)[row, 77] ^= 4
        caplog.clear()
        before = tally(world)[1]
        sweep(world, client)
        assert tally(world)[1] > before, layer
        world.pool.layer_rows(layer)[row, 77] ^= 4
        (message, *_) = caplog.messages
        for words in (f"slot {client.slot}", f"layer {layer}, position 37, logical page {page}, device row {row}"):
            assert words in message
        assert "when it was sealed" in message and "-> DIRTY, device page" in message


def test_a_row_of_another_page_is_found(world: World) -> None:
    """Goal: translation is checked, not only memory. Method: two pages exchange their device pages behind the book's back."""
    client = sealed(world)
    first, second = world.pages(client)[:2]
    table = world.allocator.page_table
    table[first], table[second] = int(table[second]), int(table[first])
    sweep(world, client)
    assert tally(world)[1] > 0
    world.is_broken = True


def test_rows_being_written_are_passed_over(world: World) -> None:
    """Goal: no false alarm for what is not sealed. Method: rows of the open page, rewritten between two looks."""
    client = sealed(world, 40)
    sweep(world, client)
    world.pool.layer_rows(0)[int(world.book.device_page[world.pages(client)[0]]) * PAGE + 3, 0] ^= 1
    sweep(world, client)
    assert tally(world) == (0, 0)


def test_checksums_are_never_zero() -> None:
    """Goal: 0 can mean "none". Method: rows of zeros, and random ones; a changed byte changes the sum."""
    weights = torch.tensor([1, 3, 5, 7], dtype=torch.int32)
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1000, 16), dtype=np.uint8))
    rows[0] = 0
    sums = row_sums(rows, weights)
    assert (sums != 0).all()
    rows[:, 5] ^= 2
    assert (row_sums(rows, weights) != sums).all()


def test_a_page_taken_over_from_a_duplicate_has_no_checksum(world: World) -> None:
    """Goal: equal tokens may have unequal bytes, and both are right. Method: the tree's page is rehomed, its bytes differ."""
    first, second = (world.client(world.prompt(330)) for _ in range(2))
    world.extend(first, second)
    world.publish(first)
    world.settle()
    pages = world.pages(first)[:5]
    world.finish(first)
    assert world.runtime.make_room(world.num_free_device + 5)
    world.settle()
    assert all(map(world.book.is_host_only, pages))
    row = int(world.book.device_page[world.pages(second)[0]]) * PAGE + 11
    world.pool.layer_rows(0)[row, 20] ^= 1  # the other batch shape has rounded otherwise
    world.publish(second)
    assert world.pages(second)[:5] == pages and world.residency.counters.pages_rehomed == 5
    world.settle()
    sweep(world, second)
    assert tally(world)[1] == 0


# ---- poison ----------------------------------------------------------------------------------------------------------


def is_poisoned(rows: torch.Tensor) -> bool:
    return bool((rows == POISON_BYTE).all())


def test_freed_memory_is_overwritten(bare: World) -> None:
    """Goal: nothing of an ended request can be read. Method: a mixed request ends; its device pages and host pages."""
    client, other = sealed(bare), sealed(bare, 300, seed=7)
    bare.go_mixed(client)
    pages = bare.pages(client)
    device_pages = [int(bare.book.device_page[page]) for page in pages if bare.book.device_page[page]]
    assert 0 < len(device_pages) < len(pages)
    bare.finish(client, checkpoint=False)
    bare.decode(other)
    for layer in range(bare.sizes.layers):
        host, device = bare.runtime.mem_pool_host.layer_rows(layer), bare.pool.layer_rows(layer)
        assert all(is_poisoned(host[page * PAGE : (page + 1) * PAGE]) for page in pages)
        assert all(is_poisoned(device[page * PAGE : (page + 1) * PAGE]) for page in device_pages)
        assert not device[:PAGE].any() and not host[:PAGE].any(), "the pad page belongs to all"
    assert bare.wrong_rows(other) == 0


def test_a_new_owner_writes_after_the_poison(bare: World) -> None:
    """Goal: poison never hits a living page. Method: pages are freed and given to the next request within one step."""
    for seed in range(4):
        client = bare.start(900, seed=seed)
        bare.decode(client)
        assert bare.wrong_rows(client) == 0
        bare.finish(client, checkpoint=False)
    last = bare.start(900, seed=9)
    assert bare.wrong_rows(last) == 0
    bare.settle()
    assert bare.wrong_rows(last) == 0


def test_a_copy_under_way_does_not_survive_the_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a late host copy of an ended request is overwritten too. Method: a link that does nothing by itself."""
    with engine_for(radix=False) as engine:
        engine.link._max_batches = 0
        handle = submit(engine, [600], 8)[0]
        engine.run_until(lambda: len(handle.output) > 2)
        slot = engine.find(handle).kv.req_pool_idx
        pages = engine.coordinator.residency.book.pages(slot).tolist()
        assert engine.coordinator.residency.has_transfers
        engine.run_until(lambda: handle.finished)
        later = submit(engine, [70], 3, seed=1)
        engine.run_until(lambda: later[0].finished)
        engine.coordinator.settle()
        reused = set(np.flatnonzero(engine.coordinator.residency.book.state).tolist())
        rows = engine.coordinator.mem_pool_host.layer_rows(0)
        kept = [page for page in pages if page not in reused]
        assert len(kept) > 5
        written = [page for page in kept if not is_poisoned(rows[page * PAGE : (page + 1) * PAGE])]
        assert len(written) <= 2, "only pages that the later request used may hold something else"
        assert_outputs([handle, *later])
        finish(engine)


def test_a_landing_waits_for_the_poison(bare: World) -> None:
    """Goal: R7, what storage loads into a freed page is not overwritten. Method: ask before and after the next step."""
    client, other = sealed(bare), sealed(bare, 300, seed=7)
    pages = bare.pages(client)
    bare.runtime.settle()
    bare.finish(client, checkpoint=False)
    assert not any(map(bare.residency.is_landing_target, pages))
    bare.decode(other)
    bare.decode(other)
    assert all(map(bare.residency.is_landing_target, pages))


def test_a_stale_read_is_found(bare: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: reading an ended request's memory is seen. Method: another request's snapshot names its pages, two ways."""
    victim, reader = sealed(bare), sealed(bare, 700, seed=5)
    stale, at = bare.pages(victim)[0], int(bare.book.device_page[bare.pages(victim)[0]])
    bare.finish(victim, checkpoint=False)
    bare.decode(reader)
    sweep(bare, reader)
    assert tally(bare)[1] == 0
    own = bare.pages(reader)[0]
    table = bare.allocator.page_table
    good = int(table[own])
    table[own] = at  # a table entry that was not taken back
    sweep(bare, reader)
    assert tally(bare)[1] > 0 and "memory of a request that has ended" in caplog.text
    table[own] = good
    bare.go_mixed(reader)
    before = tally(bare)[1]
    bare.request_pool.req_to_token[reader.slot, :PAGE] = torch.arange(stale * PAGE, (stale + 1) * PAGE)
    bare.resolve([reader], first_rows(bare, reader))  # an id that was not taken back: its row comes from the host
    assert tally(bare)[1] > before
    bare.is_broken = True


def test_reports_are_bounded(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a broken server does not fill its disk. Method: damage that is found again and again."""
    client = sealed(world)
    world.pool.layer_rows(0)[int(world.book.device_page[world.pages(client)[0]]) * PAGE :, 9] ^= 1
    for _ in range(3 * MOST_REPORTS):
        world.resolve([client], first_rows(world, client))
        world.runtime.counters()
    assert len(caplog.messages) == MOST_REPORTS
    world.is_broken = True


def test_the_request_is_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the log names the request as its client knows it. Method: a scheduler whose running batch holds it."""
    client = world.start(700)
    world.runtime._scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=[client.req]))
    world.settle()
    world.pool.layer_rows(0)[int(world.book.device_page[world.pages(client)[0]]) * PAGE + 5, 9] ^= 1
    sweep(world, client)
    tally(world)
    assert f"request {client.req.rid} (slot {client.slot})" in caplog.text


# ---- no false alarm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hybrid", "always_host"])
@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
def test_a_sound_server_is_clean(radix: bool, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the audit is silent where all is well, and poison hurts nobody. Method: a random life of SGLang's scheduler."""
    caplog.set_level(logging.ERROR)
    with engine_for(radix=radix, mode=mode) as engine:
        handles = random_life(engine, seed=17, num_events=50)
        assert_prefix_of_reference(handles)
        assert_outputs([handle for handle in handles if handle.finish_reason != "abort"])
        engine.coordinator.counters()
        counters = engine.coordinator.counters()
        assert counters["audited_rows"] > 1000 and counters["mismatches"] == 0
        assert not [message for message in caplog.messages if "audit" in message]
        finish(engine)
