"""Check the kernels on one GPU: build, oracle, equality with the CPU library, graph replay, page copies, sanitizers.

    python3 scripts/gpu_kernel_check.py                              # all checks, no sanitizer, about a minute
    python3 scripts/gpu_kernel_check.py --fuzz 10000                 # 10,000 random cases (scripts/kernel_fuzz.py) instead of 300
    python3 scripts/gpu_kernel_check.py --only --memcheck --racecheck --initcheck     # compute-sanitizer, each on a small run
    python3 scripts/gpu_kernel_check.py --sanitize-case              # what runs under compute-sanitizer

Needs torch with CUDA, apache-tvm-ffi and nvcc or a prebuilt library. Prints a summary last; writes kernel_check.json, and what the
sanitizers print, into $OUT if that is set. Times are measured by bench_resolver.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import kernel_checks as checks
from bench_resolver import environment
from kernel_fuzz import fuzz_in_processes

SANITIZERS = ("memcheck", "racecheck", "initcheck")
FIRST_LINE = re.compile(r"^========= (?:Error|Warning|Invalid|Uninitialized|Race|\S.*hazard)", re.IGNORECASE)
OURS = "hisparse::"


def run_check(name: str, check: Callable[[], object], results: dict[str, object]) -> None:
    """Run one check, note what it says or how it failed."""
    began, ok = time.time(), True
    try:
        detail = check()
    except Exception as error:  # noqa: BLE001 - every check runs, whatever fails
        traceback.print_exc()
        ok, detail = False, f"{type(error).__name__}: {error}"[:900]
    results[name] = {"ok": ok, "seconds": round(time.time() - began, 1), "detail": detail}
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail} ({results[name]['seconds']} s)", flush=True)


def sanitizer_command(tool: str, program: str) -> list[str]:
    """The command of one tool. initcheck must see every kernel that writes, or what torch initialised counts as unwritten."""
    command = [program, "--tool", tool, "--print-limit", "50"]
    if tool != "initcheck":
        command += ["--kernel-name", "kns=hisparse", "--error-exitcode", "9"]
    if tool == "racecheck":
        command += ["--racecheck-report", "all"]
    return [*command, sys.executable, str(Path(__file__).resolve()), "--sanitize-case"]


def reports(output: str) -> list[str]:
    """What a tool found, one text a finding: its first line and the lines below it."""
    found: list[list[str]] = []
    inside = False
    for line in output.splitlines():
        if FIRST_LINE.match(line) and "SUMMARY" not in line:
            found.append([line])
            inside = True
        elif inside and line.startswith("=========     "):
            found[-1].append(line)
        else:
            inside = False
    return ["\n".join(lines) for lines in found]


def sanitize(tool: str, seconds: float) -> str:
    """One of compute-sanitizer's tools on `--sanitize-case`: no finding in a kernel of ours. Raises AssertionError."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert Path(program).exists(), "compute-sanitizer not found"
    done = subprocess.run(
        sanitizer_command(tool, program), check=False, capture_output=True, text=True, timeout=seconds
    )
    output = done.stdout + done.stderr
    if folder := os.environ.get("OUT"):
        Path(folder, f"{tool}.log").write_text(output[:2_000_000])
    summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    assert summary and "small run done" in output, (
        f"{tool} did not finish, exit status {done.returncode}: {output[-400:]}"
    )
    found = reports(output)
    ours = [text for text in found if OURS in text]
    assert not ours, f"{len(ours)} findings, the first: {ours[0]}"
    assert tool == "initcheck" or done.returncode == 0, f"exit status {done.returncode}: {summary[-1]}"
    return f"{summary[-1]}; in other kernels {len(found)}, in ours 0"


def long_fuzz(cases: int, seed: int, seconds: float) -> str:
    """Random cases in several processes; raises AssertionError with what repeats the first fault."""
    found = fuzz_in_processes(cases, seed, "cuda", max(1, min(14, (os.cpu_count() or 2) - 2)), seconds)
    assert not found["faults"], found["faults"][0]
    assert found["cases"] >= cases, f"only {found['cases']} of {cases} cases in {seconds} s"
    return f"{found['cases']} cases, {found['rows']} rows, seed {seed}, {found['processes']} processes"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=int, default=300, help="random cases against the oracle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=100, help="limit of the fuzz, and of each sanitizer")
    for tool in SANITIZERS:
        parser.add_argument(f"--{tool}", action="store_true", help=f"also run under compute-sanitizer's {tool}")
    parser.add_argument(
        "--only", action="store_true", help="nothing but the sanitizers named, and the fuzz if it is named"
    )
    parser.add_argument("--sanitize-case", action="store_true", help="only a tiny run, for a tool")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        print("no CUDA device is visible", file=sys.stderr)
        return 2
    if arguments.sanitize_case:
        checks.tiny("cuda")
        torch.cuda.synchronize()
        print("small run done")
        return 0
    results: dict[str, object] = {}
    if not arguments.only:
        run_check("build", checks.build, results)
        for name, check in checks.all_checks("cuda", 60, arguments.seed).items():
            run_check(name, check, results)
    if not arguments.only or "--fuzz" in sys.argv:
        run_check("random cases", lambda: long_fuzz(arguments.fuzz, arguments.seed, arguments.seconds), results)
    for tool in SANITIZERS:
        if getattr(arguments, tool):
            run_check(tool, lambda tool=tool: sanitize(tool, arguments.seconds), results)
    print("\n--- summary ---")
    for name, result in results.items():
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {name}: {result['detail']}")
    if out := os.environ.get("OUT"):
        report = {**environment(), "results": results}
        Path(out, "kernel_check.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
