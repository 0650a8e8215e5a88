"""Goal: a backend that raises, hangs or lies costs its pages and nothing else. Method: stand between a server and its backend, and
interrupt loads at the moments that hurt."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from harness.checks import assert_no_request_left, assert_outputs, assert_pools_empty, assert_prefix_of_reference
from harness.engine import Engine
from harness.hisparse import finish

from sglang_hisparse.errors import ConfigError

from .backends import Gate, between
from .servers import PAGE, counts, prefilled, prompt, publish, run, serve, server, submit

PAGES = 12
PROMPT = prompt(PAGES * PAGE + 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prompt's pages."""
    folder = tmp_path_factory.mktemp("published")
    with server(folder) as engine:
        serve(engine, [PROMPT], new=2)
        assert publish(engine) == PAGES
    return folder


def wait_for(engine: Engine, gate: Gate, seconds: float = 20) -> None:
    """Step until a call of the backend stands before the gate."""
    ends = time.monotonic() + seconds
    while not gate.entered.is_set():
        assert time.monotonic() < ends
        engine.step()


@pytest.mark.parametrize("method", ["batch_exists", "batch_get"])
def test_a_backend_that_raises_is_a_miss(folder: Path, method: str) -> None:
    """Goal: no exception leaves the tier. Method: every call of one kind raises; the request is computed instead."""

    def refuse(name: str) -> None:
        if name == method:
            raise OSError("the disk is gone")

    with server(folder) as engine:
        between(engine).before = refuse
        (handle,) = serve(engine, [PROMPT])
        assert_outputs([handle])
        found = counts(engine)
        assert handle.cached_tokens == 0 and found["storage_errors"] > 0 and found["storage_pages_loaded"] == 0
        finish(engine)


@pytest.mark.parametrize("answer", [None, [], 7, "yes", [None]], ids=str)
def test_a_nonsense_answer_is_a_miss(folder: Path, answer: object) -> None:
    """Goal: answers of a strange shape are not believed. Method: batch_get answers something else than tensors."""
    with server(folder) as engine:
        between(engine).answers["batch_get"] = lambda real: answer
        (handle,) = serve(engine, [PROMPT])
        assert_outputs([handle])
        assert handle.cached_tokens == 0 and counts(engine)["storage_pages_loaded"] == 0


def test_a_backend_that_cannot_store_costs_nothing(tmp_path: Path) -> None:
    """Goal: publishing fails alone. Method: batch_set raises once and refuses afterwards; both are counted."""
    with server(tmp_path) as engine:
        backend = between(engine)
        failures = iter([OSError("full")])

        def fail_once(name: str) -> None:
            if name == "batch_set" and (error := next(failures, None)) is not None:
                raise error

        backend.before, backend.answers["batch_set"] = fail_once, lambda real: False
        assert_outputs(serve(engine, [PROMPT]))
        assert publish(engine) == 0
        found = counts(engine)
        assert found["storage_pages_dropped"] == PAGES and found["storage_errors"] == 1
        finish(engine)


def test_a_slow_lookup_is_not_waited_for_longer_than_allowed(folder: Path) -> None:
    """Goal: the wait is bounded. Method: a lookup that hangs; the request starts without it while the call still hangs."""
    with server(folder, wait_seconds=0.2) as engine:
        gate = Gate("batch_exists")
        between(engine).before = gate
        handle = submit(engine, PROMPT)
        wait_for(engine, gate)
        run(engine)
        assert_outputs([handle])
        assert handle.cached_tokens == 0 and counts(engine)["storage_waits_expired"] == 1
        gate.open()
        finish(engine)


def test_what_has_arrived_in_time_is_used(folder: Path) -> None:
    """Goal: best effort. Method: the second call for pages hangs; the request starts with those of the first, the hanging read
    writes nothing later, and its logical pages are free."""
    with server(folder, wait_seconds=0.3) as engine:
        gate = Gate("batch_get", after=1)
        between(engine).before = gate
        handle = submit(engine, PROMPT)
        wait_for(engine, gate)
        run(engine)
        assert_outputs([handle])
        found = counts(engine)
        assert found["storage_waits_expired"] == 1
        assert 0 < found["storage_pages_loaded"] < PAGES
        assert handle.cached_tokens == found["storage_pages_loaded"] * PAGE
        assert_no_request_left(engine)
        again = submit(engine, PROMPT + handle.output)
        gate.open()
        run(engine)
        assert_outputs([again])
        finish(engine)


def test_others_run_while_pages_are_loaded(folder: Path) -> None:
    """Goal: a load stops nobody, and SGLang's count of tokens is right meanwhile. Method: a decode goes on while a read hangs; its busy
    check runs in every step."""
    with server(folder) as engine:
        gate = Gate("batch_get")
        between(engine).before = gate
        running = submit(engine, prompt(200, seed=3), 60)
        engine.step(4)
        handle = submit(engine, PROMPT)
        wait_for(engine, gate)
        assert engine.coordinator.storage.loading_tokens == PAGES * PAGE
        engine.run_until(lambda: running.finished)
        assert not handle.output and engine.coordinator.storage.loading_tokens == PAGES * PAGE
        gate.open()
        run(engine)
        assert_outputs([running, handle])
        assert handle.cached_tokens == PAGES * PAGE
        finish(engine)


@pytest.mark.parametrize("method", ["batch_exists", "batch_get"])
def test_abort_while_loading(folder: Path, method: str) -> None:
    """Goal: an aborted request leaves nothing behind, and nobody's rows are overwritten. Method: abort while a call hangs; others
    take all logical pages, and then the call returns."""
    with server(folder) as engine:
        gate = Gate(method, after=int(method == "batch_get"))
        between(engine).before = gate
        handle = submit(engine, PROMPT)
        wait_for(engine, gate)
        assert engine.coordinator.storage.loading_tokens == (0 if method == "batch_exists" else PAGES * PAGE)
        engine.abort(handle)
        engine.step()
        assert handle.finish_reason == "abort" and engine.coordinator.storage.loading_tokens == 0
        engine.coordinator.storage.is_on = False
        others = [submit(engine, prompt(900, seed), 40) for seed in range(1, 9)]
        engine.step(20)
        gate.open()
        run(engine, 60)
        assert_outputs(others)
        assert_prefix_of_reference([handle])
        finish(engine)


def test_flush_while_loading(folder: Path) -> None:
    """Goal: a flush empties the tree and keeps storage. Method: a load is stopped half-way by abort and flush in one step; the same
    prompt is found in storage again afterwards."""
    with server(folder) as engine:
        gate = Gate("batch_get", after=1)
        between(engine).before = gate
        handle = submit(engine, PROMPT)
        wait_for(engine, gate)
        engine.abort(handle)
        assert engine.flush()
        assert_pools_empty(engine)
        gate.open()
        (again,) = serve(engine, [PROMPT])
        assert_outputs([again])
        assert again.cached_tokens == PAGES * PAGE
        finish(engine)


def test_pages_freed_while_they_are_being_published_are_dropped(tmp_path: Path) -> None:
    """Goal: what storage holds is right although its source may end at any time. Method: publishing hangs before each page, the cache
    is flushed and refilled by another prompt, then publishing goes on; the next server judges what was stored."""
    with server(tmp_path) as engine:
        gate = Gate("batch_exists", thread="publish")
        between(engine).before = gate
        serve(engine, [PROMPT], new=2)
        wait_for(engine, gate)
        assert engine.flush()
        other = engine.submit(prompt(PAGES * PAGE + 9, seed=5), 2)
        engine.step(5)
        gate.open()
        run(engine)
        assert_outputs([other])
        publish(engine)
        found = counts(engine)
        assert found["storage_pages_dropped"] >= PAGES and found["storage_pages_published"] >= 1
    with server(tmp_path) as engine:
        handles = serve(engine, [PROMPT, prompt(PAGES * PAGE + 9, seed=5)])
        assert_outputs(handles)
        assert counts(engine)["storage_pages_corrupt"] == 0


def test_a_server_that_ends_publishes_what_is_complete(tmp_path: Path) -> None:
    """Goal: an orderly end loses nothing that had reached the host. Method: close a server right behind its last token."""
    with server(tmp_path, link_seed=None) as engine:
        serve(engine, [PROMPT], new=2)
    with server(tmp_path) as engine:
        (handle,) = serve(engine, [PROMPT])
        assert handle.cached_tokens == PAGES * PAGE


def test_new_weights_switch_storage_off(folder: Path) -> None:
    """Goal: pages of other weights are never mixed. Method: SGLang records an update of the weights while the server runs."""
    with server(folder) as engine:
        engine.scheduler.weight_updater.record_weight_version_after_update("2")
        (handle,) = serve(engine, [PROMPT])
        assert_outputs([handle])
        assert handle.cached_tokens == 0 and not engine.coordinator.storage.is_on
        assert prefilled(engine) >= len(PROMPT)
        finish(engine)


def test_a_backend_that_forgets_is_refused_at_start(tmp_path: Path) -> None:
    """Goal: a backend that cannot serve is noticed before requests come. Method: a class that stores nothing."""
    extra = {"backend_name": "forgetful", "module_path": "storage.backends", "class_name": "Forgetful"}
    keys = {"storage_backend": "dynamic", "storage_extra_config": {**extra, "file_storage_path": str(tmp_path)}}
    with pytest.raises(ConfigError, match="does not give back"), server(tmp_path, config=keys):
        pass


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    """Goal: `dynamic` reaches any class with HiCache's interface. Method: one publishes, the other loads."""
    extra = {"backend_name": "own", "module_path": "storage.backends", "class_name": "OwnBackend"}
    keys = {"storage_backend": "dynamic", "storage_extra_config": {**extra, "file_storage_path": str(tmp_path)}}
    with server(tmp_path, config=keys) as engine:
        serve(engine, [PROMPT], new=2)
        publish(engine)
    with server(tmp_path, config=keys) as engine:
        (handle,) = serve(engine, [PROMPT])
        assert_outputs([handle])
        assert handle.cached_tokens == PAGES * PAGE
