"""The memory side of a server on SGLang's real classes, without a scheduler and without a model.

Owns a request pool, our pool, allocator, runtime and radix cache of a few pages on any device, and drives them through
SGLang's own `alloc_for_extend`, `alloc_for_decode` and `release_kv_cache` with our hooks around them, in the order in
which a scheduler would. A forward writes rows whose bytes follow from the request's tokens (`harness.reference`), so that
any row can be judged. Used by tests of memory/, the runtime and the GPU; it never repairs what the code under test did.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness.reference import History, row_words
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hisparse import hooks, settings
from sglang_hisparse.config import ModelFacts, parse_config
from sglang_hisparse.memory.allocator import HiSparseAllocator
from sglang_hisparse.memory.pool import HiSparsePool
from sglang_hisparse.memory.radix import HiSparseRadixCache
from sglang_hisparse.runtime import HiSparseRuntime

PAGE = 64
VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages and counts of a world. group: layers of one index group. config: further keys of --hisparse-config."""

    device_pages: int = 24
    ratio: float = 4.0
    hot_pages: int = 2
    top_k: int = 64
    layers: int = 4
    group: int = 2
    slots: int = 6
    context_pages: int = 40


@dataclass(slots=True, eq=False)
class Client:
    """One request: SGLang's Req and what its rows must hold."""

    req: Req
    history: History

    @property
    def slot(self) -> int:
        """Its request slot; valid while it holds KV."""
        return self.req.kv.req_pool_idx

    @property
    def length(self) -> int:
        return self.req.kv.kv_allocated_len


class World:
    """Everything below the scheduler. Build it with `make_world`."""

    def __init__(self, sizes: Sizes, device: str, radix: bool) -> None:
        self.sizes, self.device = sizes, device
        self.request_pool = ReqToTokenPool(sizes.slots, sizes.context_pages * PAGE, device, False)
        self.pool = self._build_pool()
        self.allocator = HiSparseAllocator(
            sizes.device_pages * PAGE, PAGE, torch.bfloat16, device, self.pool, False, sizes.ratio
        )
        self.runtime = HiSparseRuntime(
            self.request_pool,
            self.allocator,
            sizes.top_k,
            sizes.hot_pages * PAGE,
            device,
            None,
            host_to_device_ratio=sizes.ratio,
            shared_index_layers=self._follower_flags(),
        )
        self.tree = HiSparseRadixCache(
            CacheInitParams(
                disable=not radix,
                req_to_token_pool=self.request_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.metadata = SimpleNamespace(real_page_table=None)
        self.runtime.bind_model_runner(SimpleNamespace(attn_backend=SimpleNamespace(forward_metadata=self.metadata)))
        self.runtime.bind_scheduler(SimpleNamespace(tree_cache=self.tree, enable_hisparse=True))
        # Where other tests of this process have applied the hooks, SGLang's functions are unwrapped: a hook acts once.
        free_rows = MethodType(unwrap(ReqToTokenPool.free_rows), self.request_pool)

        def free_rows_as_hooked(indices: list[int]) -> None:
            hooks.after_free_rows(free_rows(indices), self.request_pool, indices)

        self.request_pool.free_rows = free_rows_as_hooked
        self._count = 0
        self.writes_rows = True  # off: for tests of counts alone
        self.attention: Callable[[int], None] | None = None  # called for each layer when its new rows are written
        self.is_broken = False  # a test that plants damage says so, and is not asked for soundness at its end

    def _follower_flags(self) -> list[bool]:
        return [layer % self.sizes.group != 0 for layer in range(self.sizes.layers)]

    def _build_pool(self) -> HiSparsePool:
        return HiSparsePool(
            size=self.sizes.device_pages * PAGE,
            page_size=PAGE,
            kv_lora_rank=512,
            dtype=torch.bfloat16,
            qk_rope_head_dim=64,
            layer_num=self.sizes.layers,
            device=self.device,
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=576,
            start_layer=0,
            end_layer=self.sizes.layers,
            skip_topk_layers=self._follower_flags(),
            host_to_device_ratio=self.sizes.ratio,
        )

    # -- short names ------------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Any:
        return self.runtime.residency

    @property
    def book(self) -> Any:
        return self.runtime.residency.book

    @property
    def num_free_device(self) -> int:
        return self.allocator.device_pages.num_free

    @property
    def num_free_logical(self) -> int:
        return self.book.num_free

    def pages(self, client: Client) -> list[int]:
        return self.book.pages(client.slot).tolist()

    def row_of(self, client: Client) -> list[int]:
        """Logical ids that SGLang's table holds for the request (waits for the device)."""
        return self.request_pool.req_to_token[client.slot, : client.length].tolist()

    # -- requests ---------------------------------------------------------------------------------------------------

    def client(self, prompt: Sequence[int], max_new_tokens: int = 64) -> Client:
        self._count += 1
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        sampling.normalize(None)
        req = Req(f"request-{self._count}", "", array("q", prompt), sampling)
        return Client(req, History(tuple(prompt), VOCABULARY))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(10, VOCABULARY, length).tolist()

    def start(self, length: int, *, seed: int = 0, max_new_tokens: int = 64) -> Client:
        """A request whose prompt of `length` random tokens has been prefilled and published."""
        client = self.client(self.prompt(length, seed), max_new_tokens)
        self.extend(client)
        self.publish(client)
        return client

    def extend(self, *clients: Client, tokens: int | None = None) -> torch.Tensor:
        """One prefill step of `clients`, of at most `tokens` tokens each; returns out_cache_loc."""
        self.runtime.tick()
        for client in clients:
            req = client.req
            if not req.kv.holds_kv:
                req.init_next_round_input(self.tree)
                req.lock = self.tree.lock(req.last_node)
            left = len(req.full_untruncated_fill_ids) - req.prefix_len
            req.extend_end = req.prefix_len + (left if tokens is None else min(left, tokens))
        starts = [client.req.prefix_len for client in clients]
        ends = [client.req.extend_end for client in clients]
        batch = self._batch(clients, ends)
        batch.prefix_lens, batch.extend_lens = starts, [e - s for s, e in zip(starts, ends, strict=True)]
        batch.extend_num_tokens = sum(batch.extend_lens)
        loc, _, _ = hooks.around_alloc_for_extend(unwrap(allocation.alloc_for_extend), batch)
        self.forward(clients, loc, list(zip(starts, ends, strict=True)))
        return loc

    def publish(self, *clients: Client) -> None:
        """What follows a prefill step: the tree takes the full pages; a prefill that has ended gives the first token."""
        for client in clients:
            checkpoint_kv_cache(client.req, self.tree)
            if client.req.extend_end == len(client.req.full_untruncated_fill_ids):
                self._take_token(client)

    def decode(self, *clients: Client, check: bool = True) -> torch.Tensor:
        """One decode step: every client's newest token is written. Returns out_cache_loc [clients]."""
        self.runtime.tick()
        if check:
            tokens = len(clients) * PAGE
            assert self.allocator.check_decode_capacity(num_tokens=tokens, tree_cache=self.tree)
        batch = self._batch(clients, [client.length for client in clients])
        loc = hooks.around_alloc_for_decode(allocation.alloc_for_decode_default, batch, 1)
        self.forward(clients, loc, [(client.length - 1, client.length) for client in clients])
        for client in clients:
            self._take_token(client)
        return loc

    def _take_token(self, client: Client) -> None:
        client.req.output_ids.append(
            client.history.token(len(client.req.origin_input_ids) + len(client.req.output_ids))
        )

    def finish(self, client: Client, *, checkpoint: bool = True) -> None:
        """As after the last token: the lease goes back, the tree keeps what it can, the slot is free."""
        self.runtime.request_finished(client.req)
        client.req.finished_reason = FINISH_LENGTH(len(client.req.output_ids))
        release_kv_cache(client.req, self.tree, checkpoint=checkpoint)

    def retract(self, client: Client) -> None:
        self.runtime.retract_req(client.req)
        release_kv_cache(client.req, self.tree, checkpoint=False)

    def _batch(self, clients: Sequence[Client], lengths: list[int]) -> SimpleNamespace:
        slots = [client.req.kv.req_pool_idx or 0 for client in clients]
        return SimpleNamespace(
            reqs=[client.req for client in clients],
            device=self.device,
            tree_cache=self.tree,
            req_to_token_pool=self.request_pool,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=self.runtime,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            seq_lens=self.to_device(torch.tensor(lengths)),
            seq_lens_cpu=torch.tensor(lengths),
            req_pool_indices=self.to_device(torch.tensor(slots)),
            req_pool_indices_cpu=torch.tensor(slots),
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )

    # -- the device -------------------------------------------------------------------------------------------------

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device that nobody waits for."""
        if tensor.device.type == torch.device(self.device).type:
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def forward(self, clients: Sequence[Client], loc: torch.Tensor, spans: list[tuple[int, int]]) -> None:
        """Apply the plan, then write the rows of the new tokens in every layer."""
        self.runtime.before_forward()
        if not self.writes_rows:
            return
        hashes = np.concatenate(
            [client.history.hashes(np.arange(*span)) for client, span in zip(clients, spans, strict=True)]
        )
        for layer in range(self.sizes.layers):
            words = row_words(hashes, layer, self.pool.row_bytes).view(np.int16)
            rows = self.to_device(torch.from_numpy(words)).view(torch.bfloat16).unsqueeze(1)
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), loc, rows, rows)
            if self.attention is not None:
                self.attention(layer)

    def top_k_inputs(self, clients: Sequence[Client], positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(req slots, sequence lengths, top-k) on the device; takes the step's snapshot of logical pages."""
        slots = self.to_device(torch.tensor([client.slot for client in clients]))
        lengths = self.to_device(torch.tensor([client.length for client in clients]))
        width = max(client.length for client in clients)
        pages = self.request_pool.req_to_token[slots, :width][:, ::PAGE] // PAGE
        self.metadata.real_page_table = pages.to(torch.int32).contiguous()
        self.runtime.num_real_reqs.fill_(len(clients))
        return slots, lengths, self.to_device(positions.to(torch.int32))

    def resolve(self, clients: Sequence[Client], positions: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Device rows int32 of positions [clients, top_k] in `layer`, as the DSA backend would ask for them."""
        slots, lengths, top_k = self.top_k_inputs(clients, positions)
        return self.runtime.swap_in_selected_pages(slots, lengths, top_k, layer)

    # -- judgement (waits for the device) ---------------------------------------------------------------------------

    def rows(self, layer: int, device_rows: torch.Tensor) -> np.ndarray:
        """Bytes of device rows [n] of one layer, as uint64 words [n, row_bytes / 8]."""
        return self.pool.layer_rows(layer)[device_rows.long()].cpu().numpy().view(np.uint64)

    def host_rows(self, layer: int, ids: torch.Tensor) -> np.ndarray:
        return self.runtime.mem_pool_host.layer_rows(layer)[ids.long().cpu()].numpy().view(np.uint64)

    def expected(self, client: Client, positions: np.ndarray, layer: int) -> np.ndarray:
        return row_words(client.history.hashes(positions), layer, self.pool.row_bytes)

    def wrong_rows(self, client: Client) -> int:
        """Tokens of the request whose home, on the device or on the host, does not hold what it must, over all layers."""
        ids = torch.tensor(self.row_of(client))
        device_rows = self.pool.read_rows(ids.to(self.device)).cpu()
        positions = np.arange(client.length)
        on_host = (device_rows < 0).numpy()
        wrong = np.zeros(client.length, dtype=bool)
        for layer in range(self.sizes.layers):
            found = self.rows(layer, device_rows.clamp(min=0).to(self.device))
            found[on_host] = self.host_rows(layer, ids)[on_host]
            wrong |= (found != self.expected(client, positions, layer)).any(axis=1)
        return int(wrong.sum())

    def go_mixed(self, client: Client) -> list[int]:
        """Ask for one device page more than can be had without `client` going mixed; returns its host-only positions."""
        assert self.runtime.make_room(self.num_free_device + 1)
        self.settle()
        assert self.book.leased[client.slot], "another request was chosen, or cached pages were spilled"
        return self.host_only_positions(client)

    def host_only_positions(self, client: Client) -> list[int]:
        pages = enumerate(self.pages(client))
        return [p * PAGE + row for p, page in pages if self.book.is_host_only(page) for row in range(PAGE)]

    def settle(self) -> None:
        """Every copy is done and observed, and the tables on the device are those of the book."""
        self.runtime.worker.drain()
        self.runtime.before_forward()
        self.runtime.worker.drain()
        self.runtime.before_forward()


@contextmanager
def published(**server_args: Any) -> Iterator[None]:
    """SGLang's process-wide configuration, as far as the classes of a world read it."""
    override = get_context().override_server_args(page_size=PAGE, max_running_requests=8, **server_args)
    with override, get_parallel().override(attn_dcp_rank=0):
        yield


@contextmanager
def make_world(
    sizes: Sizes = Sizes(), *, device: str = "cpu", radix: bool = True, chunk: int | None = None, **config: Any
) -> Iterator[World]:
    """A world with a fixed border, whose host memory is given back at the end. chunk: tokens of the server's prefill chunks. config: further keys
    of --hisparse-config."""
    values = {
        "device_buffer_size": sizes.hot_pages * PAGE,
        "host_to_device_ratio": sizes.ratio,
        "watermark_low": 0.0,
        "watermark_high": 0.0,
        "promote_mib_per_step": 0,
        "elastic_border": False,
        **config,
    }
    facts = ModelFacts(index_topk=sizes.top_k, num_layers=sizes.layers, page_size=PAGE)
    with ExitStack() as stack:
        stack.callback(settings.reset)
        settings._State.resolved = parse_config(json.dumps(values)).resolve(facts)
        settings.fix_ratio(sizes.ratio)
        # Tensors here are tiny: a second thread only costs time.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        backend = "torch_native" if device == "cpu" else "dsa"
        server_args = {"chunked_prefill_size": chunk, "disable_radix_cache": not radix}
        stack.enter_context(published(attention_backend=backend, device=device, **server_args))
        world = World(sizes, device, radix)
        stack.callback(world.runtime.destroy)
        yield world
        assert world.is_broken or world.runtime.self_check() == []
