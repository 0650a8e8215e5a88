"""SIGTERM to a scheduler process: it leaves its loop instead of dying, and the ranks of a server leave it together.

SGLang's launcher ends its schedulers by a message, which all ranks read in the same iteration. A process manager may send
SIGTERM to them directly. A single rank then leaves its loop by itself. Of several ranks the first turns the signal into the
launcher's message, which SGLang broadcasts with whatever else has arrived; a rank that left alone would let the others fail in
their next collective, and the launcher, told of the failure, would kill the one that still writes to storage. The runtime calls
`obey_sigterm`, the hook on SGLang's request receiver `with_shutdown`. It must never touch the loop of one rank of several.
"""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger(__name__)


class _Signal:
    """Whether SIGTERM has come and has not been passed on. A container: hooks may be imported under two names."""

    has_come = False


def obey_sigterm(scheduler: Any) -> None:
    """From now on SIGTERM ends `scheduler`, or all ranks of its server, through the loop. Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    _Signal.has_come = False
    is_one_of_several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    # A handler may interrupt anything, a log line too: it sets a flag and no more.
    if is_one_of_several:
        signal.signal(signal.SIGTERM, lambda *_: setattr(_Signal, "has_come", True))
    else:
        signal.signal(signal.SIGTERM, lambda *_: setattr(scheduler, "gracefully_exit", True))


def with_shutdown(received: list[Any] | None) -> list[Any] | None:
    """What this rank has received, before it is broadcast, and the end of the server behind it where SIGTERM has come.

    received: None on ranks that receive nothing themselves.
    """
    if not _Signal.has_come:
        return received
    _Signal.has_come = False
    if received is None or not _speaks_for_others():
        logger.warning("HiSparse: SIGTERM: this rank ends with the others, when the first rank is told to")
        return received
    from sglang.srt.managers.io_struct import ShutdownReq

    logger.warning("HiSparse: SIGTERM: all ranks end")
    return [*received, ShutdownReq()]


def _speaks_for_others() -> bool:
    """Whether SGLang broadcasts the control messages that this rank receives."""
    parallel = get_parallel()
    if parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast:
        return parallel.attn_tp_rank == 0
    return parallel.tp_rank == 0
