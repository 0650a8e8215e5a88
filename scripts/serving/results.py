"""Owns the form of the result files: what they contain, how rows are added, and that a file is never half written."""

import functools
import importlib.metadata
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SERVING_KEYS = (
    "model", "dtype", "context", "output", "concurrency", "pool_tokens", "system", "output_tok_s", "decode_tok_s",
    "ttft_s", "itl_ms", "pages_spilled", "rows_fetched",
)  # fmt: skip
FIDELITY_KEYS = ("case", "prompts", "identical", "pages_spilled", "rows_fetched", "audited_rows", "mismatches")
AGENT_KEYS = ("conversations", "turn", "system", "ttft_s", "output_tok_s", "prefilled_tokens")
# A row with equal identity replaces the older one.
SERVING_IDENTITY = ("model", "dtype", "context", "output", "concurrency", "pool_tokens", "system")
FIDELITY_IDENTITY = ("case",)
AGENT_IDENTITY = ("conversations", "turn", "system")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write through a temporary name in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def current_commit() -> str:
    """HEAD of the repository that holds this file, or "" where there is none."""
    here = pathlib.Path(__file__).resolve().parent
    answer = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


@functools.cache
def versions(site: str) -> dict[str, str]:
    """Versions of what the servers run, read from the package folder `site`, and of Python and the GPU."""
    known = {"python": sys.version.split()[0]}
    wanted = {"sglang", "torch", "sglang-kernel", "sgl-flash-mla", "sgl-deep-gemm"}
    for dist in importlib.metadata.distributions(path=[site]):
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if name in wanted:
            known[name] = dist.version
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        known["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        known["gpu"] = "none"
    return dict(sorted(known.items()))


def add_rows(
    document: dict[str, Any], rows: Sequence[dict[str, Any]], keys: Sequence[str], identity: Sequence[str]
) -> dict[str, Any]:
    """A copy of `document` with `rows` added, older rows of equal identity dropped. Raises ValueError on other keys."""
    for row in rows:
        if tuple(row) != tuple(keys):
            raise ValueError(f"row has keys {tuple(row)}, the form has {tuple(keys)}")
    fresh = {tuple(row[key] for key in identity) for row in rows}
    kept = [row for row in document.get("rows", []) if tuple(row[key] for key in identity) not in fresh]
    return document | {"rows": kept + list(rows)}


def read_document(path: pathlib.Path) -> dict[str, Any]:
    """The document at `path`, or an empty one."""
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def update(
    path: pathlib.Path,
    base: pathlib.Path,
    rows: Sequence[dict[str, Any]],
    keys: Sequence[str],
    identity: Sequence[str],
    head: dict[str, Any],
) -> None:
    """Add rows to `path`, starting from `base` when `path` does not exist yet; `head` goes before the rows."""
    document = add_rows(read_document(path if path.exists() else base), rows, keys, identity)
    old_head = {key: value for key, value in document.items() if key != "rows"}
    write_json(path, old_head | head | {"rows": document["rows"]})
