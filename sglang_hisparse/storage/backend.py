"""A HiCache storage backend as the rest of this package sees it: bytes by key, and no exceptions.

Owns the backend object. Publisher and loader call `Store`, each on its own thread. A backend that fails, raises or answers nonsense gives a miss and a count; it must never reach a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.storage.counters import StorageCounters

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PROBE_KEY, _PROBE_BYTES = "hisparse-probe", 4096


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Who opens a backend, in HiCache's terms. tp_rank, tp_size: of the attention group, whose ranks hold equal pages."""

    model_name: str
    tp_rank: int
    tp_size: int
    dp_rank: int = 0

    @property
    def is_writer(self) -> bool:
        """Ranks of one group hold the same rows: one of them publishes."""
        return self.tp_rank == 0


class Store:
    """One opened backend. Safe from several threads as far as the backend is; HiCache itself uses two."""

    def __init__(self, backend: Any, counters: StorageCounters) -> None:
        self.backend = backend
        self._counters = counters
        self._complained: set[str] = set()

    @classmethod
    def open(
        cls,
        name: str,
        extra: Mapping[str, Any] | None,
        identity: StoreIdentity,
        host_pool: Any,
        counters: StorageCounters,
    ) -> Store:
        """Open the backend through SGLang's factory and see that it gives back what it is given. Raises ConfigError."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        config = HiCacheStorageConfig(
            tp_rank=identity.tp_rank,
            tp_size=identity.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=identity.model_name,
            dp_rank=identity.dp_rank,
            extra_config=dict(extra or {}),
        )
        try:
            backend = StorageBackendFactory.create_backend(name, config, host_pool)
        except Exception as error:
            raise ConfigError(f"storage_backend: {name} could not be opened ({error})") from error
        store = cls(backend, counters)
        if identity.is_writer and not store._gives_back():
            raise ConfigError(f"storage_backend: {name} does not give back the bytes that were stored in it")
        return store

    def _gives_back(self) -> bool:
        value = (torch.arange(_PROBE_BYTES) % 251).to(torch.uint8)
        target = torch.zeros_like(value)
        stored = self.put(_PROBE_KEY, value) and self.count_leading([_PROBE_KEY]) == 1
        return stored and self.get(_PROBE_KEY, target) and torch.equal(value, target)

    def put(self, key: str, value: torch.Tensor) -> bool:
        """Store uint8 [n] under `key`; True: it is there, whole, for a later reader."""
        return bool(self._ask("batch_set", lambda: self.backend.batch_set([key], [value]), False))

    def count_leading(self, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first on, the backend says it has."""
        count = self._ask("batch_exists", lambda: self.backend.batch_exists(list(keys)), 0)
        return max(0, min(count, len(keys))) if isinstance(count, int) else 0

    def get(self, key: str, target: torch.Tensor) -> bool:
        """Read `key` into `target`, uint8 [n]; False where it could not be read whole."""
        found = self._ask("batch_get", lambda: self.backend.batch_get([key], [target]), None)
        return isinstance(found, (list, tuple)) and len(found) == 1 and _landed(found[0], target)

    def clear(self) -> None:
        """Forget every page, also those of other servers: the backend knows no other way."""
        self._ask("clear", lambda: self.backend.clear(), None)

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self._ask("close", lambda: self.backend.close(), None)

    def _ask(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a backend is somebody else's code; whatever it raises is a miss
            self._counters.add("errors")
            if what not in self._complained:
                self._complained.add(what)
                logger.warning("hisparse: storage: %s failed and counts as a miss: %r", what, error)
            return otherwise


def _landed(value: Any, target: torch.Tensor) -> bool:
    """Whether a backend's answer is in `target`; some return another tensor of the same bytes."""
    if not isinstance(value, torch.Tensor):
        return False
    if value.data_ptr() == target.data_ptr():
        return True
    flat = value.reshape(-1).view(torch.uint8)
    if flat.numel() != target.numel():
        return False
    target.copy_(flat)
    return True
