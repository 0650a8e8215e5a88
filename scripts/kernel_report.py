"""Print registers, shared memory and spills of every kernel, for one or more architectures; needs nvcc, no GPU.

    python scripts/kernel_report.py                 # 9.0a and 10.0a
    python scripts/kernel_report.py --arch 9.0a --json report.json

Exits with 1 if any kernel spills registers or keeps an array on the stack.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_hisparse.kernels.build import CUDA_FLAGS, cuda_home, source_folder

ARCHITECTURES = ("9.0a", "10.0a")
SOURCES = ("resolver.cu", "page_copy.cu", "union_fetch.cu", "counters.cu")
PATTERN = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What one kernel takes; bytes except `registers` (per thread). Dynamic shared memory is chosen at launch."""

    arch: str
    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int

    @property
    def spills(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


def _demangled(name: str) -> str:
    """Kernel and template arguments: `resolve_kernel<1, 0, 3>`."""
    plain = re.search(r"\d+([a-z_]+_kernel)(?:I((?:Li-?\d+E)+)E)?", name)
    if not plain:
        return name
    arguments = re.findall(r"Li(-?\d+)E", plain[2] or "")
    return plain[1] + (f"<{', '.join(arguments)}>" if arguments else "")


def parse(output: str) -> list[KernelUse]:
    """Kernels named in what ptxas prints under -v."""
    uses = []
    for block in re.split(r"(?=ptxas info\s+: Compiling entry function)", output):
        if found := PATTERN.search(block):
            numbers = [int(found[key] or 0) for key in ("registers", "stack", "stores", "loads", "shared")]
            uses.append(KernelUse(found["arch"], _demangled(found["name"]), *numbers))
    return uses


def report(architecture: str) -> list[KernelUse]:
    """Compile every kernel for one architecture and read what ptxas says. Raises RuntimeError with nvcc's output."""
    number = architecture.replace(".", "")
    uses = []
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            command = [str(cuda_home() / "bin" / "nvcc"), *CUDA_FLAGS, "-Xptxas", "-v", "-cubin"]
            command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
            command += ["-o", str(Path(folder) / "kernel.cubin"), str(source_folder() / source)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
            uses += parse(done.stderr)
    return uses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    uses = [use for architecture in arguments.arch for use in report(architecture)]
    for use in uses:
        note = f"SPILLS {use.spill_stores}/{use.spill_loads} B, stack {use.stack} B" if use.spills else ""
        print(f"{use.arch:8} {use.name:28} {use.registers:3} registers  {use.static_shared:5} B static shared  {note}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(use) for use in uses], indent=1) + "\n")
    return int(any(use.spills for use in uses))


if __name__ == "__main__":
    sys.exit(main())
