"""Goal: tenants share no memory in the tier, and nothing that a client sends indexes it unchecked.

Method: SGLang's scheduler with HiSparse on the CPU; equal prompts under different cache keys; requests that no honest client
sends, beside one that must come out right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs, assert_pools_empty, assert_residency_sound
from harness.engine import Engine, Handle
from harness.hisparse import PAGE, engine_for, finish, submit
from runtime_world import make_world

from sglang_hisparse.audit import AUDIT_VARIABLE

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap-loop"])
FIELDS = pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
PROMPT = np.random.default_rng(5).integers(10, 1000, 400).tolist()


def send(engine: Engine, prompt: list[int], new: int = 20, **fields: Any) -> Handle:
    """A request with further fields of SGLang's message, as they come from the network."""
    handle = engine.submit(prompt, new)
    for name, value in fields.items():
        assert hasattr(engine._inbox[-1], name), name
        setattr(engine._inbox[-1], name, value)
    return handle


def pages_of(engine: Engine, handle: Handle) -> set[int]:
    slot = engine.find(handle).kv.req_pool_idx
    return set(engine.coordinator.residency.book.pages(slot).tolist())


@LOOPS
@FIELDS
def test_tenants_at_once_share_no_page(field: str, overlap: bool) -> None:
    """Goal: equal prompts of two tenants stay apart, those of one do not. Method: three requests, de-duplication at work."""
    with engine_for(overlap=overlap) as engine:
        handles = [send(engine, PROMPT, 40, **{field: tenant}) for tenant in ("a", "b", "a")]
        engine.run_until(lambda: all(len(handle.output) > 3 for handle in handles))
        first, second, third = (pages_of(engine, handle) for handle in handles)
        assert not first & second and not second & third
        assert len(first & third) == len(PROMPT) // PAGE, "the test would pass without any sharing"
        engine.run_until_idle()
        assert_outputs(handles)
        finish(engine)


@LOOPS
@FIELDS
def test_a_cached_prefix_answers_its_tenant_only(field: str, overlap: bool) -> None:
    """Goal: another tenant's prefix is no hit, one's own is. Method: ask again under other keys, some of them much alike."""
    with engine_for(overlap=overlap) as engine:
        own = send(engine, PROMPT, **{field: "a"})
        engine.run_until_idle()
        for key in ("b", None, "A", "a "):
            stranger = send(engine, PROMPT, **{field: key})
            engine.run_until_idle()
            assert stranger.cached_tokens == 0, key
            assert_outputs([stranger])
        again = send(engine, PROMPT, **{field: "a"})
        engine.run_until_idle()
        assert again.cached_tokens >= len(PROMPT) // PAGE * PAGE - PAGE and own.cached_tokens == 0
        assert_outputs([own, again])
        finish(engine)


@LOOPS
def test_a_host_only_prefix_is_no_strangers(overlap: bool) -> None:
    """Goal: what lies on the host is not promoted for another tenant. Method: spill it, then a stranger asks, then its owner."""
    with engine_for(overlap=overlap) as engine:
        residency = engine.coordinator.residency
        own = send(engine, PROMPT, extra_key="a")
        engine.run_until_idle()
        pages = [page for page in range(1, residency.book.limits.num_logical_pages + 1) if residency.book.state[page]]
        submit(engine, [900, 900], 5, seed=5)
        engine.run_until_idle()
        assert all(map(residency.book.is_host_only, pages))
        stranger = send(engine, PROMPT, extra_key="b")
        engine.run_until(lambda: len(stranger.output) > 2)
        assert not pages_of(engine, stranger) & set(pages) and all(map(residency.book.is_host_only, pages))
        engine.run_until_idle()
        assert stranger.cached_tokens == 0
        again = send(engine, PROMPT, extra_key="a")
        engine.run_until_idle()
        assert again.cached_tokens > 0
        assert_outputs([own, stranger, again])
        finish(engine)


def test_nothing_of_an_ended_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: under audit no byte of an ended request stays in device pages or host rows. Method: search both for its rows."""
    monkeypatch.setenv(AUDIT_VARIABLE, "1")
    with engine_for(radix=False) as engine:
        secret = submit(engine, [700], 30)[0]
        engine.run_until(lambda: len(secret.output) > 20)
        pool, host = engine.pool, engine.coordinator.mem_pool_host
        slot = engine.find(secret).kv.req_pool_idx
        pages = engine.coordinator.residency.book.pages(slot).tolist()
        mirrored = [page for page in pages if host.layer_rows(0)[page * PAGE].any()]
        rows = {bytes(host.layer_rows(0)[page * PAGE + 3].numpy()) for page in mirrored}
        assert len(rows) > 5
        engine.run_until_idle()
        other = submit(engine, [100], 5, seed=1)
        engine.run_until_idle()
        memory = [host.layer_rows(0).numpy().tobytes(), pool.layer_rows(0).numpy().tobytes()]
        assert not any(row in part for row in rows for part in memory)
        assert_outputs([secret, *other])
        finish(engine)


ODD_TOKENS = {
    "negative": [-1, -7, -(2**31)] * 40,
    "huge": [2**31 - 1, 2**31, 2**62, 2**63 - 1] * 30,
    "lowest": [-(2**63)] * 70,
    "one": [5],
    "mixed": [0, -1, 2**40, 3] * 50,
}


@pytest.mark.parametrize("name", ODD_TOKENS)
def test_token_ids_are_no_indices(name: str) -> None:
    """Goal: ids outside the vocabulary touch no memory of ours. Method: such prompts, twice each, beside an honest request."""
    with engine_for() as engine:
        honest = submit(engine, [500], 30)
        odd = [send(engine, ODD_TOKENS[name], 10) for _ in range(2)]
        while not engine.idle:
            engine.step()
            assert_residency_sound(engine)
        engine.run_until_idle()
        assert_outputs([*honest, *odd])
        finish(engine)


ODD_FIELDS: list[dict[str, Any]] = [
    {"return_logprob": True, "logprob_start_len": 10**9},
    {"priority": -(2**63)},
    {"priority": 2**63 - 1},
    {"extra_key": "\x00" * 5000},
    {"cache_salt": "../../etc/passwd"},
    {"routed_dp_rank": 7},
    {"session_id": "no such session"},
    {"rid": "\u202e" * 300},
]


@pytest.mark.parametrize(
    "fields", ODD_FIELDS, ids=lambda fields: "-".join(fields) + f"-{str(list(fields.values())[-1])[:8]}"
)
def test_odd_fields_end_no_server(fields: dict[str, Any]) -> None:
    """Goal: the request is served or refused, its neighbours are right, nothing leaks. Method: one odd field at a time."""
    with engine_for() as engine:
        honest = submit(engine, [500, 620], 20)
        prompt = np.random.default_rng(1).integers(10, 1000, 70).tolist()
        if "rid" in fields:
            odd = engine.submit(prompt, 5, rid=fields["rid"])
        else:
            odd = send(engine, prompt, 5, **fields)
        engine.run_until_idle()
        assert odd.finish_reason in ("length", "abort")
        if odd.finish_reason == "length":
            assert_outputs([odd])
        assert_outputs(honest)
        finish(engine)


@pytest.mark.parametrize("new", [0, 1, 2**31, 2**62])
def test_output_lengths_are_bounded(new: int) -> None:
    """Goal: an absurd output length reserves no absurd memory. Method: such a request; it is aborted after a while."""
    with engine_for() as engine:
        odd, honest = submit(engine, [300], new)[0], submit(engine, [500], 20)
        engine.run_until(lambda: honest[0].finished)
        book = engine.coordinator.residency.book
        assert int(book.final_pages.max()) * PAGE <= 300 + 4096 + PAGE
        engine.abort(odd)
        engine.run_until_idle()
        assert_outputs(honest)
        finish(engine)


def test_prompts_of_impossible_length() -> None:
    """Goal: none, one and far too many tokens are served or refused. Method: lengths around all limits, in one batch."""
    with engine_for() as engine:
        longest = engine.scheduler.max_req_input_len
        lengths = [1, longest - 1, longest, longest + 1, 10 * longest]
        handles = submit(engine, lengths, 3)
        engine.run_until_idle()
        assert [handle.finish_reason for handle in handles] == ["length", "length", "abort", "abort", "abort"]
        assert_outputs(handles[:2])
        assert engine.flush()
        assert_pools_empty(engine)


@pytest.mark.parametrize("start", [-(2**31), -2, -1, 0, 1, 63, 64, 65, 399, 400, 10**9])
def test_a_logprob_start_ends_a_prefix_at_a_page(start: int) -> None:
    """Goal: a start chosen by the client never cuts a page in two. Method: match a cached prompt with log-probabilities."""
    with make_world() as world:
        world.finish(world.start(400))
        client = world.client(world.prompt(400))
        client.req.return_logprob, client.req.logprob_start_len = True, start
        client.req.init_next_round_input(world.tree)
        assert client.req.prefix_len % PAGE == 0 and 0 <= client.req.prefix_len < 400
        assert len(world.tree.prefix_pages(client.req)) == client.req.prefix_len // PAGE
        world.extend(client)
        assert world.wrong_rows(client) == 0
        world.finish(client)
