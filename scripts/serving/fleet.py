"""Several servers on one GPU at once, each with its own port: they start together, and are measured one after another.

The agent, serving and soak scripts call it. It owns how servers are given equal GPU memory; it sends no load.
"""

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from serving.server import HISPARSE_CONFIG, Limits, Paths, Server, ServerError, ServerSpec, command_line

# Bytes of one token and layer: a KV row by cache dtype, and a row of index keys, which only DSA layers have.
ROW_BYTES = {"bfloat16": 1152, "fp8_e4m3": 656}
INDEX_ROW_BYTES = 132
PAGE_TOKENS = 64
# An idle server holds about 8 GiB beside its pools, so this share leaves each of them room for its own.
FLEET_MEM_FRACTION = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Tokens of one system's cache, and what they cost per layer set. logical_tokens: host rows where there is a host tier."""

    device_tokens: int
    logical_tokens: int
    gpu_bytes: int
    host_bytes: int

    def as_json(self) -> dict[str, int]:
        """For the result files."""
        return dataclasses.asdict(self)


def plain_pool(tokens: int, layers: int, kv_dtype: str, host_tokens: int = 0) -> Pool:
    """Everything on the GPU; with host_tokens a second copy below it, KV rows and index keys, as HiCache keeps it."""
    cell = layers * (ROW_BYTES[kv_dtype] + INDEX_ROW_BYTES)
    return Pool(tokens, tokens, tokens * cell, host_tokens * cell)


def hisparse_pool(
    plain_tokens: int, ratio: int, layers: int, kv_dtype: str, equal: str = "bytes", elastic: bool = False
) -> Pool:
    """Pool of a system whose index keys cover `ratio` times its device tokens, every layer having an indexer.

    equal "bytes": as much GPU memory, KV rows and index keys together, as a plain pool of plain_tokens takes, in whole
    pages. equal "tokens": as many device tokens. Raises ValueError for another word. elastic: the border moves; device tokens
    are then those of the plain pool, from which it begins, and everything else is as without.
    """
    if equal not in ("bytes", "tokens"):
        raise ValueError(f"equal {equal!r}; allowed: bytes, tokens")
    row = ROW_BYTES[kv_dtype]
    tokens = plain_tokens
    if equal == "bytes":
        tokens = plain_tokens * (row + INDEX_ROW_BYTES) // (row + ratio * INDEX_ROW_BYTES) // PAGE_TOKENS * PAGE_TOKENS
    logical = tokens * ratio
    gpu_bytes = layers * (tokens * row + logical * INDEX_ROW_BYTES)
    return Pool(plain_tokens if elastic else tokens, logical, gpu_bytes, layers * logical * row)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One server of a fleet."""

    spec: ServerSpec
    limits: Limits


def member(
    spec: ServerSpec, pool: Pool, *, ratio: float | None, max_running: int, kv_dtype: str, name: str, **config: Any
) -> Member:
    """`spec` under another name, with a pool and, where it has HiSparse, that ratio and further config keys.

    With a border that moves the ratio is the pool's own: logical tokens per device token at start.
    """
    if spec.elastic:
        ratio = pool.logical_tokens / pool.device_tokens
    if spec.hisparse:
        spec = dataclasses.replace(spec, config={"host_to_device_ratio": ratio} | spec.config | config)
    limits = Limits(
        pool_tokens=pool.device_tokens, max_running=max_running, kv_dtype=kv_dtype, mem_fraction=FLEET_MEM_FRACTION
    )
    return Member(dataclasses.replace(spec, name=name), limits)


def with_options(spec: ServerSpec, config: dict[str, Any], stream_interval: int) -> ServerSpec:
    """A system with the options of a call: tokens of an event for every system; further config keys for ours, and those that
    SGLang's own HiSparse knows for that too. The system's own keys come first."""
    known = {key: value for key, value in config.items() if spec.plugin or (spec.hisparse and key in HISPARSE_CONFIG)}
    return dataclasses.replace(
        spec,
        config=known | spec.config,
        extra_args=(*spec.extra_args, "--stream-interval", str(stream_interval)),
    )


def ports(members: Mapping[str, Member], first: int) -> dict[str, int]:
    """A port for every member, ten apart."""
    return {key: first + 10 * place for place, key in enumerate(members)}


def command_of(member: Member, paths: Paths, port: int) -> list[str]:
    """The member's command line. Its NCCL port is given, since servers that pick one at the same time may pick the same."""
    return [*command_line(member.spec, paths, member.limits, port), "--nccl-port", str(port + 5)]


def dry_run(members: Mapping[str, Member], paths: Paths, first_port: int) -> str:
    """The commands that `fleet` would start, one a line."""
    at = ports(members, first_port)
    return "\n".join(shlex.join(command_of(member, paths, at[key])) for key, member in members.items())


@contextmanager
def fleet(
    members: Mapping[str, Member],
    paths: Paths,
    first_port: int = 30000,
    timeout_s: float = 240.0,
    *,
    complete: bool = False,
) -> Iterator[dict[str, Server]]:
    """Start all members at once; yields those that became ready, by key, and ends all of them at the end.

    One that does not start is named in the output and left out. Raises ServerError when none does, or, with `complete`, when
    one does not.
    """
    begin, at = time.monotonic(), ports(members, first_port)
    started: dict[str, Server] = {}
    ready: dict[str, Server] = {}
    failures = []
    try:
        for key, one in members.items():
            started[key] = Server(one.spec, paths, command_of(one, paths, at[key]), at[key], one.limits.tp)
        for key, server in started.items():
            try:
                server.wait_ready(max(1.0, timeout_s - (time.monotonic() - begin)))
                ready[key] = server
                print(f"[{key}] ready {time.monotonic() - begin:.0f} s after the start of all", flush=True)
            except ServerError as error:
                failures.append(str(error))
                print(f"[{key}] FAILED: {error}", flush=True)
        if failures and (complete or not ready):
            raise ServerError(f"{'no server' if not ready else 'not every server'} started: {failures[0]}")
        yield ready
    finally:
        for server in started.values():
            server.ask_to_end()
        for server in started.values():
            server.stop()
