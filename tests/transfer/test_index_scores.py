"""Goal: the indexer's scores reach the resolver of their layer, and are kept no longer. Method: the hook around a stand-in indexer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_world import PAGE, Client, Sizes, World, make_world

pytest.importorskip("sglang", reason="sglang is not installed")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hisparse import hooks
from sglang_hisparse.transfer.decode_top_k import TOP_K_VARIABLE
from sglang_hisparse.transfer.index_scores import IndexScores

K = 64


class Metadata:
    """SGLang's indexer metadata: what the indexer asks for, and the top-k itself."""

    paged_mqa_schedule_metadata = "a schedule"
    attn_metadata = SimpleNamespace(topk_v2_plan=None)
    topk_backend = SimpleNamespace(should_use_topk_v2=lambda: False)  # the fused kernel does not apply

    def get_seqlens_int32(self) -> str:
        return "lengths"

    def topk_transform(self, logits: torch.Tensor, topk: int) -> torch.Tensor:
        return logits.topk(topk, dim=1).indices.to(torch.int32)


def indexer(seen: list[Any], scores: torch.Tensor) -> Any:
    """Stands in for Indexer._get_topk_paged: looks at the metadata and selects by `scores`."""

    def get_topk_paged(
        self: Any, forward_batch: Any, layer_id: int, q: Any, weights: Any, metadata: Any
    ) -> torch.Tensor:
        seen.append(metadata)
        assert metadata.get_seqlens_int32() == "lengths"
        assert getattr(metadata, "paged_mqa_schedule_metadata", None) == "a schedule"
        assert getattr(metadata, "nothing_of_the_kind", None) is None
        return metadata.topk_transform(scores, K)

    return get_topk_paged


def select(world: World, layer: int, scores: torch.Tensor, seen: list[Any] | None = None) -> torch.Tensor:
    """One layer's top-k through the hook."""
    batch = SimpleNamespace(hisparse_coordinator=world.runtime, forward_mode=ForwardMode.DECODE)
    original = indexer([] if seen is None else seen, scores)
    return hooks.around_topk_paged(original, None, batch, layer, None, None, Metadata())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with make_world(Sizes(), device=request.param, eviction="index_score") as world:
        yield world


def spilled(world: World) -> Client:
    """A request of 1,000 tokens whose first ten pages are on the host only."""
    client = world.client(world.prompt(1000, seed=1))
    world.extend(client)
    world.publish(client)
    assert world.runtime.make_room(world.num_free_device + 8)
    world.decode(client)
    return client


def hot_positions(world: World, client: Client, group: int = 0) -> set[int]:
    """Positions whose rows are hot."""
    pages = world.runtime.residency.book.pages(client.slot).tolist()
    tags = world.runtime.hot.state[group].tags[client.slot].tolist()
    return {pages.index(tag // PAGE) * PAGE + tag % PAGE for tag in tags if tag >= 0}


def test_rows_of_low_score_leave(world: World) -> None:
    """Goal: from the indexer to the hot buffer. Method: 128 hot rows of which those with the lowest scores must go, in layer 0."""
    client = spilled(world)
    order = torch.arange(1024.0, device=world.device)
    for first in (0, 64):  # fills the buffer: positions 0 to 127
        scores = torch.where((order >= first) & (order < first + K), 1000.0, order % 7)[None]
        world.resolve([client], select(world, 0, scores))
    assert hot_positions(world, client) == set(range(128))
    keep = torch.arange(128, device=world.device) % 2 == 0
    scores = torch.zeros(1, 1024, device=world.device)
    scores[0, :128] = torch.where(keep, 5.0, -5.0)
    scores[0, 200:264] = 1000.0
    world.resolve([client], select(world, 0, scores))
    assert hot_positions(world, client) == set(range(0, 128, 2)) | set(range(200, 264))


def test_scores_are_those_of_their_layer_and_used_once() -> None:
    """Goal: a layer whose indexer computed no scores never uses another's. Method: two layers, one put, many takes."""
    scores = IndexScores()
    given = torch.ones(2, 9)
    scores.put(3, given)
    assert scores.take(3) is given and scores.take(3) is None
    scores.put(3, given)
    assert scores.take(4) is None and scores.take(3) is None


def test_nothing_holds_the_scores_after_the_resolver(world: World) -> None:
    """Goal: their memory is free for the next layer. Method: a weak reference, before and after the call."""
    client = spilled(world)
    scores = torch.rand(1, 1024, device=world.device)
    selected, gone = select(world, 2, scores), weakref.ref(scores)
    del scores
    gc.collect()
    assert gone() is not None, "until then it must be kept"
    world.resolve([client], selected, layer=2)
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("scores", [torch.zeros(1, 9, dtype=torch.bfloat16), torch.zeros(9), torch.zeros(9, 2).T])
def test_scores_of_another_kind_are_left_alone(scores: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: an unknown top-k backend costs the option, not the server. Method: other types and strides; one warning."""
    holder = IndexScores()
    for _ in range(3):
        holder.put(0, scores)
        assert holder.take(0) is None
    assert len(caplog.records) == 1 and "evicts by age" in caplog.text


def test_without_the_option_the_indexer_sees_what_sglang_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: scores are not looked at by default, and nothing changes for what is not ours. Method: the metadata's identity."""
    monkeypatch.setenv(TOP_K_VARIABLE, "0")
    with make_world(Sizes()) as world:
        assert world.runtime.hot.scores is None and world.runtime.hot.state[0].slot_pages is None
        seen: list[Any] = []
        select(world, 0, torch.rand(1, 1024), seen)
        original = indexer(seen, torch.rand(1, 1024))
        hooks.around_topk_paged(original, None, SimpleNamespace(), 0, None, None, Metadata())
    assert [type(metadata) for metadata in seen] == [Metadata, Metadata]
