"""Proof that no scheduler path waits for the device.

SGLANG_HISPARSE_SYNC_DEBUG=warn|error puts torch's sync-debug mode on inside the parts of this package that run on the
scheduler's thread, and inside SGLang's allocation and checkpoint functions around them: any call that would make the CPU wait
for the GPU then warns or raises there. Off by default, and free of cost then.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from sglang_hisparse.errors import ConfigError

VARIABLE = "SGLANG_HISPARSE_SYNC_DEBUG"
Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def read_mode() -> str:
    """What the variable asks for, read once in a process. Raises ConfigError."""
    mode = os.environ.get(VARIABLE, "")
    if mode not in ("", "0", "warn", "error"):
        raise ConfigError(f"{VARIABLE}: {mode!r} is not known; allowed: warn, error")
    return "" if mode == "0" or not torch.cuda.is_available() else mode


_NOTHING = contextlib.nullcontext()


def no_device_sync() -> contextlib.AbstractContextManager[None]:
    """Inside the block, a wait for the device warns or raises, as the variable says."""
    mode = read_mode()
    return _in_mode(mode) if mode else _NOTHING


@contextlib.contextmanager
def _in_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def without_device_sync(function: Function) -> Function:
    """The same for a whole function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with no_device_sync():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
