#!/usr/bin/env python3
"""Measure multi-turn conversations, whose history no longer fits on the GPU, on four systems: plain SGLang, plain SGLang
with HiCache, SGLang's own HiSparse, and sglang-hisparse.

All servers start at once and share one GPU; then, number of conversations by number, one system after the other is
measured, the caches empty at the start of each. All get the same GPU memory for KV rows and index keys together; HiCache gets
host memory for as many tokens as ours. Conversations go in step: a turn's prompts are sent together, the next turn follows
when all are answered. Rows are written as they come, so a run that is ended keeps what it has measured.

A result file can hold several scales: `settings` has scale, pools, commit and command of each number of conversations. Rows of
other numbers are carried over; those of the same number too if their setting, the command aside, is the same, and else go.

  bench_agent.py MODEL --out OUT                           measure, write agent_h200.json
  bench_agent.py MODEL --out OUT --restart '{"storage_backend": "file"}'
                                                           instead: stop the server after --restart-after turns, start it
                                                           again on what it has stored, and go on
  bench_agent.py --plot agent_h200.json                    draw agent_h200.png beside it, starts nothing
"""

import argparse
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from serving import agent, agent_restart
from serving.agent import Conversation, Shape, Turn
from serving.client import random_prompts, send
from serving.fidelity import growth
from serving.fleet import Member, Pool, dry_run, fleet, hisparse_pool, member, plain_pool, with_options
from serving.results import AGENT_IDENTITY, AGENT_KEYS, add_rows, current_commit, read_document, versions, write_json
from serving.server import Paths, Server, ServerError, ServerSpec, add_place_arguments

# In the order in which they are measured; SGLang's own HiSparse refuses to run with the prefix cache.
SYSTEMS = {
    "ours": ServerSpec("ours", hisparse=True, plugin=True),
    "plain_hicache": ServerSpec("plain_hicache"),
    "builtin": ServerSpec("builtin", hisparse=True, radix=False),
    "plain": ServerSpec("plain"),
    "ours_elastic": ServerSpec("ours_elastic", hisparse=True, plugin=True, config={"elastic_border": True}),
}
DEFAULT_SYSTEMS = ["ours", "plain_hicache", "builtin", "plain"]
LEAST_SECONDS = 8.0


@dataclass(slots=True)
class Run:
    """One call: its arguments, the systems' pools, the servers, and the answers got so far."""

    args: argparse.Namespace
    shape: Shape
    pools: dict[str, Pool]
    ends: float
    servers: dict[str, Server] = field(default_factory=dict)
    answers: dict[tuple[int, str], list[Conversation]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    identity: list[dict[str, Any]] = field(default_factory=list)
    restart: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> pathlib.Path:
        """The result file."""
        return self.args.out / "agent_h200.json"

    def setting(self) -> dict[str, Any]:
        """What rows of one number of conversations have in common; pools of all systems, measured in this call or not."""
        return {
            "commit": self.args.commit,
            "command": self.args.command,
            "scale": self.args.scale,
            "shape": asdict(self.shape),
            "kv_dtype": self.args.kv_dtype,
            "ratio": self.args.ratio,
            "pools": {name: pool.as_json() for name, pool in self.pools.items()},
            "think_s": self.args.think,
            "stream_interval": self.args.stream_interval,
            "config": self.args.config,
        }

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Add rows, and bring everything that follows from them up to date."""
        known = read_document(self.path if self.path.exists() else self.args.base or self.path)
        document = agent.carry_over(known, {row["conversations"] for row in rows}, self.setting())
        if gone := len(known["rows"]) - len(document["rows"]):
            print(f"{gone} rows made with another setting go", flush=True)
        rows = add_rows(document, rows, AGENT_KEYS, AGENT_IDENTITY)["rows"]
        outputs = agent.outputs_of(document)
        head: dict[str, Any] = {
            "commit": self.args.commit,
            "versions": versions(self.args.site),
            "command": self.args.command,
            "model": self.args.model_name,
            "settings": document["settings"],
            "columns": {
                "ttft_s": "median over conversations",
                "output_tok_s": "output tokens of the turn over all conversations / from first sending to last token",
                "prefilled_tokens": "prompt tokens minus cached tokens, summed over conversations",
            },
            "identity": _replace(document["identity"], self.identity, ("case", "system")),
            "counters": document["counters"] | self.counts,
            "restart": self.restart or document.get("restart", {}),
            "failures": self.failures,
            "totals": agent.totals(rows, outputs),
            "ratios": agent.ratios(rows, outputs),
        }
        write_json(self.path, head | {"rows": rows})

    def fail(self, what: str) -> None:
        """Print and keep a failure."""
        print(f"FAILED: {what}", flush=True)
        self.failures.append(what)


def _replace(old: list[dict[str, Any]], new: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    fresh = {tuple(entry[key] for key in keys) for entry in new}
    return [entry for entry in old if tuple(entry[key] for key in keys) not in fresh] + new


def pools_of(args: argparse.Namespace) -> dict[str, Pool]:
    """Equal GPU bytes for all; HiCache's host tier holds as many tokens as ours (and their index keys as well)."""
    sparse, elastic = (
        hisparse_pool(args.plain_tokens, args.ratio, args.layers, args.kv_dtype, elastic=moves) for moves in (False, True)
    )
    plain = plain_pool(args.plain_tokens, args.layers, args.kv_dtype)
    cached = plain_pool(args.plain_tokens, args.layers, args.kv_dtype, host_tokens=sparse.logical_tokens)
    return {"ours": sparse, "ours_elastic": elastic, "builtin": sparse, "plain": plain, "plain_hicache": cached}


def members_of(args: argparse.Namespace, pools: Mapping[str, Pool]) -> dict[str, Member]:
    """The servers to start."""
    members = {}
    for system in args.systems:
        spec = SYSTEMS[system]
        if system == "plain_hicache":
            share = pools["ours"].logical_tokens / args.plain_tokens
            hicache = ("--enable-hierarchical-cache", "--hicache-ratio", f"{share:.4f}")
            spec = ServerSpec(spec.name, extra_args=(*hicache, *shlex.split(args.hicache_args)))
        spec = with_options(spec, args.config, args.stream_interval)
        members[system] = member(spec, pools[system], ratio=args.ratio, max_running=args.max_running,
                                 kv_dtype=args.kv_dtype, name=f"agent-{system}")  # fmt: skip
    return members


def warm(servers: Mapping[str, Server], shape: Shape, timeout_s: float) -> None:
    """Let every server meet long, cached and many prompts before the clock runs."""

    def one(server: Server) -> None:
        group = agent.conversations(2, Shape(2, shape.first, shape.later, 8), "warm")
        for _ in range(2):
            agent.play_turn(server.url, group, 8, 2, timeout_s)
        send(server.url, random_prompts("warm", [700] * 12), 8, 12, timeout_s)
        server.flush()
        if not server.freeze_gc():
            print(f"[{server.spec.name}] collects garbage of its start while it is measured", flush=True)

    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(one, servers.values()))


def measure(run: Run, system: str, count: int) -> None:
    """All turns of `count` conversations on one system, written turn by turn."""
    server, shape = run.servers[system], run.shape
    group = agent.conversations(count, shape, f"{run.args.seed}/{count}")
    run.answers[count, system] = group
    if not server.flush():
        raise ValueError(f"{system} refused to flush while idle")
    before = server.counters()
    turns = agent.play(server.url, group, shape, at_once=count, think_s=run.args.think,
                       timeout_s=run.args.request_timeout, ends=run.ends)  # fmt: skip
    for number, turn in turns:
        run.write([row_of(count, number, system, turn)])
        print(f"[{system}] {count} conversations, turn {number}: TTFT {turn.ttft_s:.3f} s "
              f"({turn.least_ttft_s:.3f} to {turn.most_ttft_s:.3f}), {turn.output_tok_s:.1f} tok/s, {turn.prefilled_tokens} prefilled", flush=True)  # fmt: skip
    server.check_alive()
    if server.spec.plugin:
        case = agent.case_of(count) + (", elastic border" if system == "ours_elastic" else "")
        run.counts[case] = growth(before, server.counters())
    reference = run.answers.get((count, "plain"))
    if system == "plain":
        for other in run.args.systems:
            if other != "plain" and (count, other) in run.answers:
                _note_agreement(run, agent.case_of(count), other, run.answers[count, other], group)
    elif reference:
        _note_agreement(run, agent.case_of(count), system, group, reference)


def _note_agreement(run: Run, case: str, system: str, got: list[Conversation], expected: list[Conversation]) -> None:
    entry = {"case": case, "system": system, "scale": run.args.scale} | agent.agreement(got, expected)
    run.identity = _replace(run.identity, [entry], ("case", "system"))
    print(f"[{system}] {case}: {entry['identical']} of {entry['answers']} answers as plain's", flush=True)


def row_of(count: int, number: int, system: str, turn: Turn) -> dict[str, Any]:
    """One row of the result file."""
    return {
        "conversations": count,
        "turn": number,
        "system": system,
        "ttft_s": round(turn.ttft_s, 4),
        "output_tok_s": round(turn.output_tok_s, 1),
        "prefilled_tokens": turn.prefilled_tokens,
    }


def check_identity(run: Run) -> None:
    """Ours against plain, one request at a time, over conversations that take turns: plain keeps them all on the GPU,
    ours cannot, so that it starts turns from prefixes on the host."""
    count, turns = run.args.identity
    if not count or not {"ours", "plain"} <= run.servers.keys():
        return
    shape = Shape(turns, run.shape.first, run.shape.later, run.shape.output)
    groups = {}
    for system in ("plain", "ours"):
        groups[system] = agent.conversations(count, shape, f"{run.args.seed}/identity")
        run.servers[system].flush()
        for _ in agent.play(run.servers[system].url, groups[system], shape, at_once=1, think_s=0.0,
                            timeout_s=run.args.request_timeout, ends=run.ends):  # fmt: skip
            pass
    _note_agreement(
        run, f"{count} conversations in turn, one request at a time", "ours", groups["ours"], groups["plain"]
    )


def run_all(run: Run) -> bool:
    """Every number of conversations on every system while time is left; True when nothing was left out."""
    complete = True
    for count in run.args.conversations:
        for system in list(run.servers):
            if run.ends - time.monotonic() < LEAST_SECONDS:
                print(f"[{system}] {count} conversations left out for lack of time", flush=True)
                complete = False
                continue
            try:
                measure(run, system, count)
            except (ServerError, ValueError) as error:
                run.fail(f"{system}, {count} conversations: {error}")
                _leave_out_if_dead(run, system)
            complete &= len(run.answers[count, system][0].answers) == run.shape.turns
    if run.ends - time.monotonic() >= LEAST_SECONDS:
        try:
            check_identity(run)
        except ValueError as error:
            run.fail(f"identity: {error}")
    for system, server in run.servers.items():
        if errors := server.errors():
            run.fail(f"log of {system}: {errors[:2]}")
    run.write([])
    return complete


def run_restart(run: Run, members: Mapping[str, Member], paths: Paths) -> None:
    """Go on after a restart with what storage kept; as a demand: the first turn then prefills only what is new."""
    args = run.args
    plan = agent_restart.Restart(
        args.conversations[0], args.restart_after, run.shape, args.seed, args.restart_settle, args.request_timeout
    )
    run.restart = {"setting": run.setting()} | agent_restart.run(
        plan, members["ours"], members["plain"], args.restart, paths, args.port, args.start_timeout
    )
    after, agreed = run.restart["turns_after"][0], run.restart["agreement_with_plain"]
    print(f"turn {after['turn']}, the first after the restart: {after['prefilled_tokens']} of {after['prompt_tokens']} tokens "
          f"prefilled, at most {plan.most_prefilled} expected; {agreed}", flush=True)  # fmt: skip
    if not run.restart["found"]:
        run.fail("the restarted server did not find what was stored")
    if agreed["identical"] != agreed["answers"]:
        run.fail("answers around the restart differ from plain's")
    run.write([])


def _leave_out_if_dead(run: Run, system: str) -> None:
    try:
        run.servers[system].check_alive()
    except ServerError:
        del run.servers[system]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, nargs="?", help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--model-name", default="tiny-dsa-8l", help="name in the result file")
    parser.add_argument("--layers", type=int, default=8, help="layers of the checkpoint")
    parser.add_argument("--out", type=pathlib.Path, help="folder for agent_h200.json")
    parser.add_argument("--base", type=pathlib.Path, help="result file whose rows are carried over")
    parser.add_argument(
        "--logs", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-logs"), help="server logs, counters"
    )
    parser.add_argument("--systems", type=_names, default=DEFAULT_SYSTEMS,
                        help=f"comma-separated, measured in this order; known: {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--conversations", type=_numbers, default=[1, 16, 32, 8], help="at once, in the order measured")
    parser.add_argument("--turns", type=int, default=agent.TURNS)
    parser.add_argument("--scale", type=float, default=1 / 6, help="of the trace's token counts")
    parser.add_argument("--plain-tokens", type=int, default=112_000, help="pool of plain SGLang; others get its bytes")
    parser.add_argument("--ratio", type=int, default=7, help="logical tokens per device token of the HiSparse systems")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"])
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of an event, for every system")
    parser.add_argument("--config", type=json.loads, default={},
                        help="further keys of the config of ours, as JSON; SGLang's own HiSparse gets those that it knows")  # fmt: skip
    parser.add_argument("--think", type=float, default=0.0, help="seconds between turns")
    parser.add_argument("--identity", type=lambda text: tuple(_numbers(text)), default=(6, 4),
                        help="conversations,turns of the comparison with plain, one request at a time; 0,0 for none")  # fmt: skip
    parser.add_argument("--hicache-args", default="", help="further arguments of the server with HiCache")
    parser.add_argument("--restart", type=json.loads, help="config keys that switch storage on; does the restart only")
    parser.add_argument("--restart-after", type=int, default=6, help="turns before the restart")
    parser.add_argument("--restart-settle", type=float, default=5.0, help="seconds for what is still to be stored")
    parser.add_argument("--time-limit", type=float, default=420.0, help="seconds for the whole call, starts included")
    parser.add_argument("--start-timeout", type=float, default=200.0)
    parser.add_argument("--request-timeout", type=float, default=90.0)
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--port", type=int, default=30000, help="of the first server; each takes ten")
    add_place_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the servers' commands and the setting, start nothing"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw this result file and do nothing else")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python3", "scripts/bench_agent.py", *(sys.argv[1:] if argv is None else argv)])
    if args.plot:
        return args
    if args.model is None or args.out is None:
        parser.error("MODEL and --out are needed")
    if unknown := [system for system in args.systems if system not in SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    if args.restart is not None and not {"ours", "plain"} <= set(args.systems):
        parser.error("--restart needs the systems ours and plain")
    if not args.commit:
        parser.error("--commit is needed outside a repository")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all measured, 1 something failed, 2 the known file is of an older form, 3 something was left out."""
    begin = time.monotonic()
    args = parse_arguments(argv)
    if args.plot:
        from serving.agent_plot import draw

        draw(read_document(args.plot), args.plot.with_suffix(".png"))
        return 0
    pools = pools_of(args)
    run = Run(args, Shape.scaled(args.scale, args.turns), pools, begin + args.time_limit - 15.0)
    members = members_of(args, pools)
    paths = Paths(args.model, args.logs, args.site, args.plugin, args.cache)
    if args.dry_run:
        print(dry_run(members, paths, args.port))
        print(run.setting())
        return 0
    for known in filter(None, (args.base, run.path)):
        document = read_document(known)
        if document["rows"] and "settings" not in document:
            print(f"{known} has rows without a setting for each number of conversations", file=sys.stderr)
            return 2
    complete = True
    try:
        if args.restart is not None:
            run_restart(run, members, paths)
            return 1 if run.failures else 0
        with fleet(members, paths, args.port, min(args.start_timeout, args.time_limit)) as servers:
            run.servers = dict(servers)
            for system in members.keys() - servers.keys():
                run.fail(f"{system} did not start")
            warm(servers, run.shape, args.request_timeout)
            complete = run_all(run)
    except (ServerError, ValueError) as error:
        run.fail(str(error))
        run.write([])
        return 1
    return 1 if run.failures else 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
