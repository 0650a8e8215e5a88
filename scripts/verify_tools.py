#!/usr/bin/env python3
"""Try what an operator uses on one GPU: check, plan, replay, a server's metrics, log line and recording.

It starts a server with --enable-metrics and record_file under memory pressure, scrapes it while a few requests run, ends
it, and replays what it recorded. Beside it a server whose record_file cannot be written must be refused. The results, with
what was found for every demand, are written to --out/tools_h200.json as they come.

  python3 scripts/make_tiny_dsa.py /opt/tiny-dsa --seed 2026
  python3 scripts/verify_tools.py /opt/tiny-dsa --out results
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.client import random_prompts, send
from serving.results import current_commit, versions, write_json
from serving.server import Limits, Paths, Server, ServerError, ServerSpec, add_place_arguments, running
from tool_checks import Check, Scrape, check_log, check_metrics, check_recording, peaks, read_scrape, totals

SERVER_ARGS = ("--enable-metrics", "--log-level", "info", "--decode-log-interval", "20")
RECORDING = "selections.topk"
REFUSED = "record_file: "
SCRAPE_SECONDS = 0.7
SETTLE_SECONDS = 3.5  # metrics look once a second and show device counts one look late


@dataclass(slots=True)
class Run:
    """One call: its arguments and what has been found so far."""

    args: argparse.Namespace
    checks: list[Check] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, *checks: Check, **figures: Any) -> None:
        """Print the demands, remember them and the figures, and write the result file."""
        with self._lock:
            for check in checks:
                print(check.line()[:400], flush=True)
            self.checks += checks
            self.document |= figures
            write_json(self.args.out / "tools_h200.json", self.document | {"checks": [asdict(c) for c in self.checks]})

    @property
    def ok(self) -> bool:
        """Whether every demand held."""
        return all(check.ok for check in self.checks)


def paths_of(args: argparse.Namespace, name: str) -> Paths:
    """Where this server's files are; logs in a folder of its own."""
    return Paths(args.model, args.logs / name, args.site, args.plugin, args.cache)


# ---- the commands ----------------------------------------------------------------------------------------------------


def run_command(run: Run, name: str, words: list[str], timeout_s: float) -> dict[str, Any]:
    """`sglang-hisparse WORDS --json FILE`: exit status 0 is demanded; returns what it wrote."""
    target = run.args.logs / f"{name}.json"
    command = [sys.executable, "-m", "sglang_hisparse.cli", *words, "--json", str(target)]
    environment = dict(os.environ) | {"PYTHONPATH": f"{run.args.plugin}:{run.args.site}", "HOME": run.args.cache}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=run.args.logs, timeout=timeout_s, check=False
        )
        status, output = str(done.returncode), done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, output = f"none after {timeout_s:.0f} s", ""
    (run.args.logs / f"{name}.txt").write_text(output)
    seconds = time.monotonic() - start
    said = [line for line in output.splitlines() if re.search(r"\w", line)] or ["nothing said"]
    found = f"exit status {status} in {seconds:.0f} s; {' '.join(said[-1].split())[:200]}"
    run.note(Check(f"sglang-hisparse {name}", status == "0", found))
    return json.loads(target.read_text()) if target.exists() else {}


def try_check(run: Run) -> None:
    """`check` on this machine: no line may be an error; warnings are kept."""
    found = run_command(run, "check", ["check"], 90)
    lines = {line["check"]: f"{line['status']}: {line['found']}" for line in found.get("checks", [])}
    run.note(check_command=lines)


def try_plan(run: Run) -> None:
    """`plan` for the deployment that the project is for."""
    words = ["plan", "--model", "GLM-5.1", "--gpus", "8", "--tp", "8", "--dp", "8", "--plot", str(run.args.out / "plan.png")]
    found = run_command(run, "plan", words, 60)
    run.note(plan={"command": " ".join(words[:-2]), "hisparse_config": found.get("hisparse_config")})


def try_replay(run: Run) -> None:
    """A short synthetic replay with the GPU's kernels and streams."""
    found = run_command(run, "replay", ["replay", "--device", run.args.replay_device, "--scale", "0.3"], 90)
    run.note(replay=_replay_figures(found))


def replay_recording(run: Run, recording: pathlib.Path) -> None:
    """What the server recorded, through the protocol and through the policies, with plots."""
    words = ["replay", "--stream", str(recording), "--plot", str(run.args.out / "plots")]
    found = run_command(run, "replay of the recording", [*words, "--device", run.args.replay_device], 90)
    policies = run_command(run, "policies on the recording", [*words, "--policies"], 90)
    rates = [{key: row[key] for key in ("policy", "buffer", "miss_rate")} for row in policies.get("rows", [])]
    # No policy misses less than the optimum, and the smaller buffer cannot hold all that was selected.
    of = {(row["policy"], row["buffer"]): row["miss_rate"] for row in rates}
    good = all(of["belady", buffer] <= rate <= 1 for (_, buffer), rate in of.items())
    good &= bool(of) and of["belady", min(row["buffer"] for row in rates)] > 0
    shown = ", ".join(f"{policy}/{buffer} {rate:.4f}" for (policy, buffer), rate in of.items())
    run.note(
        Check("miss rates of the recording", good, shown), recording_replay=_replay_figures(found), recording_policies=rates
    )


def _replay_figures(found: dict[str, Any]) -> dict[str, Any]:
    total = found.get("total", {})
    names = ("rows_resident", "rows_hot", "rows_fetched", "rows_checked", "mismatches", "pages_spilled", "pages_promoted")
    return {"ok": found.get("ok", False)} | {name: total.get(name) for name in names}


# ---- the servers -----------------------------------------------------------------------------------------------------


def try_server(run: Run) -> None:
    """Serve under pressure, scrape meanwhile, end the server, then judge scrapes, log and recording."""
    args = run.args
    paths = paths_of(args, "server")
    recording = paths.logs.resolve() / RECORDING
    spec = ServerSpec(
        "tools", hisparse=True, plugin=True, env={"SGLANG_HISPARSE_AUDIT": "1"}, extra_args=SERVER_ARGS,
        config={"record_file": str(recording)},
    )  # fmt: skip
    limits = Limits(pool_tokens=args.pool_tokens, max_running=8, mem_fraction=args.mem_fraction)
    try:
        with running(spec, paths, limits, args.port, args.start_timeout) as server:
            scrapes = serve(run, server)
        errors = server.errors()
    except ServerError as error:
        run.note(Check("server", False, str(error)[-1500:]))
        return
    run.note(Check("server's log without failures", not errors, "; ".join(errors[:2]) or "none"))
    run.note(*check_metrics(scrapes), metrics=totals(scrapes[-1]), peaks=peaks(scrapes))
    run.note(*check_log(server.log.read_text(errors="replace")))
    checks, figures = check_recording(recording)
    run.note(*checks, recording=figures)
    if figures:
        replay_recording(run, recording)


def serve(run: Run, server: Server) -> list[Scrape]:
    """Send the requests all at once; returns the scrapes before, while and after they run."""
    args, texts, ended = run.args, [], threading.Event()
    if (before := server.get("/metrics")) is not None:
        texts.append(before)

    def scrape() -> None:
        while not ended.wait(SCRAPE_SECONDS):
            if (text := server.get("/metrics")) is not None:
                texts.append(text)

    thread = threading.Thread(target=scrape)
    thread.start()
    start = time.monotonic()
    replies = send(server.url, random_prompts(args.seed, [args.prompt] * args.requests), args.output, args.requests, 120.0)
    failed = [reply.error for reply in replies if reply.error]
    found = f"{args.requests} of {args.prompt} tokens, {time.monotonic() - start:.1f} s; {failed[:1] or 'none failed'}"
    run.note(Check("requests answered", not failed, found))
    time.sleep(SETTLE_SECONDS)
    ended.set()
    thread.join()
    server.check_alive()
    if (last := server.get("/metrics")) is not None:
        texts.append(last)
    if not texts:
        raise ServerError("no /metrics: the server was started with --enable-metrics and does not answer there")
    return [read_scrape(text) for text in texts]


def try_refusal(run: Run) -> None:
    """A recording that cannot be written ends the start with one line, before weights load."""
    paths = paths_of(run.args, "refused")
    path = paths.logs.resolve() / "nowhere" / RECORDING
    spec = ServerSpec("refused", hisparse=True, plugin=True, config={"record_file": str(path)}, extra_args=("--log-level", "info"))
    start, name = time.monotonic(), "unwritable record_file refused before weights load"
    limits = Limits(pool_tokens=run.args.pool_tokens)
    try:
        with running(spec, paths, limits, run.args.port + 100, run.args.start_timeout):
            run.note(Check(name, False, "the server started"))
            return
    except ServerError:
        log = (paths.logs / "refused.log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if REFUSED in line and "server_args" not in line]
    good = bool(lines) and "in a folder that is not there" in lines[-1] and "Load weight" not in log
    run.note(Check(name, good, f"after {time.monotonic() - start:.0f} s: {lines[-1][-200:] if lines else log[-300:]}"))


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all held, 1 something did not."""
    args = parse_arguments(argv)
    for folder in (args.out, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    head = {key: value for key, value in vars(args).items() if key in ("prompt", "output", "requests", "pool_tokens")}
    run.note(commit=args.commit, versions=versions(args.site), load=head)
    parts = args.parts.split(",")
    beside = [PARTS[part] for part in parts if part != "server"]

    def tools() -> None:
        for part in beside:
            part(run)

    # The server takes a minute to start: everything else runs beside its start.
    thread = threading.Thread(target=tools)
    thread.start()
    if "server" in parts:
        try_server(run)
    thread.join()
    run.note(ok=run.ok)
    print("all held" if run.ok else "NOT ALL HELD", flush=True)
    return 0 if run.ok else 1


PARTS = {"server": try_server, "refusal": try_refusal, "check": try_check, "plan": try_plan, "replay": try_replay}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="checkpoint folder of make_tiny_dsa.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for tools_h200.json and plots")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp/hisparse-tools"))
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--commit", default=current_commit(), help="default: HEAD of this repository")
    parser.add_argument("--requests", type=int, default=6, help="sent at once")
    parser.add_argument("--prompt", type=int, default=12_000, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=400, help="tokens to generate")
    parser.add_argument("--pool-tokens", type=int, default=44_032, help="device pool; the requests must not fit")
    parser.add_argument("--mem-fraction", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--replay-device", default="cuda")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--port", type=int, default=30600)
    add_place_arguments(parser)
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; known: {', '.join(PARTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
