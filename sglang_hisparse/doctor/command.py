"""The body of `sglang-hisparse check`: runs the checks, prints one table, exit status.

Registered by cli.py. torch is imported when the command runs, SGLang only in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_hisparse.doctor.findings import Finding, as_json, error, is_good, no_gpu, table_of, warning


def check(
    fast: Annotated[bool, typer.Option("--fast", help="Leave out what takes long: hooks, link bandwidth.")] = False,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all lines to this file.")] = None,
) -> None:
    """Say whether this machine can run the server, line by line, with what to do.

    Exit status 0 if no line is an error, else 1. Without a GPU what needs one is skipped.
    """
    errors = Console(stderr=True)
    with errors.status("looking around"):
        findings = list(all_findings(fast))
    console = Console()
    (console if console.is_terminal else Console(width=118)).print(table_of(findings))
    if json is not None:
        import json as encoder

        json.write_text(encoder.dumps(as_json(findings), indent=1) + "\n", encoding="utf-8")
    if not is_good(findings):
        raise typer.Exit(1)


def all_findings(fast: bool) -> Iterator[Finding]:
    """Every check, software first."""
    from sglang_hisparse.doctor import software

    yield software.check_python()
    yield software.check_sglang()
    yield software.check_entry_point()
    yield software.check_plugin_list()
    yield software.check_hooks(fast)
    try:
        from sglang_hisparse.doctor import gpus as gpu_checks
    except ImportError as problem:
        yield error("torch", f"cannot be imported: {problem}", "pip install this package again, with its dependencies")
        return
    gpus = gpu_checks.visible_gpus()
    architecture = f"{gpus[0].capability[0]}.{gpus[0].capability[1]}a" if gpus else None
    yield from software.check_kernels(architecture)
    yield from gpu_checks.check_gpus(gpus)
    yield gpu_checks.check_shared_memory(gpus)
    yield from _memory_findings(gpus)
    if fast and gpus:
        yield warning("link bandwidth", "skipped (--fast)", "leave --fast out once on this machine")
    else:
        yield from gpu_checks.check_link(gpus)


def _memory_findings(gpus: list) -> Iterator[Finding]:
    from sglang_hisparse.doctor import host

    limit = host.cgroup_limit_bytes()
    yield host.check_memlock()
    yield host.check_cgroup(limit)
    yield host.check_available(limit, sum(gpu.total_bytes for gpu in gpus), len(gpus))
    if gpus:
        yield host.check_numa([gpu.numa_node for gpu in gpus], host.numa_nodes())
    else:
        yield no_gpu("NUMA node of each GPU")
