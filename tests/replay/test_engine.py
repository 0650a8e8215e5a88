"""Goal: the replay shows every residency mode with right bytes, and notices wrong ones. Method: small runs, planted faults."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

from replay.small import small_options
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.replay.engine import Engine
from sglang_hisparse.replay.faults import FAULTS
from sglang_hisparse.replay.figures import ReplayReport
from sglang_hisparse.replay.profiles import PROFILES
from sglang_hisparse.replay.workload import Phase, standard_phases
from sglang_hisparse.residency import PageState


@pytest.fixture(scope="module")
def report() -> ReplayReport:
    return Engine(small_options()).run()


def test_default_script_shows_all_residency_modes(report: ReplayReport) -> None:
    """Goal: full, mixed and none, each with right bytes. Method: the standard phases on a small pool."""
    total = report.total
    assert report.ok and not report.problems
    assert min(total.request_steps_full, total.request_steps_mixed, total.request_steps_none) > 50
    assert total.started_on_host > 0
    assert min(total.pages_mirrored, total.pages_spilled, total.pages_promoted) > 50
    assert total.finished == total.arrived > 20
    assert total.rows_checked > 100_000


def test_counts_agree_with_each_other(report: ReplayReport) -> None:
    """Goal: the figures are of one run. Method: sums over phases and profiles, bytes from pages and rows."""
    options, total = small_options(), report.total
    for name in ("steps", "pages_spilled", "rows_checked", "rows_fetched", "bytes_to_host", "arrived"):
        assert sum(getattr(phase.counts, name) for phase in report.phases) == getattr(total, name)
    assert sum(profile.rows for profile in report.profiles) == total.rows_resident + total.rows_hot + total.rows_fetched
    layer_bytes = options.page_bytes * options.num_layers
    assert total.bytes_to_host == total.pages_mirrored * layer_bytes
    fetched_bytes = total.rows_fetched * options.row_bytes * options.layers_per_group
    # A page that is freed between its promotion and the plan is not copied.
    assert fetched_bytes < total.bytes_to_device <= total.pages_promoted * layer_bytes + fetched_bytes


def test_everything_fits_first(report: ReplayReport) -> None:
    """Goal: without pressure nothing is fetched. Method: the warm-up phase has full residency alone and no lease."""
    warm_up = report.phases[0].counts
    assert warm_up.request_steps_full > 0
    assert warm_up.request_steps_mixed == warm_up.request_steps_none == warm_up.leases_acquired == warm_up.rows_fetched == 0


def test_equal_seeds_give_equal_runs(report: ReplayReport) -> None:
    """Goal: a failure can be repeated. Method: the same options twice; only the time differs."""
    again = Engine(small_options()).run()
    assert dataclasses_of(again) == dataclasses_of(report)
    assert dataclasses_of(Engine(small_options(seed=2)).run()) != dataclasses_of(report)


def dataclasses_of(report: ReplayReport) -> list[dict[str, float]]:
    rows = [{name: getattr(phase.counts, name) for name in phase.counts.__struct_fields__} for phase in report.phases]
    for row in rows:
        del row["seconds"]
    return rows


@pytest.mark.parametrize("mirroring", ["eager", "on_pressure"])
@pytest.mark.parametrize("residency", ["hybrid", "always_host"])
def test_every_setting_keeps_the_bytes(residency: str, mirroring: str) -> None:
    """Goal: the policy changes where rows are, never what they hold. Method: each mode with each way to mirror."""
    report = Engine(small_options(residency=residency, mirroring=mirroring, seed=3)).run()
    assert report.ok, report
    if residency == "always_host":
        assert report.total.request_steps_full == 0 < report.total.request_steps_none


@pytest.mark.parametrize("profile", list(PROFILES))
def test_every_profile_runs(profile: str) -> None:
    """Goal: each profile drives the engine. Method: one run each, with three index groups of different depth."""
    report = Engine(small_options(profile=profile, num_groups=3, layers_per_group=1, scale=0.2)).run()
    assert report.ok
    assert [item.name for item in report.profiles] == [profile]


def test_duplicated_prefixes_are_shared_and_rehomed() -> None:
    """Goal: the tree's pages replace a request's own (R22). Method: seeds whose runs re-home pages on the way."""
    reports = [Engine(small_options(seed=seed)).run() for seed in (5, 9)]
    assert all(report.ok for report in reports)
    assert sum(report.total.pages_rehomed for report in reports) > 0


def test_shortage_of_logical_pages_retracts() -> None:
    """Goal: retracted requests come back and end with right bytes. Method: fewer logical pages than the requests want."""
    report = Engine(small_options(host_to_device_ratio=1.2, max_output=90)).run()
    assert report.ok, report
    assert report.total.retracted > 0
    assert report.total.finished == report.total.arrived


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_planted_fault_is_found(fault: str) -> None:
    """Goal: the check can fail. Method: a worker that breaks one promise; nothing else differs."""
    report = Engine(small_options(), FAULTS[fault]).run()
    assert not report.ok
    assert report.total.mismatches > 0


def test_one_flipped_host_byte_is_found() -> None:
    """Goal: a single byte is enough. Method: flip one of a host-only page's that a running request is about to select."""
    options = small_options(profile="adv8")
    engine = Engine(options)
    warm_up, _, pressure = standard_phases(options)[:3]
    for phase, steps in ((warm_up, 30), (pressure, 60)):
        for _ in range(steps):
            engine.step(phase)
    assert engine.snapshot().mismatches == 0
    book = engine.coordinator.book
    pages = np.concatenate([book.pages(request.slot) for request in engine.running if not request.is_prefilling])
    on_host = pages[book.state[pages] == PageState.HOST]
    assert on_host.size
    engine.executor.host[1, int(on_host[0]) * options.page_size + 3, 5] ^= 1
    for _ in range(60):
        engine.step(pressure)
    assert engine.snapshot().mismatches > 0
    engine.executor.close()


def test_one_wrong_table_entry_is_found() -> None:
    """Goal: a page table that points elsewhere shows. Method: swap two resident pages of one running request."""
    options = small_options()
    engine = Engine(options)
    phase = Phase("load", 30, 2, 0.0, "")
    for _ in range(30):
        engine.step(phase)
    assert engine.snapshot().mismatches == 0
    table = engine.executor.hot.page_table
    pages = torch.from_numpy(engine.coordinator.book.pages(engine.running[0].slot)[:2].astype(np.int64))
    table[pages] = table[pages.flip(0)]
    engine.step(phase)
    assert engine.snapshot().mismatches > 0
    engine.executor.close()


def test_host_memory_is_the_real_one() -> None:
    """Goal: host row number == logical id, in the production mapping. Method: read one row through its address."""
    engine = Engine(small_options())
    engine.step(Phase("load", 1, 1, 0.0, ""))
    executor = engine.executor
    address = int(executor.hot.host_bases[2]) + 5 * engine.options.row_bytes
    assert ctypes.string_at(address, 16) == executor.host[2, 5].numpy().tobytes()
    assert executor.host_memory.address <= address < executor.host_memory.address + executor.host_memory.num_bytes
    executor.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_size": 72}, "multiple of the page"),
        ({"buffer_size": 16}, "at least top_k"),
        ({"row_bytes": 24}, "multiple of 16"),
        ({"device_pages": 20}, "at least 3"),
        ({"profile": "none"}, "mix, easy"),
        ({"host_to_device_ratio": 0.5}, "at least 1"),
        ({"page_size": 48}, "power of two"),
        ({"device": "tpu"}, "cpu or cuda"),
    ],
)
def test_options_are_checked(change: dict[str, object], message: str) -> None:
    """Goal: a bad option is refused before anything is allocated. Method: one case per rule."""
    with pytest.raises(ConfigError, match=message):
        small_options(**change)


@pytest.mark.gpu
def test_cuda_run_keeps_the_bytes() -> None:
    """Goal: streams, events and CUDA kernels give the same bytes and decisions. Method: the small run on both devices."""
    on_gpu, on_cpu = (Engine(small_options(device=device)).run() for device in ("cuda", "cpu"))
    assert on_gpu.ok
    for name in ("pages_spilled", "pages_promoted", "request_steps_none", "rows_checked", "rows_resident"):
        assert getattr(on_gpu.total, name) == getattr(on_cpu.total, name), name


def test_options_are_immutable() -> None:
    """Goal: a run's parameters are what its report says. Method: assignment fails, the report carries every field."""
    options = small_options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 5  # type: ignore[misc]
    assert dataclasses.asdict(options).keys() == {field.name for field in dataclasses.fields(options)}
