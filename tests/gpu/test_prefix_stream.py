"""Goal: a streamed extend reads right rows whichever stream is late. Method: real requests whose prefix lies on the host, on the
CPU and on CUDA with one stream slowed down; every row of every layer against its token, as attention would find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Client, Sizes, World, make_world

from sglang_hisparse.capacity import PrefillRule

CHUNK = 4 * PAGE
SLEEP_CYCLES = 3_000_000  # some two milliseconds: far longer than any copy here


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """24 device pages, six layers, prefills in chunks of four pages, of which up to 90 pages can be streamed; unions are chosen
    as if no page arrived behind a layer."""
    monkeypatch.setattr(PrefillRule, "hidden_rows", lambda *_: 0)
    sizes = Sizes(device_pages=24, ratio=4.0, layers=6, context_pages=90)
    config: dict[str, Any] = {"prefill_scratch_tokens": 90 * PAGE, "stream_extend_tokens": CHUNK}
    with make_world(sizes, device=request.param, chunk=CHUNK, **config) as world:
        yield world


class Attention:
    """What attention of an extend would read, copied by the stream that runs the forward."""

    def __init__(self, world: World, clients: tuple[Client, ...]) -> None:
        self.world, self.clients = world, clients
        self.read: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # [layer][client] device rows, their bytes

    def __call__(self, layer: int) -> None:
        pool = self.world.pool
        buffer = pool.get_key_buffer(layer)
        if pool.reads_windows:
            self.read.append(self._read_windows())
            return
        reads = []
        for client in self.clients:
            rows = pool.translate_loc_to_hisparse_device(self._ids(client)).view(-1)
            reads.append((rows, self._bytes(buffer, rows)))
        self.read.append(reads)

    def _ids(self, client: Client) -> torch.Tensor:
        return self.world.request_pool.req_to_token[client.slot, : client.req.extend_end].to(torch.int32).view(1, -1)

    @staticmethod
    def _bytes(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return buffer.view(torch.uint8).view(buffer.shape[0], -1)[rows.long().clamp(min=0)].clone()

    def _read_windows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As attention does that is cut between requests (transfer/attention_windows.py)."""
        pool, left, reads, start = self.world.pool, list(self.clients), [], 0
        for window, (_, last) in enumerate(pool.prefix_stream.windows):
            here = []
            while left and start < last:
                here.append(left.pop(0))
                start += here[-1].req.extend_end - here[-1].req.prefix_len
            ids = [self._ids(client) for client in here]
            buffer, found = pool.window_rows(window, torch.cat(ids, dim=1))
            split = found.view(-1).split([one.shape[1] for one in ids])
            reads += [(rows, self._bytes(buffer, rows)) for rows in split]
            pool.prefix_stream.leave()
        return reads

    def num_wrong(self) -> int:
        """Wrong or missing rows over all layers and requests (waits for the device)."""
        wrong = 0
        for layer, reads in enumerate(self.read):
            for client, (rows, found) in zip(self.clients, reads, strict=True):
                expected = self.world.expected(client, np.arange(len(rows)), layer)
                wrong += int((found.cpu().numpy().view(np.uint64) != expected).any(axis=1).sum()) + int((rows < 0).sum())
        return wrong


def extend(world: World, *clients: Client, tokens: int | None = None) -> Attention:
    """One prefill step with its attention; the tree takes the full pages afterwards."""
    world.attention = attention = Attention(world, clients)
    world.extend(*clients, tokens=tokens)
    world.attention = None
    world.runtime.after_forward()
    world.publish(*clients)
    return attention


def sleep_on(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)


def slow_down(world: World, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that the named stream gets begins late; on the CPU there are no streams."""
    if world.device == "cpu" or which == "none":
        return
    stream, worker = world.runtime.extends.stream, world.runtime.worker
    windows = world.runtime.extends.rule.has_windows
    holder, name, late = {
        "side": (stream, "_fetch", stream._side),
        "copy": (worker, "_enqueue", worker._copy_stream),
        "forward": (world.pool, "window_rows" if windows else "get_key_buffer", torch.cuda.current_stream()),
    }[which]
    original: Callable[..., Any] = getattr(holder, name)

    def slowly(*args: Any) -> Any:
        sleep_on(late)
        return original(*args)

    monkeypatch.setattr(holder, name, slowly)


@pytest.mark.parametrize("late", ["none", "side", "copy", "forward"])
def test_a_prompt_of_three_pools(world: World, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: each chunk reads all chunks before it. Method: 72 pages on a device of 24, then a decode step and a next turn."""
    slow_down(world, late, monkeypatch)
    client = world.client(world.prompt(72 * PAGE - 5))
    attentions = []
    while not attentions or client.req.prefix_len < len(client.req.origin_input_ids):
        attentions.append(extend(world, client, tokens=CHUNK))
    assert [attention.num_wrong() for attention in attentions] == [0] * 18
    world.decode(client)
    assert world.wrong_rows(client) == 0
    world.finish(client)
    again = world.client(world.prompt(72 * PAGE - 5) + world.prompt(100, seed=7))
    again.req.init_next_round_input(world.tree)
    assert again.req.prefix_len == 71 * PAGE
    assert extend(world, again).num_wrong() == 0
    counts = world.runtime.counters()
    assert counts["streamed_extends"] > 10 and counts["pages_promoted"] == 0


@pytest.mark.parametrize("late", ["none", "side", "copy"])
def test_a_batch_of_streamed_and_resident_requests(world: World, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a request without host-only pages reads the scratch beside one with them. Method: a history on the host and a
    fresh prompt in one batch; resident pages of a third are left alone."""
    history = world.client(world.prompt(16 * PAGE))
    extend(world, history)
    world.finish(history)
    other = world.start(9 * PAGE, seed=4)
    assert world.runtime.make_room(13)
    slow_down(world, late, monkeypatch)
    again = world.client(world.prompt(16 * PAGE) + world.prompt(130, seed=5))
    fresh = world.client(world.prompt(3 * PAGE, seed=6))
    attention = extend(world, again, fresh)
    assert attention.num_wrong() == 0 and world.runtime.counters()["streamed_extends"] == 1
    assert world.wrong_rows(other) == world.wrong_rows(fresh) == world.wrong_rows(again) == 0


@pytest.mark.parametrize("late", ["none", "copy", "forward"])
@pytest.mark.parametrize("new_tokens", [1, 30])
def test_a_short_extend_fetches_its_union(
    world: World, new_tokens: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: rows that only their selection brings are right in every layer. Method: a history on the host and a short turn."""
    history = world.client(world.prompt(16 * PAGE))
    extend(world, history)
    world.finish(history)
    assert world.runtime.make_room(23)
    slow_down(world, late, monkeypatch)
    again = world.client(world.prompt(16 * PAGE) + world.prompt(new_tokens, seed=5))
    attention = extend(world, again)
    counts = world.runtime.counters()
    assert attention.num_wrong() == 0 and (counts["streamed_extends"], counts["streamed_unions"]) == (1, 1)
    assert world.runtime.counters()["streamed_union_rows"] == 6 * 15 * PAGE, "the rows of one page were resident"
    assert world.wrong_rows(again) == 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A scratch of 20 pages on a device of 40; batches that read more are cut into windows. No unions unless a test says so."""
    monkeypatch.setattr(PrefillRule, "fetches_union", lambda *_: False)
    sizes = Sizes(device_pages=40, ratio=4.0, layers=6, context_pages=40)
    config: dict[str, Any] = {"prefill_scratch_tokens": 20 * PAGE, "stream_extend_tokens": 2 * PAGE}
    with make_world(sizes, device=request.param, chunk=CHUNK, **config) as world:
        extends = world.runtime.extends
        extends.rule = replace(extends.rule, has_windows=True)
        yield world


def turns_in_windows(world: World, late: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Attention, tuple[Client, ...]]:
    """Next turns of three histories, 16 to 18 pages each on the host, and a fresh prompt of 22 pages, in one extend."""
    lengths = (16, 18, 17)
    for seed, pages in enumerate(lengths):
        history = world.client(world.prompt(pages * PAGE, seed=seed))
        extend(world, history)
        world.finish(history)
    assert world.runtime.make_room(40)
    slow_down(world, late, monkeypatch)
    turns = [world.client(world.prompt(n * PAGE, seed=i) + world.prompt(30 + i, seed=9)) for i, n in enumerate(lengths)]
    large = world.client(world.prompt(22 * PAGE, seed=8))
    clients = (turns[0], large, turns[1], turns[2])
    return extend(world, *clients), clients


@pytest.mark.parametrize("unions", [0, 1, 3])
@pytest.mark.parametrize("late", ["none", "side", "copy", "forward"])
def test_windows_of_one_extend(narrow: World, late: str, unions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: every window reads right rows, of whole pages and of unions. Method: a scratch of 20 pages, one request larger than it on
    the device; then a decode step of all. Turns have 30, 31 and 32 new tokens."""
    monkeypatch.setattr(PrefillRule, "fetches_union", lambda rule, new_tokens, host_rows: new_tokens < 30 + unions)
    attention, clients = turns_in_windows(narrow, late, monkeypatch)
    assert attention.num_wrong() == 0
    counts = narrow.runtime.counters()
    assert [counts[f"streamed_{name}"] for name in ("extends", "windows", "unions")] == [1, 4, unions]
    narrow.decode(*clients)
    assert [narrow.wrong_rows(client) for client in clients] == [0] * 4


@pytest.mark.gpu
def test_a_half_is_not_fetched_into_under_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the slow forward stream above proves something of windows. Method: the same with fetches that do not come behind it."""
    monkeypatch.setattr(PrefillRule, "fetches_union", lambda *_: False)
    config: dict[str, Any] = {"prefill_scratch_tokens": 20 * PAGE, "stream_extend_tokens": 2 * PAGE}
    with make_world(Sizes(device_pages=40, ratio=4.0, layers=6, context_pages=40), device="cuda", chunk=CHUNK, **config) as world:
        extends = world.runtime.extends
        extends.rule = replace(extends.rule, has_windows=True)
        wait = extends.stream._let_fetch

        def early() -> None:
            if not extends.stream._extend.spans or extends.stream._extend.staged < 0:  # page lists must have arrived all the same
                wait()

        monkeypatch.setattr(extends.stream, "_let_fetch", early)
        attention, _ = turns_in_windows(world, "forward", monkeypatch)
        assert attention.num_wrong() > 0


@pytest.mark.gpu
def test_the_side_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the slow streams above prove something. Method: the same with the wait for the side stream left out."""
    sizes = Sizes(device_pages=24, ratio=4.0, layers=6, context_pages=90)
    with make_world(sizes, device="cuda", chunk=CHUNK, prefill_scratch_tokens=90 * PAGE) as world:
        slow_down(world, "side", monkeypatch)
        client = world.client(world.prompt(40 * PAGE))
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *args: None)
        wrong = []
        while not wrong or client.req.prefix_len < len(client.req.origin_input_ids):
            wrong.append(extend(world, client, tokens=CHUNK))
        monkeypatch.undo()
        assert sum(attention.num_wrong() for attention in wrong) > 0
