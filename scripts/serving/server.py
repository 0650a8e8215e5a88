"""Owns one SGLang server process: its command line, environment, log file, readiness and end.

The verify and bench scripts call it. It never kills anything but the process group that it started.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HISPARSE_CONFIG: dict[str, Any] = {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 8}
# No program of ours uses NVLink multicast: on a shared host it can put the GPUs of others out of service. SGLang would use it by
# default with several ranks, to gather logits and to fuse all-reduces; only the variables keep it from the former.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
TENSOR_PARALLEL_FLAGS = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")


class ServerError(RuntimeError):
    """A server did not start or ended too early; carries the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What to start. `plugin` puts the package on the path; without it `hisparse` means SGLang's own."""

    name: str
    hisparse: bool = False
    plugin: bool = False
    radix: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    @property
    def elastic(self) -> bool:
        """Whether its border between KV and index-K moves."""
        return bool(self.config.get("elastic_border"))


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things are on this machine. Logs and counter files go to `logs`."""

    model: pathlib.Path
    logs: pathlib.Path
    site: str = "/opt/site"
    plugin: str = "/opt/plugin"
    cache: str = "/opt/cache"


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name the folders of `Paths` beside model and logs."""
    parser.add_argument("--site", default="/opt/site", help="folder with SGLang")
    parser.add_argument("--plugin", default="/opt/plugin", help="folder with sglang-hisparse installed")
    parser.add_argument("--cache", default="/opt/cache", help="folder of compiled kernels")


@dataclass(frozen=True, slots=True)
class Limits:
    """Equal for all systems of one comparison. pool_tokens bounds the device pool; tp: GPUs of each server."""

    pool_tokens: int = 200_000
    max_running: int = 64
    chunk_tokens: int = 8192
    kv_dtype: str = "bfloat16"
    mem_fraction: float = 0.7
    tp: int = 1


def command_line(spec: ServerSpec, paths: Paths, limits: Limits, port: int) -> list[str]:
    """The argument vector of the server."""
    sizes = [str(size) for size in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if size <= limits.max_running]
    backend = "flashmla_kv" if limits.kv_dtype == "fp8_e4m3" else "flashmla_sparse"  # those that HiSparse takes
    command = [
        sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port),
        "--model-path", str(paths.model.resolve()), "--log-level", "warning",
        "--skip-tokenizer-init", "--skip-server-warmup", "--gc-warning-threshold-secs", "0.1",
        "--kv-cache-dtype", limits.kv_dtype,
        "--dsa-prefill-backend", backend, "--dsa-decode-backend", backend,
        "--mem-fraction-static", str(limits.mem_fraction), "--max-running-requests", str(limits.max_running),
        "--cuda-graph-bs-decode", *sizes, "--disable-prefill-cuda-graph",
        "--chunked-prefill-size", str(limits.chunk_tokens), "--max-total-tokens", str(limits.pool_tokens),
    ]  # fmt: skip
    if limits.tp > 1:
        command += ["--tp-size", str(limits.tp), *TENSOR_PARALLEL_FLAGS]
    if spec.hisparse:
        # Comparisons name the border that they mean; null leaves it open.
        border = {"elastic_border": False} if spec.plugin else {}
        command += ["--enable-hisparse", "--hisparse-config", json.dumps(HISPARSE_CONFIG | border | spec.config)]
    if not spec.radix:
        command.append("--disable-radix-cache")
    return command + list(spec.extra_args)


def environment(spec: ServerSpec, paths: Paths) -> dict[str, str]:
    """The server's environment: this process's, plus paths, caches and what the spec asks for.

    An empty SGLANG_PLUGINS would load every plugin, so a server without ours names one that does not exist.
    """
    search = ([paths.plugin] if spec.plugin else []) + [paths.site]
    return dict(os.environ) | {
        "PYTHONPATH": ":".join(search),
        "SGLANG_PLUGINS": "hisparse" if spec.plugin else "none",
        "SGLANG_HISPARSE_STATS_FILE": str(stats_file(spec, paths)),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": paths.cache,
        "SGLANG_CACHE_DIR": f"{paths.cache}/sglang",
        "TVM_FFI_CACHE_DIR": f"{paths.cache}/tvm",
        "TRITON_CACHE_DIR": f"{paths.cache}/triton",
        "FLASHINFER_WORKSPACE_BASE": paths.cache,
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
        **NO_MULTICAST,
        **spec.env,
    }


def stats_file(spec: ServerSpec, paths: Paths, rank: int = 0) -> pathlib.Path:
    """Where a rank of a server with the plugin keeps its counters; the first rank's file is the one that is asked for."""
    return paths.logs.resolve() / f"{spec.name}.stats{f'.rank{rank}' if rank else ''}.json"


class Server:
    """One running server; use `running`. `url` takes requests."""

    def __init__(self, spec: ServerSpec, paths: Paths, command: list[str], port: int, tp: int = 1) -> None:
        self.spec, self.url = spec, f"http://127.0.0.1:{port}"
        self.log = paths.logs / f"{spec.name}.log"
        self._stats = [stats_file(spec, paths, rank) for rank in range(tp)]
        self._ready_bytes = 0
        paths.logs.mkdir(parents=True, exist_ok=True)
        pathlib.Path(paths.cache).mkdir(parents=True, exist_ok=True)
        for file in self._stats:
            file.unlink(missing_ok=True)
        with self.log.open("wb") as handle:
            self._process = subprocess.Popen(
                command,
                stdout=handle,
                stderr=subprocess.STDOUT,
                env=environment(spec, paths),
                cwd=paths.logs,  # not the repository, whose sources would shadow the installed package
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds until /health answered. Raises ServerError when the process ended or the time is up."""
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            if self._process.poll() is not None:
                raise ServerError(self._failure(f"ended with code {self._process.returncode} while starting"))
            if self.get("/health") is not None:
                self._ready_bytes = self.log.stat().st_size
                return time.monotonic() - start
            time.sleep(0.5)
        raise ServerError(self._failure(f"was not ready after {timeout_s:.0f} s"))

    def check_alive(self) -> None:
        """Raises ServerError when the process is gone."""
        if self._process.poll() is not None:
            raise ServerError(self._failure(f"ended with code {self._process.returncode}"))

    def get(
        self, path: str, timeout_s: float = 5.0, method: str = "GET", body: dict[str, Any] | None = None
    ) -> str | None:
        """Body of a 200 answer, or None for any other; `body` is sent as JSON."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(
                self.url + path, data, {"Content-Type": "application/json"} if data else {}, method=method
            )
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.read().decode()
        except (urllib.error.URLError, OSError):
            return None

    def flush(self, patience_s: float = 10.0) -> bool:
        """Drop the prefix cache; False when the server refused for so long, as it does while requests run."""
        deadline = time.monotonic() + patience_s
        while self.get("/flush_cache", timeout_s=30, method="POST") is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.3)
        return True

    def freeze_gc(self) -> bool:
        """Keep what the server's processes hold by now out of garbage collections; to be asked for once it is warm. SGLang does so after
        a warm-up of its own, which these servers leave out: it then asks before it listens, and seldom succeeds."""
        return self.get("/freeze_gc", method="POST") is not None

    def counters(self) -> dict[str, int]:
        """The plugin's counters on the first rank since start, as last written; empty for a server without the plugin."""
        return self.rank_counters()[0]

    def rank_counters(self) -> list[dict[str, int]]:
        """The same for every rank; empty for a rank that has written none."""
        return [self._read(file) if self.spec.plugin else {} for file in self._stats]

    @staticmethod
    def _read(file: pathlib.Path) -> dict[str, int]:
        try:
            lines = file.read_text().strip().splitlines()
        except FileNotFoundError:
            return {}
        return json.loads(lines[-1]) if lines else {}

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log, long ones cut; the echo of the server's arguments is left out."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in text[-4 * lines :] if "server_args" not in line)[-lines * 300 :]

    def errors(self) -> list[str]:
        """Lines logged since the server was ready that look like a failure; of a traceback, the line that ends it."""
        marks = ("Traceback (most recent call last)", "] ERROR", "CUDA error", "Scheduler hit an exception")
        text = self.log.read_bytes()[self._ready_bytes :].decode(errors="replace")
        found, in_traceback = [], False
        for line in text.splitlines():
            marked = any(mark in line for mark in marks)
            if in_traceback and line and not line.startswith((" ", "|", "+")):
                found[-1], in_traceback = f"{found[-1]} ... {line}"[:300], False
            if marked:
                found.append(line[:200])
                in_traceback = marks[0] in line
        return found

    def _failure(self, what: str) -> str:
        return f"server {self.spec.name} {what}; end of {self.log}:\n{self.log_tail()}"

    def ask_to_end(self) -> None:
        """SIGTERM to the process that was started, as a process manager sends it; does not wait."""
        self._process.terminate()

    def wait_gone(self, patience_s: float) -> float | None:
        """Seconds until no process of the group is left, or None when some still is after `patience_s`."""
        start = time.monotonic()
        while _group_alive(self._process):
            if time.monotonic() - start >= patience_s:
                return None
            time.sleep(0.1)
        return time.monotonic() - start

    def stop(self, patience_s: float = 15.0) -> None:
        """Ask the process group to end, then end it."""
        for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            if self.wait_gone(wait_s) is not None:
                break
        self._process.wait()


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def running(
    spec: ServerSpec, paths: Paths, limits: Limits, port: int = 30000, timeout_s: float = 240.0
) -> Iterator[Server]:
    """Start a server, wait until it is ready, stop it at the end. Raises ServerError."""
    server = Server(spec, paths, command_line(spec, paths, limits, port), port, limits.tp)
    try:
        seconds = server.wait_ready(timeout_s)
        print(f"[{spec.name}] ready after {seconds:.0f} s", flush=True)
        yield server
    finally:
        server.stop()
