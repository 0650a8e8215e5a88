"""The storage tier of one rank: what the runtime, the radix cache and the hooks see of this package.

Built by the runtime when the scheduler is ready, where `storage_backend` names a backend. It publishes pages of the radix tree
whose host copy is complete, and brings pages back for waiting requests as host-only pages of the tree. Storage outlives a flush;
pages of other weights are never read: after an update of the weights of a running server it stays switched off.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_hisparse import settings
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.storage.backend import Store, StoreIdentity
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.identity import page_facts
from sglang_hisparse.storage.loader import Loader
from sglang_hisparse.storage.page_bytes import PageBytes
from sglang_hisparse.storage.prefetch import Prefetches
from sglang_hisparse.storage.publisher import Publisher
from sglang_hisparse.storage.unit import UnitFormat, fingerprint_of

if TYPE_CHECKING:
    from sglang_hisparse.runtime import HiSparseRuntime

logger = logging.getLogger(__name__)

#: memory for index-K on its way down, and the pages of one batch at most
BATCH_BYTES, BATCH_PAGES = 32 << 20, 32
#: at shutdown, pages that are complete are published for at most this long
DRAIN_SECONDS = 5.0


class StorageTier:
    """Publisher, loader and prefetches of one rank over one opened backend."""

    def __init__(
        self,
        runtime: HiSparseRuntime,
        tree: Any,
        store: Store,
        facts: dict[str, Any],
        counters: StorageCounters,
        *,
        is_writer: bool,
        wait_seconds: float,
        agree: Callable[[list[int]], list[int]],
    ) -> None:
        self._book = runtime.residency.book
        self._store, self._counters = store, counters
        self._hashes: dict[int, tuple[int, str]] = {}  # page of the tree -> (generation, hash)
        index = [buffer for buffer in runtime.pool.index_key_cache.buffer if buffer.shape[0]]
        batch = max(1, min(BATCH_PAGES, BATCH_BYTES // sum(buffer[0].nbytes for buffer in index)))
        self.bytes = PageBytes(
            runtime.mem_pool_host, index, batch=batch, forward_stream=lambda: runtime.worker.forward_stream
        )
        self.unit = UnitFormat(fingerprint_of(facts), self.bytes.kv_bytes, self.bytes.index_bytes)
        self.publisher = (
            Publisher(self._book, self.unit, store, self.bytes, counters, batch=batch) if is_writer else None
        )
        self.loader = Loader(self.unit, store, self.bytes, counters)
        self.prefetches = Prefetches(
            tree,
            runtime.residency,
            self.loader,
            self.bytes,
            counters,
            wait_seconds=wait_seconds,
            agree=agree,
            note_loaded=self._remember,
        )
        self._page_size = tree.page_size
        self.is_on = True

    @classmethod
    def of(cls, runtime: HiSparseRuntime, scheduler: Any) -> StorageTier | None:
        """The tier that the settings ask for, or None. Raises ConfigError where the backend cannot be opened."""
        wanted, tree = settings.resolved(), scheduler.tree_cache
        if wanted.storage_backend is None:
            return None
        _prepare_hashing()
        args = scheduler.server_args
        identity = _identity(args)
        counters = StorageCounters()
        store = Store.open(
            wanted.storage_backend, wanted.storage_extra_config, identity, runtime.mem_pool_host, counters
        )
        leaders = [members[0] for members in runtime.groups.members]
        facts = page_facts(args, scheduler.model_config.hf_config, runtime.pool, leaders, tree.page_size)
        tier = cls(
            runtime,
            tree,
            store,
            facts,
            counters,
            is_writer=identity.is_writer,
            wait_seconds=wanted.storage_wait_seconds,
            agree=_agreement_of(tree, identity.tp_size),
        )
        logger.info(
            "HiSparse storage: %s, %d KiB per page of %d tokens",
            wanted.storage_backend,
            tier.unit.num_bytes >> 10,
            tree.page_size,
        )
        return tier

    # -- once an iteration ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Before each batch is chosen, on all ranks alike; also while the server idles."""
        if not self.is_on:
            return
        self.prefetches.tick()
        if self.publisher is not None:
            self.publisher.tick()

    # -- from the radix cache ---------------------------------------------------------------------------------------

    def note_cached(
        self, tokens: Sequence[int], namespace: tuple[str | None, str | None], pages: Sequence[int]
    ) -> None:
        """The tree holds `tokens` (whole pages) in logical `pages`: those that are new to it shall be published."""
        if self.publisher is None or not self.is_on:
            return
        known = len(pages)
        while known and self._hash_of(pages[known - 1]) is None:
            known -= 1
        if known == len(pages):
            return
        key = RadixKey(
            tokens[known * self._page_size : len(pages) * self._page_size], namespace[0], cache_salt=namespace[1]
        )
        before = self._hash_of(pages[known - 1]) if known else None
        hashes = get_storage_hash_str(key, before, page_size=self._page_size)
        self._remember(pages[known:], hashes)
        self.publisher.note(pages[known:], hashes)

    def _hash_of(self, page: int) -> str | None:
        generation, page_hash = self._hashes.get(page, (-1, None))
        return page_hash if generation == self._book.generation[page] else None

    def _remember(self, pages: Sequence[int], hashes: Sequence[str]) -> None:
        for page, page_hash in zip(pages, hashes, strict=True):
            self._hashes[page] = (int(self._book.generation[page]), page_hash)

    def request(
        self, handle: Hashable, tokens: Sequence[int], matched: int, namespace: tuple[str | None, str | None]
    ) -> None:
        """See Prefetches.request."""
        if self.is_on:
            self.prefetches.request(handle, tokens, matched, namespace)

    @property
    def loading_tokens(self) -> int:
        """Logical tokens that belong to nobody but a prefetch."""
        return self.prefetches.loading_pages * self._page_size

    # -- flush, weights, shutdown -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """No thread copies from or to the device after this, and no logical page is being filled."""
        self.prefetches.stop_all()
        if self.publisher is not None:
            self.publisher.settle()

    @property
    def reads_index_keys(self) -> bool:
        """Whether index-K is being copied from the device; loading writes only to pages that it has allocated."""
        return self.publisher is not None and self.publisher.reads_index_keys

    def forget_pages(self) -> None:
        """Every logical page is about to be freed at once; storage keeps what it has."""
        self.settle()
        self._hashes.clear()
        if self.publisher is not None:
            self.publisher.forget()

    def weights_changed(self) -> None:
        """The server's weights are not those that the keys name any more."""
        if not self.is_on:
            return
        self.forget_pages()
        self.is_on = False
        logger.warning("HiSparse storage: the weights of the running server have changed; off until the next start")

    def clear(self) -> None:
        """Remove every page from storage, on the user's word only."""
        self._store.clear()

    def counters(self) -> dict[str, int]:
        return self._counters.read()

    def close(self) -> None:
        """Publish what is complete, for a bounded time, and end the threads; the host tier may be released then."""
        self.prefetches.stop_all()
        if self.publisher is not None and self.is_on and not self.publisher.drain(DRAIN_SECONDS):
            logger.warning("HiSparse storage: %d pages were not published", self.publisher.backlog)
        self.is_on = False
        self.bytes.close()
        self.loader.close()
        if self.publisher is not None:
            self.publisher.close()
        self._store.close()


def _prepare_hashing() -> None:
    """SGLang compiles its page hash when it is first used, which must not happen while requests wait. Raises ConfigError."""
    try:
        get_storage_hash_str(RadixKey(array("q", [0])), page_size=1)
    except RuntimeError as error:
        raise ConfigError(
            f"storage_backend: HiCache's page hash cannot be compiled here ({error.__cause__ or error}); allowed: null, or a "
            "C++ compiler and OpenSSL's headers on this machine"
        ) from error


def _identity(server_args: Any) -> StoreIdentity:
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel, name = get_parallel(), server_args.served_model_name or server_args.model_path
    if is_dp_attention_enabled():
        return StoreIdentity(name, parallel.attn_tp_rank, parallel.attn_tp_size, parallel.attn_dp_rank)
    return StoreIdentity(name, parallel.tp_rank, parallel.tp_size)


def _agreement_of(tree: Any, num_ranks: int) -> Callable[[list[int]], list[int]]:
    """MIN over the ranks that schedule together."""
    if num_ranks == 1:
        return lambda values: values

    def agree(values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        tree._all_reduce_attn_groups(tensor, torch.distributed.ReduceOp.MIN)
        return tensor.tolist()

    return agree
