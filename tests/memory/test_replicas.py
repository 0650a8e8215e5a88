"""Goal: replicas of a server share a machine's host memory. Method: SGLang's own launcher and arguments, children by fork."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import data_parallel_controller as controller_module
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_hisparse import hooks
from sglang_hisparse.layout import GIB
from sglang_hisparse.memory import replicas, sizing
from sglang_hisparse.stats import rank_file


@pytest.fixture(autouse=True)
def no_ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ledger at the start, and none afterwards: `open_ledger` writes to the environment by itself."""
    monkeypatch.setenv(replicas.LEDGER_VARIABLE, "")
    monkeypatch.delenv(replicas.LEDGER_VARIABLE)
    yield


def share_of(monkeypatch: pytest.MonkeyPatch, free_gib: int, dp_size: int, ranks: int = 1) -> float:
    """GiB that a rank may pin of `free_gib`, of which SGLang reserves 10, in one of `dp_size` worlds of `ranks`."""
    monkeypatch.setattr(sizing, "available_host_memory_bytes", lambda **_: free_gib * GIB)
    monkeypatch.setattr(sizing, "ranks_per_host", lambda: ranks)
    with get_parallel().override(dp_size=dp_size, launch_world_size=1):
        return sizing.host_bytes_per_rank() / GIB


def test_replicas_divide_what_the_first_one_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: equal shares, whoever comes first. Method: the second replica looks when the first has pinned its share."""
    replicas.open_ledger()
    assert share_of(monkeypatch, 410, dp_size=2) == 200
    assert share_of(monkeypatch, 210, dp_size=2) == 200


def test_no_replica_takes_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: something else has taken memory meanwhile. Method: the second replica finds less than its share."""
    replicas.open_ledger()
    assert share_of(monkeypatch, 410, dp_size=2, ranks=4) == 50
    assert share_of(monkeypatch, 90, dp_size=2, ranks=4) == 20


def test_without_a_ledger_each_divides_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: never more than the machine has. Method: no ledger, one that has gone, and one replica alone."""
    assert share_of(monkeypatch, 410, dp_size=2) == 200
    monkeypatch.setenv(replicas.LEDGER_VARIABLE, "/proc/self/fd/987654")
    assert share_of(monkeypatch, 210, dp_size=2) == 100
    assert share_of(monkeypatch, 210, dp_size=1) == 200


@pytest.mark.parametrize(
    ("flags", "per_host"), [({}, 2), ({"dp_size": 2}, 4), ({"dp_size": 2, "enable_dp_attention": True}, 2)]
)
def test_only_replicas_multiply_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: dict[str, Any], per_host: int
) -> None:
    """Goal: DP attention splits one world, --dp-size makes more of them. Method: SGLang resolves the flags."""
    from harness.bootstrap import HarnessConfig, build_server_args, write_checkpoint
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

    config = HarnessConfig(4096, 8, 256, 64, True, False, None, 4, 128, 1, 1000, 8192, {"tp_size": 2, **flags})
    write_checkpoint(tmp_path, config)
    arguments = build_server_args(tmp_path, config)
    monkeypatch.setattr(sizing, "ranks_per_host", lambda: get_parallel().launch_world_size)
    dp_rank = 1 if flags else None
    with use_context(
        create_context(arguments, role="scheduler", ranks=SpawnRanks(world_rank=1, dp_rank=dp_rank, gpu_id=0))
    ):
        assert sizing.ranks_on_host() == per_host
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
        is_second_replica = flags == {"dp_size": 2}
        name = "s.dp1.rank1.json" if is_second_replica else "s.rank1.json"
        assert rank_file(Path("s.json"), SimpleNamespace()).name == name


def _looks(arguments: Any, ports: Any, gpu: int, tp: int, pp: int, dp_rank: int, writer: Any, *display: Any) -> None:
    """In place of SGLang's scheduler process: says what it was told, having seen less than the replica before it."""
    writer.send({"max_total_num_tokens": replicas.first_seen(1000 - dp_rank), "max_req_input_len": dp_rank})


def test_the_launcher_of_replicas_opens_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: replicas find the ledger, plain servers and other SGLang servers have none. Method: SGLang's launcher, forked."""
    monkeypatch.setattr(controller_module, "mp", multiprocessing.get_context("fork"))
    monkeypatch.setenv("SGLANG_AUTO_NUMA_BIND", "0")
    launcher = DataParallelController.__new__(DataParallelController)
    launcher.run_scheduler_process_func, launcher.prelaunched_schedulers = _looks, None
    launcher.env_lock, launcher._scheduler_init_info_lock = threading.Lock(), threading.Lock()
    launcher.scheduler_procs, launcher.local_kv_event_sources, launcher._scheduler_init_infos = [], [], []
    launcher.attn_replica_size = 1
    with get_context().override_server_args(enable_hisparse=True, dp_size=2):
        hooks.before_launch_replicas(launcher, None, None)
        for dp_rank in range(2):
            launcher.launch_tensor_parallel_group(SimpleNamespace(numa_node=None), None, 0, dp_rank)
    told = {info["max_req_input_len"]: info["max_total_num_tokens"] for info in launcher._scheduler_init_infos}
    assert told == {0: 1000, 1: 1000}
    for process in launcher.scheduler_procs:
        process.join(10)
    monkeypatch.delenv(replicas.LEDGER_VARIABLE)
    with get_context().override_server_args(enable_hisparse=False, dp_size=2):
        hooks.before_launch_replicas(launcher, None, None)
    assert replicas.LEDGER_VARIABLE not in os.environ
