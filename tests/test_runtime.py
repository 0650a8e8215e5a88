"""Goal: the class that SGLang calls keeps its books and its promises. Method: the real runtime on tiny CPU pools."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runtime_world import Client, Sizes, World, make_world

from sglang_hisparse.audit import AUDIT_VARIABLE, FAULT_VARIABLE, RowFault
from sglang_hisparse.errors import ConfigError, HiSparseError, InvariantError
from sglang_hisparse.residency import Owner, PageState, Residency
from sglang_hisparse.runtime import HiSparseRuntime


@pytest.fixture
def world() -> Iterator[World]:
    """24 device pages, 96 logical ones, hot buffers of two pages, two layers a group."""
    with make_world() as world:
        yield world


def pick(world: World, positions: list[int], count: int, seed: int = 0) -> torch.Tensor:
    """Top-k int32 [1, top_k]: `count` of the positions, then holes."""
    top_k = torch.full((1, world.sizes.top_k), -1, dtype=torch.int32)
    top_k[0, :count] = torch.from_numpy(np.random.default_rng(seed).permutation(positions)[:count].astype(np.int32))
    return top_k


def assert_right_rows(world: World, client: Client, top_k: torch.Tensor, layer: int) -> None:
    """Every device row that the resolver gives holds the token that was asked for."""
    rows = world.resolve([client], top_k, layer)[0].cpu()
    wanted = top_k[0][top_k[0] >= 0].numpy()
    assert (rows[len(wanted) :] == -1).all() and (rows[: len(wanted)] > 0).all()
    found = world.rows(layer, rows[: len(wanted)].to(world.device))
    assert (found == world.expected(client, wanted, layer)).all()


# ---- wiring ----------------------------------------------------------------------------------------------------------


def test_a_mixture_with_sglangs_classes_is_refused(world: World) -> None:
    """Goal: never a mixture. Method: another allocator, another pool, draft tokens."""
    pool, arguments = world.request_pool, (64, 128, "cpu", None)
    other = SimpleNamespace(get_kvcache=lambda: world.pool)
    with pytest.raises(HiSparseError, match="SimpleNamespace where HiSparseAllocator"):
        HiSparseRuntime(pool, other, *arguments)
    world.allocator._kvcache, ours = object(), world.pool
    with pytest.raises(HiSparseError, match="object where HiSparsePool"):
        HiSparseRuntime(pool, world.allocator, *arguments)
    world.allocator._kvcache = ours
    with pytest.raises(HiSparseError, match="speculative decoding"):
        HiSparseRuntime(pool, world.allocator, *arguments, num_draft_tokens=2)


def test_the_staging_flag_goes_off(world: World) -> None:
    """Goal: R31, nothing waits outside a batch. Method: bind a scheduler; ask for staged requests."""
    scheduler = SimpleNamespace(tree_cache=world.tree, enable_hisparse=True)
    world.runtime.bind_scheduler(scheduler)
    assert scheduler.enable_hisparse is False
    client = world.start(100)
    world.runtime.admit_request_into_staging(client.req)
    assert world.runtime.collect_ready_reqs() == [] and world.runtime.ack_staging_queue == []
    world.decode(client)


def test_every_method_that_sglang_calls_is_there() -> None:
    """Goal: no AttributeError in a scheduler. Method: the public methods of the built-in class that colocated DSA uses."""
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator

    used = ["set_decode_producer_stream", "allocate_spec_scratch", "admit_request_into_staging", "collect_ready_reqs", "retract_req", "has_ongoing_staging", "map_last_loc_to_buffer", "wait_for_pending_backup", "swap_in_selected_pages", "request_finished", "get_token_stats", "destroy"]
    for name in used:
        assert callable(getattr(HiSparseCoordinator, name)) and callable(getattr(HiSparseRuntime, name)), name


# ---- the one release -------------------------------------------------------------------------------------------------


def test_release_is_idempotent_and_keyed_by_slot(world: World) -> None:
    """Goal: R12, every path may release, once or twice. Method: release one of two mixed requests again and again."""
    first, second = world.start(700, seed=1), world.start(700, seed=2)
    assert world.runtime.make_room(12)
    world.settle()
    slot, other = first.slot, second.slot
    assert world.book.leased[[slot, other]].all()
    world.runtime.request_finished(first.req)
    world.runtime.request_finished(first.req)
    world.runtime.release_slots([slot])
    world.runtime.release_slots([slot])
    assert world.residency.counters.leases_released == 1
    assert not world.book.live[slot] and world.book.live[other] and world.book.leased[other]
    assert world.allocator.device_pages.count(Owner.HOT) == 2
    assert world.book.num_free == 96 - 22, "the release of a slot frees no page (R11)"
    world.tree.free_kv_row(first.req.kv, [(0, 0)])
    world.residency.free([page for page in range(1, 97) if world.book.state[page] and not world.book.users[page]])
    world.tree.reset()
    world.is_broken = True  # the tree has forgotten the second request's prefix


def test_a_slot_is_clean_for_its_next_request(world: World) -> None:
    """Goal: no state of a former owner meets a new one (R12). Method: slots are reused at once, last in first out."""
    first = world.start(700)
    world.go_mixed(first)
    slot = first.slot
    world.finish(first, checkpoint=False)
    second = world.start(130, seed=5)
    assert second.slot == slot and not world.book.leased[slot]
    assert world.residency.residency(slot) is Residency.FULL
    world.settle()
    assert not world.runtime.hot.hot_pages[slot].any() and world.wrong_rows(second) == 0


def test_a_finished_request_gives_back_its_lease_alone(world: World) -> None:
    """Goal: R11, pages leave through the allocator. Method: announce the end of a mixed request; look at its pages."""
    client = world.start(700)
    world.go_mixed(client)
    pages = world.pages(client)
    world.runtime.request_finished(client.req)
    assert world.allocator.device_pages.count(Owner.HOT) == 0
    assert world.pages(client) == pages and (world.book.state[pages] != PageState.FREE).all()
    world.finish(client)


def test_a_request_that_never_ran_may_end(world: World) -> None:
    """Goal: aborts in the queue pass through. Method: a request without a slot."""
    world.runtime.request_finished(world.client(world.prompt(10)).req)


# ---- flush -----------------------------------------------------------------------------------------------------------


def test_clear_forgets_everything(world: World) -> None:
    """Goal: R29, a flush leaves empty pools and tables. Method: clear with leases, host pages and plans outstanding."""
    client = world.start(700)
    world.go_mixed(client)
    world.decode(client)
    world.tree.reset()
    world.allocator.clear()
    world.request_pool.clear()
    assert world.num_free_device == 24 and world.num_free_logical == 96 and not world.runtime.has_ongoing_staging()
    world.runtime.before_forward()
    assert not world.allocator.page_table.any() and not world.runtime.hot.hot_pages.any()
    again = world.start(500, seed=8)
    world.settle()
    assert world.wrong_rows(again) == 0


def test_acknowledgements_from_before_a_flush_change_nothing(world: World) -> None:
    """Goal: I5. Method: copies of the old life are reported complete after the flush, and new pages have their numbers."""
    world.start(700)
    world.residency.mirror(world.residency.mirror_backlog(100))
    late = list(world.residency._transfers)
    assert late
    world.tree.reset()
    world.allocator.clear()
    world.request_pool.clear()
    again = world.start(700, seed=1)
    states = world.book.state.copy()
    world.residency.on_completed(late)
    world.residency.on_enqueued(late)
    assert (world.book.state == states).all() and world.residency.counters.stale_acknowledgements == 2 * len(late)
    world.settle()
    assert world.wrong_rows(again) == 0


def test_not_idle_while_a_copy_is_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: R29, nothing is flushed under a copy. Method: a worker whose copies are not yet complete."""
    client = world.start(700)
    poll = world.runtime.worker.poll
    monkeypatch.setattr(world.runtime.worker, "poll", list)
    world.decode(client)
    assert world.runtime.has_ongoing_staging()
    monkeypatch.setattr(world.runtime.worker, "poll", poll)
    world.decode(client)
    assert not world.runtime.has_ongoing_staging()


# ---- decode ----------------------------------------------------------------------------------------------------------


def test_all_residencies_resolve_in_one_batch(world: World) -> None:
    """Goal: full, mixed and none in one call. Method: three requests; each row is compared with its token."""
    full = world.start(200, seed=1)
    mixed = world.start(500, seed=2)
    none = world.start(500, seed=3)
    assert world.runtime.make_room(11)
    world.settle()
    kinds = [world.residency.residency(client.slot) for client in (full, mixed, none)]
    assert Residency.FULL in kinds and {Residency.MIXED, Residency.NONE} & set(kinds), kinds
    for step in range(4):
        world.decode(full, mixed, none)
        clients = [full, mixed, none]
        top_k = torch.cat([pick(world, list(range(client.length)), 64, step) for client in clients])
        for layer in range(4):
            rows = world.resolve(clients, top_k, layer)
            for index, client in enumerate(clients):
                found = world.rows(layer, rows[index])
                assert (found == world.expected(client, top_k[index].numpy(), layer)).all(), (step, layer, index)
    for _ in range(2):
        counters = world.runtime.counters()
    assert counters["errors"] == 0 and counters["rows_fetched"] > 0 and counters["rows_resident"] > 0


def test_followers_reuse_their_leaders_rows(world: World) -> None:
    """Goal: one resolve a group. Method: layers 0 and 1 of a group, then layer 2; the counters tell."""
    client = world.start(700)
    old = world.go_mixed(client)
    top_k = pick(world, old, 40)
    leader = world.resolve([client], top_k, 0).clone()
    world.runtime.counters()
    before = world.runtime.counters()["rows_fetched"]
    assert torch.equal(world.resolve([client], top_k, 1), leader)
    world.runtime.counters()
    assert world.runtime.counters()["rows_fetched"] == before
    assert_right_rows(world, client, top_k, 2)


def test_a_snapshot_that_is_too_short_is_an_error(world: World) -> None:
    """Goal: R3, the resolver never reads beyond the step's snapshot. Method: a snapshot of no rows."""
    client = world.start(200)
    slots, lengths, top_k = world.top_k_inputs([client], pick(world, [1, 2], 2))
    world.metadata.real_page_table = world.metadata.real_page_table[:0]
    with pytest.raises(InvariantError, match="page table of 0 rows"):
        world.runtime.swap_in_selected_pages(slots, lengths, top_k, 0)


def test_a_host_only_page_without_a_lease_stops_the_step(world: World) -> None:
    """Goal: R19 is checked before each forward. Method: take the lease of a mixed request away and decode."""
    client = world.start(700)
    world.go_mixed(client)
    world.residency.release_lease(client.slot)
    world.is_broken = True
    with pytest.raises(InvariantError, match="R19"):
        world.decode(client)


# ---- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda world: world.allocator.device_pages._free.pop(), "I2"),
        (lambda world: world.book.users.__setitem__(1, 3), "users"),
        (lambda world: world.residency.hot_lease.__setitem__(2, [7]), "I3"),
        (lambda world: setattr(world.allocator, "num_slow_frees", 2), "2 frees arrived as device tensors"),
    ],
)
def test_self_check_reports_planted_damage(world: World, plant: object, message: str) -> None:
    """Goal: SGLang's idle check hears of a leak. Method: one table is damaged behind the coordinator's back."""
    world.start(300)
    assert world.allocator.verify_byte_accounting() == []
    plant(world)
    world.is_broken = True
    (problem,) = world.allocator.verify_byte_accounting()
    assert problem.startswith("hisparse: ") and message in problem


@pytest.mark.parametrize("text", ["zero_rows", "zero_rows:", "zero_rows:x", "zero_rows:0", "zero_rows:1.5", "flip:0.1"])
def test_a_bad_fault_setting_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Goal: a soak run does not run without its fault. Method: settings that mean nothing."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    with pytest.raises(ConfigError, match=r"allowed: zero_rows:SHARE"):
        RowFault.from_env(None)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("", 0.0, 0.0), ("zero_rows:0.25", 0.2, 0.3), ("zero_rows:1", 1.0, 1.0)]
)
def test_faults_replace_their_share(monkeypatch: pytest.MonkeyPatch, text: str, low: float, high: float) -> None:
    """Goal: the planted share is what is asked for, alike in every layer. Method: many positions, with holes."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    fault = RowFault.from_env(None)
    top_k = torch.arange(20_000, dtype=torch.int32).view(100, 200)
    rows = torch.where(top_k % 10 == 0, -1, top_k + 64)
    faulty = fault.apply(rows, top_k)
    changed = faulty != rows
    assert low <= float(changed.sum() / (rows >= 0).sum()) <= high
    assert (faulty[changed] == 0).all() and (faulty[rows < 0] == -1).all()
    assert torch.equal(faulty, fault.apply(rows, top_k)) and (not text or faulty is not rows)


def audited(world: World) -> tuple[int, int]:
    """(rows audited, mismatches): the counters lag by one call."""
    world.runtime.counters()
    counters = world.runtime.counters()
    return counters["audited_rows"], counters["mismatches"]


def test_the_audit_finds_a_wrong_hot_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the audit bites, and is silent otherwise. Method: clean steps; then one bit of one hot row, per layer."""
    monkeypatch.setenv(AUDIT_VARIABLE, "1")
    with make_world() as world:
        client = world.start(700)
        old = world.go_mixed(client)
        for seed in range(3):
            assert_right_rows(world, client, pick(world, old, 50, seed), 0)
        rows_seen, wrong = audited(world)
        assert rows_seen >= 150 and wrong == 0
        top_k = pick(world, old, 50, 2)
        row = int(world.resolve([client], top_k, 0)[0, 7])
        for layer in (0, 1):
            world.pool.layer_rows(layer)[row, 100] ^= 1
            before = audited(world)[1]
            world.resolve([client], top_k, 0)
            # By the comparison with its home, and where the row is among the sampled ones by its checksum too.
            assert 1 <= audited(world)[1] - before <= 2, layer
            world.pool.layer_rows(layer)[row, 100] ^= 1


def test_the_audit_is_off_by_default(world: World) -> None:
    """Goal: production pays nothing. Method: no variable is set."""
    client = world.start(700)
    world.resolve([client], pick(world, world.go_mixed(client), 50), 0)
    assert audited(world) == (0, 0)


def test_the_statistics_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Goal: a run can show that it used the host tier. Method: a mixed request, then shutdown; read the file."""
    import json

    from sglang_hisparse.stats import STATS_VARIABLE

    monkeypatch.setenv(STATS_VARIABLE, str(tmp_path / "stats.json"))
    with make_world(Sizes()) as world:
        client = world.start(700)
        world.resolve([client], pick(world, world.go_mixed(client), 50), 0)
    counters = json.loads((tmp_path / "stats.json").read_text())
    assert counters["pages_spilled"] > 0 and counters["rows_fetched"] == 50 and counters["errors"] == 0
    assert counters["border_move_us"] == counters["admission_host_page_ns"] == 0, "no border moves here, and no gate believes anything"
