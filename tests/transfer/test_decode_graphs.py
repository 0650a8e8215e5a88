"""Goal: decode graphs are without SGLang's page table of single rows exactly where nothing reads it. Method: SGLang's own backend on the
CPU, taken for a GPU's: what it allocates, and its decode step of every accepted kernel with the table left out; gpu/ replays graphs.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_graph_backend import GraphsOfSizes, backend_of, patch_cuda
from runtime_world import World, make_world

pytest.importorskip("sglang", reason="sglang is not installed")

from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_hisparse.hooks import HOOKS
from sglang_hisparse.transfer.decode_graphs import around_init_cuda_graph_state

ROWS, LOGGER = 3, "sglang_hisparse.transfer.decode_graphs"
INIT = inspect.unwrap(DeepseekSparseAttnBackend.init_cuda_graph_state)  # other tests of this process may have applied the hooks


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    patch_cuda(monkeypatch)
    with make_world() as world:
        yield world


def tables(backend: Any) -> tuple[Any, Any]:
    """Shapes of the table of single rows and of that of pages, None: not there."""
    state = backend.decode_cuda_graph_metadata
    return tuple(None if state[name] is None else tuple(state[name].shape) for name in ("page_table", "real_page_table"))


def test_the_table_is_left_out(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: as many columns of pages as the context has, none of tokens, and one line. Method: SGLang's function, hooked."""
    backend = backend_of(world)
    with caplog.at_level(logging.INFO, LOGGER):
        around_init_cuda_graph_state(INIT, backend, ROWS, ROWS)
    context = world.request_pool.req_to_token.shape[1]
    assert tables(backend) == (None, (ROWS, -(-context // 64)))
    assert backend.hisparse_coordinator is world.runtime
    assert [record.getMessage() for record in caplog.records] == [
        f"HiSparse decode graphs: without the page table of single rows ({ROWS * context * 4 / 1e6:.0f} MB)"
    ]


@pytest.mark.parametrize("why", ["speculation", "pooled index keys", "pages of one", "unfused top-k", "wide top-k", "top-k v1", "no CUDA"])
def test_where_sglang_would_keep_it_it_is_kept(
    world: World, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: SGLang's conditions hold for us as for plain SGLang. Method: break each, against the function without the hook."""
    fields = {
        "speculation": {"speculative_num_draft_tokens": 4}, "pooled index keys": {"dsa_index_kpool": 4},
        "pages of one": {"physical_page_size": 1}, "unfused top-k": {"use_fused_topk": False}, "wide top-k": {"dsa_index_topk": 4096},
    }.get(why, {})  # fmt: skip
    if why == "no CUDA":
        patch_cuda(monkeypatch, is_cuda=False)
    hooked, plain = backend_of(world, **fields), backend_of(world, **fields)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(why != "top-k v1"), caplog.at_level(logging.INFO, LOGGER):
        around_init_cuda_graph_state(INIT, hooked, ROWS, ROWS)
        INIT(plain, ROWS, ROWS)
    assert tables(hooked) == tables(plain) == ((ROWS, world.request_pool.req_to_token.shape[1]), None)
    assert hooked.hisparse_coordinator is world.runtime and "with SGLang's page table" in caplog.text


def test_others_are_not_touched(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: SGLang's own HiSparse, and SGLang without it, are as before. Method: what the original sees of a pool that is not ours."""
    seen = []
    original = lambda backend, *sizes: seen.append((backend.hisparse_coordinator, sizes))
    with caplog.at_level(logging.INFO, LOGGER):
        for coordinator, pool in (("SGLang's", object()), (None, object()), (None, world.pool)):
            around_init_cuda_graph_state(original, SimpleNamespace(hisparse_coordinator=coordinator, token_to_kv_pool=pool), 8, 9)
    assert seen == [("SGLang's", (8, 9)), (None, (8, 9)), (None, (8, 9))] and not caplog.records


def test_the_coordinator_comes_back_after_an_error(world: World) -> None:
    """Goal: attention never runs without the resolver. Method: an original that fails half way, as for lack of memory."""

    def original(backend: Any, *sizes: int) -> None:
        assert backend.hisparse_coordinator is None
        raise torch.OutOfMemoryError

    backend = backend_of(world)
    with pytest.raises(torch.OutOfMemoryError):
        around_init_cuda_graph_state(original, backend, ROWS, ROWS)
    assert backend.hisparse_coordinator is world.runtime


# ---- nothing reads it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv", "flashinfer_sparse_mla"])
def test_a_decode_step_reads_no_such_table(world: World, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: top-k and attention of every accepted kernel do without. Method: SGLang's decode step of every layer; a read would raise."""
    client = world.start(300)
    old = torch.tensor(world.go_mixed(client))
    backend = backend_of(world)
    around_init_cuda_graph_state(INIT, backend, ROWS, ROWS)
    graphs = GraphsOfSizes(world, backend, (ROWS,))
    width = world.request_pool.req_to_token.shape[1]
    scores = torch.randperm(ROWS * width).float().view(ROWS, width)  # no two alike, whose order would be anyone's guess
    scores[0, old] += scores.numel()
    graphs.step([client], torch.zeros(1, world.sizes.top_k, dtype=torch.int32))
    assert backend.forward_metadata.page_table_1 is None
    found = _decode(world, backend, impl, scores, graphs, monkeypatch)
    expected = scores[0, : client.length].topk(world.sizes.top_k).indices.numpy()
    for layer, rows in enumerate(found):
        assert (world.rows(layer, rows[0]) == world.expected(client, expected, layer)).all()
        assert (rows[1:] == -1).all(), "padding"


def test_a_reader_would_be_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the test before can fail. Method: decode as SGLang does without HiSparse and fused top-k, which translates by the table."""
    backend = backend_of(world)
    around_init_cuda_graph_state(INIT, backend, ROWS, ROWS)
    graphs = GraphsOfSizes(world, backend, (ROWS,))
    backend.hisparse_coordinator, backend.use_fused_topk = None, False
    with pytest.raises((TypeError, AttributeError), match="None"):
        _decode(world, backend, "flashmla_sparse", torch.randn(ROWS, 4096), graphs, monkeypatch)


def _decode(
    world: World, backend: Any, impl: str, scores: torch.Tensor, graphs: GraphsOfSizes, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Rows that SGLang's decode step gives its kernel in each layer, top-k taken from `scores` by SGLang's own indexer metadata."""
    def unfused(score: torch.Tensor, lengths: torch.Tensor, k: int, row_starts: Any = None) -> torch.Tensor:
        columns = torch.arange(score.shape[1]) < lengths[:, None]
        values, positions = score.masked_fill(~columns, -torch.inf).topk(k)
        return torch.where(values == -torch.inf, -1, positions).int()

    # The library itself needs the driver; SGLang imports this one function when it is called.
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fast_topk_v2=unfused))
    found: list[torch.Tensor] = []
    backend.dsa_decode_impl = impl
    monkeypatch.setattr(backend, f"_forward_{impl}", lambda *, page_table_1, **given: found.append(page_table_1.clone()), raising=False)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, req_pool_indices=graphs.slots, seq_lens=graphs.lengths, hisparse_coordinator=world.runtime
    )
    for number in range(world.sizes.layers):
        layer = SimpleNamespace(
            layer_id=number, is_cross_attention=False, tp_q_head_num=2, head_dim=576, v_head_dim=512, scaling=1.0, logit_cap=0.0
        )  # fmt: skip
        top_k = backend.get_indexer_metadata(number, batch).topk_transform(scores, world.sizes.top_k)
        backend.forward_decode(torch.randn(ROWS, 2, 576), None, None, layer, batch, topk_indices=top_k)
    return found


def test_sglang_reads_it_where_it_was_found() -> None:
    """Goal: another SGLang with another reader is noticed. Method: functions of its DSA code that read the table, and why each is none
    of a decode graph's under our pool; and the one place where the hooked function asks for the coordinator."""
    readers = {
        "_graph_page_table_width": "takes req_to_token's width where there is none",
        "_apply_cuda_graph_metadata": "gives it to the kernel that fills it, which is made for None",
        "forward_decode": "behind the coordinator's branch",
        "forward_extend": "extends, which are not decode graphs",
        "_forward_trtllm": "a kernel that SGLang refuses under HiSparse, and with a fused top-k not then",
        "_get_topk_paged": "HIP",
        "_get_topk_ragged": "HIP",
        "topk_transform": "behind force_unfused_topk",
        "get_page_table_1": "the two above ask it",
        "_kpool_fused_topk_mapping": "pooled index keys, refused",
        "prepare_mtp_seed_indices": "speculation, refused",
        "init_forward_metadata_out_graph": "speculation, refused (the backend of several draft steps)",
        "_copy_base_replay_buffers": "speculation, refused",
        "_precompute_decode_mode": "speculation, refused",
        "_precompute_target_verify_mode": "speculation, refused",
    }
    folder = Path(inspect.getsourcefile(DeepseekSparseAttnBackend)).parent
    found = set()
    for path in (folder / "dsa_backend.py", *(folder / "dsa").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _reads(function, {"page_table_1", "get_page_table_1"}):
                found.add(function.name)
    assert found == set(readers)
    (hooked,) = ast.parse(textwrap.dedent(inspect.getsource(INIT))).body
    assert _reads(hooked, {"hisparse_coordinator"}) == 1


def _reads(function: ast.AST, names: set[str]) -> int:
    return sum(isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load) for node in ast.walk(function))


def test_it_is_hooked() -> None:
    """Goal: a server has it. Method: the table of hooks."""
    assert [hook.target.rsplit(".", 1)[1] for hook in HOOKS if hook.function is around_init_cuda_graph_state] == ["init_cuda_graph_state"]
