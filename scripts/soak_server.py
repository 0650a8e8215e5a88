#!/usr/bin/env python3
"""Soak one server with sglang-hisparse: minutes of mixed load at twice what the GPU pool holds, then empty pools, then an
orderly end with as much memory pinned as the machine gives.

Three servers start at once: plain SGLang computes the expected tokens and ends; the one under test gets the load, audit on,
retractions forced; the third pins --pinned-gib and waits for the end, when it is told to end while it serves. Everything the
soak demands is in soak_h200.json with its counts: every request answered with its tokens, no audit mismatch, empty pools.

A soak is longer than some machines let a command run, so it can go on by itself and be looked at later:

  soak_server.py MODEL --state DIR --detach      start it in a session of its own, return at once
  soak_server.py --state DIR --collect --out OUT wait for the end (--wait seconds at most), copy the results to OUT
  soak_server.py MODEL --state DIR --out OUT     the same in one call
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.client import Reply, random_prompts, send
from serving.fidelity import compare, growth, settled_counters
from serving.fleet import Member, dry_run, fleet, hisparse_pool, member, plain_pool
from serving.results import current_commit, read_document, versions, write_json
from serving.server import Paths, Server, ServerSpec, add_place_arguments
from serving.soak_load import Load, Mix, Tally, Texts

EXIT_SECONDS = 30.0
RETURNED_SHARE = 0.9
# What a web server may say of a client that has hung up.
HUNG_UP = ("disconnect", "BrokenPipe", "ConnectionReset", "CancelledError")
IDLE_COUNTS = ("device_pages_resident", "device_pages_hot")
HELD, NOT_HELD, BUSY, DIED = 0, 1, 3, 4


@dataclass(slots=True)
class Soak:
    """State of one soak, written to `progress.json` as it goes and to `soak_h200.json` at the end."""

    args: argparse.Namespace
    begin: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    demands: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Whether every demand so far held."""
        return bool(self.demands) and all(one["held"] for one in self.demands)

    def demand(self, holds: bool, what: str) -> None:
        """Print and keep a condition."""
        print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
        self.demands.append({"held": bool(holds), "what": what})

    def progress(self, phase: str) -> None:
        """Tell how far the soak is."""
        state = {"phase": phase, "pid": os.getpid(), "seconds": round(time.monotonic() - self.begin, 1)}
        write_json(self.args.state / "progress.json", state | {"requests": asdict(self.tally), "demands": self.demands})

    def write(self, seconds_of_load: float) -> None:
        """The result file."""
        args = self.args
        document = {
            "commit": args.commit,
            "versions": versions(args.site),
            "command": args.command,
            "held": self.held,
            "seconds_of_load": round(seconds_of_load, 1),
            "setting": {
                "pool_tokens": args.pool_tokens,
                "ratio": args.ratio,
                "tokens_in_flight": args.load_factor * args.pool_tokens,
                "longest_prompt": args.longest,
                "retract_every_forwards": args.retract_every,
                "fault": args.fault,
                "config": args.config,
            },
            "requests": asdict(self.tally),
            **self.found,
            "demands": self.demands,
        }
        write_json(args.state / "soak_h200.json", document)


def members_of(args: argparse.Namespace) -> dict[str, Member]:
    """The three servers: plain, the one under test, and the one that pins much."""
    env = {"SGLANG_HISPARSE_AUDIT": "1"}
    if args.retract_every:
        env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(args.retract_every)}
    if args.fault:
        env["SGLANG_HISPARSE_FAULT"] = args.fault
    shape = {"max_running": 64, "kv_dtype": args.kv_dtype}
    pool = hisparse_pool(args.pool_tokens, args.ratio, args.layers, args.kv_dtype, "tokens")
    plain = plain_pool(args.pool_tokens, args.layers, args.kv_dtype)
    ours = ServerSpec("soak", hisparse=True, plugin=True, env=env)
    members = {
        "plain": member(ServerSpec("plain"), plain, ratio=1, name="soak-plain", **shape),
        "soak": member(ours, pool, ratio=args.ratio, name="soak-ours", **shape, **args.config),
    }
    if args.pinned_gib:
        pinned = ServerSpec("pinned", hisparse=True, plugin=True,
                            config={"host_to_device_ratio": None, "host_pool_gib": args.pinned_gib})  # fmt: skip
        members["pinned"] = member(pinned, pool, ratio=None, name="soak-pinned", **shape)
    return members


def expected_answers(soak: Soak, plain: Server, texts: Texts) -> list[tuple[list[int], list[int]]]:
    """Prompts with plain SGLang's answers. Raises ValueError when one failed."""
    prompts = texts.prompts(soak.args.known, "known", soak.args.compare_from)
    replies = send(plain.url, prompts, soak.args.most_output, 8, 240.0)
    if failed := [reply.error for reply in replies if reply.error]:
        raise ValueError(f"plain SGLang failed {len(failed)} of {len(replies)} prompts: {failed[0]}")
    return [(prompt, reply.tokens) for prompt, reply in zip(prompts, replies, strict=True)]


def run_load(soak: Soak, server: Server, texts: Texts, known: list[tuple[list[int], list[int]]]) -> float:
    """The load, its answers, and the pools afterwards; seconds of load."""
    args, tally = soak.args, soak.tally
    send(server.url, random_prompts("warm", [8192, 3000]), 8, 2, 240.0)
    server.flush()
    before = settled_counters(server)
    mix = Mix(round(args.load_factor * args.pool_tokens), most_output=args.most_output, compare_from=args.compare_from)
    load = Load(server.url, mix, texts, known, tally)
    begin = time.monotonic()
    load.run(60.0 * args.minutes, server.check_alive, soak.progress)
    seconds = time.monotonic() - begin
    soak.demand(tally.answered, f"every request answered: {tally.finished} finished, {tally.aborted_by_client} aborted by "
                f"their clients, {tally.disconnected} disconnected, {tally.aborted_by_pause} aborted by a pause, "
                f"{tally.failed} failed of {tally.sent}")  # fmt: skip
    soak.demand(
        not tally.wrong_answers, f"{tally.wrong_answers} of {tally.checked_answers} answers differ from plain's"
    )
    soak.demand(not tally.failures, f"nothing else went wrong {tally.failures[:3]}")
    soak.progress("asking again")
    soak.demand(server.flush(60.0), "flush granted when idle")
    _ask_again(soak, server, load)
    server.flush(60.0)
    counts = growth(before, settled_counters(server))
    soak.found["counters"] = counts
    soak.demand(counts["audited_rows"] > 0 and not counts["mismatches"] and not counts["errors"],
                f"{counts['audited_rows']} rows audited, {counts['mismatches']} mismatches, {counts['errors']} errors")  # fmt: skip
    soak.demand(min(counts["pages_spilled"], counts["rows_fetched"]) > 0, "the host tier was used")
    if args.retract_every:
        soak.demand(tally.retractions > 0, f"{tally.retractions} retractions")
    return seconds


def _ask_again(soak: Soak, server: Server, load: Load) -> None:
    """Prompts that nobody knew the answer to, once more and alone."""
    replies: list[Reply] = []
    for question in load.fresh:
        server.flush()
        replies += send(server.url, [question.prompt], question.output, 1, 240.0)
    result = compare([question.reply.tokens for question in load.fresh], replies)
    soak.demand(bool(replies) and result.identical == result.prompts and not result.failures,
                f"asked again, alone: {result.text()}")  # fmt: skip


def end_server(soak: Soak, name: str, server: Server, busy: bool) -> None:
    """Tell a server to end, while it serves if `busy`; how long that takes, and what its pools were at the end."""
    replies: list[Reply] = []
    if busy:
        prompts = random_prompts(f"end/{name}", [8000] * 4)
        last = threading.Thread(target=lambda: replies.extend(send(server.url, prompts, 1024, 4, 60.0)))
        last.start()
        time.sleep(1.0)
    else:
        server.flush(60.0)
    errors = [line for line in server.errors() if not any(word in line for word in HUNG_UP)]
    server.ask_to_end()
    seconds = server.wait_gone(4 * EXIT_SECONDS)
    if busy:
        last.join()
        answered = sum(not reply.error for reply in replies)
        soak.demand(answered == len(replies), f"{name}: {answered} of {len(replies)} requests answered while it ended")
    shown = "not" if seconds is None else f"{seconds:.1f} s"
    soak.found[f"exit_s_{name}"] = seconds and round(seconds, 1)
    soak.demand(seconds is not None and seconds <= EXIT_SECONDS, f"{name} ended after SIGTERM: {shown}")
    soak.demand(not errors, f"log of {name} without failures {errors[:3]}")
    counts = server.counters()
    soak.found[f"counters_{name}_at_end"] = counts
    if not busy:
        left = {key: counts.get(key) for key in IDLE_COUNTS}
        soak.demand(all(value == 0 for value in left.values()), f"{name}: pools empty at the end {left}")


def available_host_gib() -> float:
    """Memory that the machine could give now, in GiB."""
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) / (1 << 20)


def note_returned_memory(soak: Soak, *, taken: float, returned: float) -> None:
    """Demand the pinned memory back, in GiB, where the machine's own figures show that it was taken at all."""
    soak.found |= {
        "pinned_gib": soak.args.pinned_gib,
        "host_memory_taken_gib": round(taken, 1),
        "host_memory_returned_gib": round(returned, 1),
    }
    if taken >= RETURNED_SHARE * soak.args.pinned_gib:
        soak.demand(returned >= RETURNED_SHARE * soak.args.pinned_gib, f"{returned:.1f} GiB of host memory came back")


def run_soak(soak: Soak) -> None:
    """Everything, in order. Raises ServerError, ValueError."""
    args = soak.args
    texts = Texts.make(args.seed, args.longest)
    paths = Paths(args.model, args.state / "logs", args.site, args.plugin, args.cache)
    soak.progress("starting")
    free = available_host_gib()
    with fleet(members := members_of(args), paths, args.port, args.start_timeout) as servers:
        soak.demand(servers.keys() == members.keys(), f"servers started: {', '.join(servers)}")
        soak.progress("computing what to expect")
        known = expected_answers(soak, servers["plain"], texts)
        servers["plain"].stop()
        seconds = run_load(soak, servers["soak"], texts, known)
        soak.write(seconds)
        soak.progress("ending")
        end_server(soak, "soak", servers["soak"], busy=False)
        if "pinned" in servers:
            send(servers["pinned"].url, random_prompts("pinned", [16000] * 8), 64, 8, 120.0)
            held = available_host_gib()
            end_server(soak, "pinned", servers["pinned"], busy=True)
            note_returned_memory(soak, taken=free - held, returned=available_host_gib() - held)
        soak.write(seconds)


def work(args: argparse.Namespace) -> int:
    """Run the soak here; whatever happens ends up in the state folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves `fleet`, which ends the servers
    soak = Soak(args)
    args.state.mkdir(parents=True, exist_ok=True)
    for old in ("progress.json", "soak_h200.json"):
        (args.state / old).unlink(missing_ok=True)
    try:
        run_soak(soak)
    except Exception as error:  # noqa: BLE001 - nobody watches a detached soak: its end must be found in the folder
        traceback.print_exc()
        soak.demand(False, f"the soak ended early: {type(error).__name__}: {error}")
        soak.write(0.0)
    soak.progress("done")
    if args.out:
        copy_results(args.state, args.out)
    return HELD if soak.held else NOT_HELD


def detach(argv: list[str], state: pathlib.Path) -> int:
    """Start `work` in a session of its own and return."""
    state.mkdir(parents=True, exist_ok=True)
    (state / "progress.json").unlink(missing_ok=True)
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), *(word for word in argv if word != "--detach")]
    with (state / "soak.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (state / "pid").write_text(str(process.pid))
    print(f"soak runs as process {process.pid}; log and progress in {state}")
    return HELD


def collect(args: argparse.Namespace) -> int:
    """Wait for a detached soak and copy what it left. 3: it still runs; 4: it is gone without an end."""
    deadline = time.monotonic() + args.wait
    while True:
        state = read_document(args.state / "progress.json")
        done, alive = state.get("phase") == "done", _runs(args.state)
        if done or not alive or time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    requests = state.get("requests", {})
    print(f"phase {state.get('phase', 'none')}, {state.get('seconds', 0)} s, sent {requests.get('sent', 0)}, "
          f"failures {requests.get('failures', [])}")  # fmt: skip
    for one in state.get("demands", []):
        print("ok:" if one["held"] else "FAILED:", one["what"])
    if args.out:
        copy_results(args.state, args.out)
    if not done:
        return BUSY if alive else DIED
    return HELD if read_document(args.state / "soak_h200.json").get("held") else NOT_HELD


def _runs(state: pathlib.Path) -> bool:
    """Whether the detached process lives; one that has ended and that nobody waits for does not."""
    try:
        number = int((state / "pid").read_text())
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def copy_results(state: pathlib.Path, out: pathlib.Path) -> None:
    """Result, progress and the ends of the logs."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("soak_h200.json", "progress.json"):
        if (state / name).exists():
            shutil.copyfile(state / name, out / name)
    for log in [state / "soak.log", *sorted((state / "logs").glob("*.log"))]:
        if log.exists():
            (out / f"end-of-{log.name}").write_bytes(log.read_bytes()[-200_000:])


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, nargs="?", help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--state", type=pathlib.Path, default=pathlib.Path("/tmp/sglang-soak"), help="where it lives")
    parser.add_argument("--out", type=pathlib.Path, help="folder that gets copies of the results")
    parser.add_argument("--detach", action="store_true", help="start it, do not wait")
    parser.add_argument("--collect", action="store_true", help="look at a detached one")
    parser.add_argument("--wait", type=float, default=540.0, help="seconds that --collect waits for the end")
    parser.add_argument("--minutes", type=float, default=15.0, help="of load")
    parser.add_argument("--layers", type=int, default=8, help="layers of the checkpoint")
    parser.add_argument("--pool-tokens", type=int, default=200_000)
    parser.add_argument("--ratio", type=int, default=3)
    parser.add_argument("--config", type=json.loads, default={}, help="further keys of its --hisparse-config, as JSON")
    parser.add_argument("--load-factor", type=float, default=2.0, help="tokens in flight, in pools")
    parser.add_argument("--longest", type=int, default=63_000, help="tokens of the longest prompt")
    parser.add_argument("--compare-from", type=int, default=4096,
                        help="tokens of the shortest prompt whose answer is compared; see serving/soak_load.py")  # fmt: skip
    parser.add_argument("--known", type=int, default=48, help="prompts whose answers plain SGLang computes first")
    parser.add_argument("--most-output", type=int, default=256, help="tokens of the longest answer")
    parser.add_argument("--retract-every", type=int, default=150, help="forwards; 0 forces no retraction")
    parser.add_argument("--fault", default="", help="value of SGLANG_HISPARSE_FAULT; none that loses requests")
    parser.add_argument(
        "--pinned-gib", type=float, default=64.0, help="host memory of the third server; 0 leaves it out"
    )
    parser.add_argument("--kv-dtype", default="bfloat16", choices=["bfloat16", "fp8_e4m3"])
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--port", type=int, default=30000)
    add_place_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the servers' commands, start nothing")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python3", "scripts/soak_server.py", *argv])
    if args.model is None and not args.collect:
        parser.error("MODEL is needed")
    if not args.commit:
        parser.error("--commit is needed outside a repository")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all demands held, 1 one did not, 3 it still runs, 4 it is gone without an end."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.collect:
        return collect(args)
    if args.dry_run:
        paths = Paths(args.model, args.state / "logs", args.site, args.plugin, args.cache)
        print(dry_run(members_of(args), paths, args.port))
        return HELD
    return detach(argv, args.state) if args.detach else work(args)


if __name__ == "__main__":
    sys.exit(main())
