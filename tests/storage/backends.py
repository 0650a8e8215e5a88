"""Storage backends that misbehave, each put before a server's real one. Called by the tests of failures.

`Between` answers every call with the real backend's answer unless a test says otherwise; it never changes bytes on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from harness.engine import Engine
from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class Between:
    """Takes the place of a backend. before: called with the name of each method before the real one; it may wait or raise.

    answers: method name -> function of (real answer) that gives the answer instead.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        self.before: Callable[[str], None] = lambda name: None
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.real, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            self.before(name)
            answer = method(*args, **kwargs)
            return self.answers[name](answer) if name in self.answers else answer

        return call


def between(engine: Engine) -> Between:
    """Step between a running server and its backend."""
    store = engine.coordinator.storage._store
    store.backend = Between(store.backend)
    return store.backend


class Gate:
    """Holds calls back until it is opened; `entered` tells that one has arrived."""

    def __init__(self, *names: str, after: int = 0, thread: str = "") -> None:
        """names: methods that wait; the first `after` calls of them pass. thread: only calls of threads of this name wait."""
        self._names, self._left, self._thread = names, after, thread
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name not in self._names or self._thread not in threading.current_thread().name:
            return
        if self._left:
            self._left -= 1
            return
        self.entered.set()
        assert self._open.wait(30), "the gate was never opened"

    def open(self) -> None:
        self._open.set()


class OwnBackend(HiCacheFile):
    """A class of one's own, as `dynamic` takes it."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        super().__init__(storage_config)


class Forgetful(OwnBackend):
    """Says that it has stored something, and has not."""

    def batch_set(self, keys: Any, values: Any = None, *args: Any, **kwargs: Any) -> bool:
        return True
