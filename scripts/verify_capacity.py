#!/usr/bin/env python3
"""Compare the tokens that servers hold at the same memory: plain SGLang, ours with elastic_border true, left open, and false.

The servers start one after another on one GPU with the same --mem-fraction-static and no other limit, so that SGLang and the
package size the pools themselves. Writes capacity_h200.json into --out: what each server holds on the GPU, and for ours how many
logical tokens there are at the start. elastic_border true, and left open, must hold within 2 % of plain's tokens.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from serving.fidelity import settled_counters
from serving.fleet import PAGE_TOKENS
from serving.results import current_commit, versions, write_json
from serving.server import Limits, Paths, Server, ServerError, ServerSpec, add_place_arguments, running

NO_LIMIT = 1 << 40  # tokens; SGLang takes the smaller of this and what the memory holds
LEAST_SHARE = 0.98
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ours_elastic": {"elastic_border": True},
    "ours_open": {"elastic_border": None},
    "ours": {"elastic_border": False},
}


def held(server: Server) -> dict[str, int]:
    """Tokens on the GPU, of ours the logical tokens too. Raises ServerError when the server does not say."""
    if server.spec.plugin:
        counts = settled_counters(server)
        pages = sum(counts[f"device_pages_{state}"] for state in ("free", "resident", "hot"))
        return {"device_tokens": pages * PAGE_TOKENS, "logical_tokens": reported_tokens(server)}
    return {"device_tokens": reported_tokens(server)}


def reported_tokens(server: Server) -> int:
    """`max_total_num_tokens` of /server_info. Raises ServerError when it is not there."""
    answer = json.loads(server.get("/server_info", timeout_s=30) or "{}")
    if "max_total_num_tokens" not in answer:
        raise ServerError(f"server {server.spec.name} does not say max_total_num_tokens")
    return int(answer["max_total_num_tokens"])


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the result")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"))
    parser.add_argument("--mem-fraction", type=float, default=0.2, help="--mem-fraction-static of every server")
    parser.add_argument("--ratio", type=float, default=2, help="host_to_device_ratio; the host tier is pinned at the start")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"])
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    add_place_arguments(parser)
    args = parser.parse_args(argv)
    if unknown := [system for system in args.systems if system not in SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    if args.systems[0] != "plain":
        parser.error("--systems begins with plain, which the others are held against")
    return args


def main(argv: list[str] | None = None) -> int:
    """0 when ours with elastic_border, or with it left open, holds within 2 % of plain's tokens, 1 when not or when a server did not start."""
    args = parse_arguments(argv)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    limits = Limits(pool_tokens=NO_LIMIT, kv_dtype=args.kv_dtype, mem_fraction=args.mem_fraction)
    rows: dict[str, dict[str, int]] = {}
    shares: dict[str, float] = {}
    head = {"commit": args.commit, "versions": versions(args.site), "mem_fraction_static": args.mem_fraction}
    head |= {"kv_dtype": args.kv_dtype, "host_to_device_ratio": args.ratio}
    for place, system in enumerate(args.systems):
        keys = SYSTEMS[system]
        config = {} if keys is None else {"host_to_device_ratio": args.ratio} | keys
        spec = ServerSpec(f"capacity-{system}", hisparse=keys is not None, plugin=keys is not None, config=config)
        try:
            with running(spec, paths, limits, args.port + 10 * place, args.start_timeout) as server:
                rows[system] = held(server)
        except ServerError as error:
            print(f"FAILED: {system}: {error}", flush=True)
            return 1
        shares[system] = round(rows[system]["device_tokens"] / rows["plain"]["device_tokens"], 4)
        print(f"[{system}] {rows[system]}, {shares[system]} of plain's", flush=True)
        write_json(args.out / "capacity_h200.json", head | {"rows": rows, "share_of_plain": shares})
    holds = all(shares.get(system, 1.0) >= LEAST_SHARE for system in ("ours_elastic", "ours_open"))
    print(f"{'ok' if holds else 'FAILED'}: share of plain's tokens {shares}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
