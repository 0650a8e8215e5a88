"""Miss rates of replacement policies on every locality profile, at full size: top_k 2048, a context of 100,384 tokens.

Writes scripts/results/policies.json and policies.png. `turnover` is the replacement of the resolver itself (the CPU
library resolves every step), `index_score` the resolver with `eviction: index_score`, on the profiles that are made of
scores; the others are yardsticks. `lru_generator_order` is exact LRU that knows the order inside a step, which the recency
profiles are made of and no indexer tells. Miss rates are shares of the selected positions, the mean of the seeds, without
the first and the last steps.

--near-misses asks a question of the model: what if the positions ranked just behind the selected ones were fetched as well?

    python scripts/policies.py                   # about five minutes on two cores
    python scripts/policies.py --steps 300 --seeds 1 --profiles paper smA --folder /tmp/policies
    python scripts/policies.py --spot-check --steps 60           # the GPU's resolver against the CPU's, step by step
    python scripts/policies.py --near-misses --steps 400 --seeds 1
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_hisparse.replay.comparison import COMMON, ORDERED_LRU, Outcome, Selection, compare, selections
from sglang_hisparse.replay.policies import IndexScoreCache, NearMissCache, Turnover
from sglang_hisparse.replay.profiles import PROFILES, CyclicProfile, RecencyProfile, ScoreProfile

NUM_POSITIONS = 100_384
TOP_K = 2048
BUFFERS = (4096, 6144, 8192)
NAMES = ("paper", "smA", "smB", "easy97", "deep59", "gvr42", "cyc120", "zipf")
#: Steps that do not count: buffers fill at first, and towards the end Belady's future is cut off.
WARM_UP, CUT_OFF = 150, 60
#: Positions behind the selected ones that --near-misses fetches.
AHEAD = (64, 128, 256)
#: Most points of miss rate by which the resolver's replacement may differ from exact LRU.
TOLERANCE = 0.1

Rates = dict[tuple[int, str], float]  # (buffer, policy) -> miss rate


def policies_of(name: str) -> tuple[str, ...]:
    match PROFILES[name]:
        case ScoreProfile():
            return (*COMMON, "index_score")
        case RecencyProfile():
            return (*COMMON, ORDERED_LRU)
        case _:
            return COMMON


def streams_of(name: str, seed: int, steps: int) -> Iterator[tuple[tuple[int, ...], Iterator[Selection]]]:
    """Buffers and the selections to try with them. A cyclic scan is aimed at one buffer: each has a stream of its own."""
    apart = isinstance(PROFILES[name], CyclicProfile)
    for buffers in [(buffer,) for buffer in BUFFERS] if apart else [BUFFERS]:
        stream = PROFILES[name].stream(
            num_positions=NUM_POSITIONS, top_k=TOP_K, rng=np.random.default_rng(seed), buffer_size=buffers[0]
        )
        yield buffers, selections(stream, steps)


def run_profile(name: str, seed: int, steps: int) -> Rates:
    """One seed of one profile."""
    outcomes: list[Outcome] = []
    for buffers, stream in streams_of(name, seed, steps):
        outcomes += compare(stream, buffers=buffers, policies=policies_of(name), seed=seed)
    return {(one.buffer, one.policy): one.miss_rate(WARM_UP, steps - CUT_OFF) for one in outcomes}


def run_all(names: list[str], seeds: int, steps: int, jobs: int) -> list[dict[str, str | int | float]]:
    """Rows of the result, in the order of `names`, buffers and policies."""
    found: defaultdict[str, list[Rates]] = defaultdict(list)
    started = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        tasks = {pool.submit(run_profile, name, seed, steps): name for seed in range(seeds) for name in names}
        for number, task in enumerate(as_completed(tasks), 1):
            found[tasks[task]].append(task.result())
            print(f"{number}/{len(tasks)} {tasks[task]} after {time.monotonic() - started:.0f} s", file=sys.stderr)
    return [
        {
            "profile": name,
            "buffer": buffer,
            "policy": policy,
            "miss_rate": round(float(np.mean([rates[buffer, policy] for rates in found[name]])), 6),
        }
        for name in names
        for buffer in BUFFERS
        for policy in policies_of(name)
    ]


def plot(rows: list[dict[str, str | int | float]], path: Path) -> None:
    """One panel a buffer: bars of each policy, profile by profile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(str(row["profile"]) for row in rows))
    policies = [*COMMON, "index_score"]
    figure, panels = plt.subplots(len(BUFFERS), 1, figsize=(11, 9), sharex=True, constrained_layout=True)
    for panel, buffer in zip(panels, BUFFERS, strict=True):
        for place, policy in enumerate(policies):
            rates = {
                row["profile"]: row["miss_rate"] for row in rows if (row["policy"], row["buffer"]) == (policy, buffer)
            }
            at = [names.index(str(name)) + (place - len(policies) / 2 + 0.5) * 0.12 for name in rates]
            label = "turnover (the resolver)" if policy == "turnover" else policy
            panel.bar(at, [100 * float(rate) for rate in rates.values()], 0.12, label=label)
        panel.set_ylabel(f"misses, % of top-k\nbuffer {buffer}")
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(ncols=4, fontsize="small")
    panels[0].set_title(f"Replacement policies, top_k {TOP_K}, context {NUM_POSITIONS:,}")
    panels[-1].set_xticks(range(len(names)), names)
    figure.savefig(path, dpi=120)


def show(rows: list[dict[str, str | int | float]]) -> float:
    """Print the table in per cent; returns the largest distance of turnover from exact LRU, in points."""
    table = {(row["profile"], row["buffer"], row["policy"]): 100 * float(row["miss_rate"]) for row in rows}
    columns = [*COMMON, "index_score", ORDERED_LRU]
    print(f"{'profile':<8}{'buffer':>7}" + "".join(f"{name:>{max(len(name), 8) + 2}}" for name in columns))
    for profile, buffer in dict.fromkeys((row["profile"], row["buffer"]) for row in rows):
        values = [table.get((profile, buffer, name)) for name in columns]
        cells = [
            f"{'' if value is None else f'{value:.2f}':>{max(len(name), 8) + 2}}"
            for name, value in zip(columns, values, strict=True)
        ]
        print(f"{profile:<8}{buffer:>7}" + "".join(cells))
    return max(
        abs(rate - table[profile, buffer, "lru"])
        for (profile, buffer, policy), rate in table.items()
        if policy == "turnover"
    )


def spot_check(names: list[str], steps: int) -> int:
    """Every profile and buffer through the resolver of the GPU and of the CPU: 1 if a step differs in its misses."""
    wrong = 0
    for name in names:
        by_score = (False, True) if "index_score" in policies_of(name) else (False,)
        for buffers, stream in streams_of(name, 0, steps):
            pairs = {
                (buffer, scored): [Turnover(buffer, device, by_score=scored) for device in ("cpu", "cuda")]
                for buffer in buffers
                for scored in by_score
            }
            misses, differing = dict.fromkeys(pairs, 0), dict.fromkeys(pairs, 0)
            for selection in stream:
                for key, (on_cpu, on_gpu) in pairs.items():
                    expected = on_cpu.access(*selection)
                    misses[key] += expected
                    differing[key] += on_gpu.access(*selection) != expected
            for (buffer, scored), count in misses.items():
                policy, differ = "index_score" if scored else "turnover", differing[buffer, scored]
                print(
                    f"{name:<8}{buffer:>7} {policy:<12}{count:>9,} misses in {steps} steps, {differ} steps differ on the GPU"
                )
            wrong += sum(differing.values())
    return int(wrong > 0)


def near_misses(names: list[str], seeds: int, steps: int) -> list[dict[str, str | int | float]]:
    """What fetching ahead would hide, and what it would move, by the numpy model with the smallest buffer."""
    rows = []
    for name in [name for name in names if "index_score" in policies_of(name)]:
        exposed, ahead = defaultdict(int), defaultdict(int)
        for seed in range(seeds):
            caches = {0: IndexScoreCache(BUFFERS[0])} | {count: NearMissCache(BUFFERS[0], count) for count in AHEAD}
            stream = PROFILES[name].stream(num_positions=NUM_POSITIONS, top_k=TOP_K, rng=np.random.default_rng(seed))
            for step, selection in enumerate(selections(stream, steps)):
                before = {count: getattr(cache, "fetched_ahead", 0) for count, cache in caches.items()}
                found = {count: cache.access(*selection) for count, cache in caches.items()}
                if step >= WARM_UP:
                    for count, cache in caches.items():
                        exposed[count] += found[count]
                        ahead[count] += getattr(cache, "fetched_ahead", 0) - before[count]
        total = seeds * (steps - WARM_UP) * TOP_K
        for count in caches:
            rates = {"exposed_rate": exposed[count] / total, "moved_rate": (exposed[count] + ahead[count]) / total}
            rows.append(
                {"profile": name, "buffer": BUFFERS[0], "ahead": count, **{k: round(v, 6) for k, v in rates.items()}}
            )
            print(f"{name:<6}{count:>5} ahead: {rates['exposed_rate']:.2%} exposed, {rates['moved_rate']:.2%} moved")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=700, help=f"more than {WARM_UP + CUT_OFF}, which do not count")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--spot-check", action="store_true", help="compare the resolvers of GPU and CPU, write nothing")
    parser.add_argument("--near-misses", action="store_true", help="write near_misses.json and nothing else")
    arguments = parser.parse_args()
    if arguments.spot_check:
        return spot_check(arguments.profiles, arguments.steps)
    if arguments.steps <= WARM_UP + CUT_OFF:
        parser.error(f"--steps: {arguments.steps}; allowed: more than {WARM_UP + CUT_OFF}")
    if arguments.near_misses:
        rows = near_misses(arguments.profiles, arguments.seeds, arguments.steps)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        (arguments.folder / "near_misses.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        return 0
    rows = run_all(arguments.profiles, arguments.seeds, arguments.steps, arguments.jobs)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "policies.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    plot(rows, arguments.folder / "policies.png")
    worst = show(rows)
    print(f"turnover differs from exact LRU by at most {worst:.3f} points (allowed: {TOLERANCE})")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
