"""Reads the Chrome traces that SGLang's profiler writes, and says where the GPU's time went. It starts nothing and writes no file.

Only what ran on the GPU counts: kernels, copies and fills. The *forward stream* is the one whose kernels took the most time.
"""

import bisect
import functools
import gzip
import itertools
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# Copies of whole pages to the host, or back: a kernel of ours, or the copy engine, which also brings tokens and lengths.
PAGE_COPY_KERNEL = "copy_pages_kernel"
PAGE_COPY_BYTES = 1 << 15
LONG_NAME = 60

Span = tuple[float, float]


class _Event(msgspec.Struct):
    """What is read of an event; args stay as they are until the event turns out to be one of the GPU's."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Document(msgspec.Struct):
    traceEvents: list[_Event]  # the format's own name


class _Args(msgspec.Struct):
    stream: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, copy or fill on the GPU. name: shortened; times in microseconds; num_bytes: of a copy by the copy engine."""

    name: str
    stream: int
    start_us: float
    end_us: float
    num_bytes: int = 0

    @property
    def us(self) -> float:
        """How long it ran."""
        return self.end_us - self.start_us

    @property
    def is_page_copy(self) -> bool:
        """Whether it copies pages to the host, or back."""
        is_copied = self.name.startswith("Memcpy DtoH") and self.num_bytes >= PAGE_COPY_BYTES
        return is_copied or PAGE_COPY_KERNEL in self.name


@functools.cache  # a trace has few names and many launches
def short_name(name: str) -> str:
    """A kernel's name without types, namespaces and arguments; torch's generic kernels keep the functor that they run."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    head = re.split(r"[<(]", name.replace("(anonymous namespace)::", "").removeprefix("void "))[0].strip()
    base = head.split("::")[-1] or name
    inner = re.search(r"\b(\w*(?:[Ff]unctor\w*|_kernel_cuda|_kernel_impl))\b", name[len(head) :]) if "at::" in name else None
    return (f"{base}[{inner[1]}]" if inner else base)[:LONG_NAME]


def read_launches(path: pathlib.Path) -> list[Launch]:
    """Everything that ran on the GPU in one rank's trace (.json or .json.gz), by start. Raises ValueError where there is nothing."""
    text = path.read_bytes()
    if path.suffix == ".gz":
        text = gzip.decompress(text)
    launches = []
    for event in _events(text):
        if event.ph == "X" and event.cat in GPU_CATEGORIES:
            args = msgspec.json.decode(event.args, type=_Args)
            launches.append(Launch(short_name(event.name), args.stream, event.ts, event.ts + event.dur, args.bytes))
    if not launches:
        raise ValueError(f"{path}: nothing in it ran on a GPU")
    return sorted(launches, key=lambda launch: launch.start_us)


def _events(text: bytes) -> list[_Event]:
    try:
        return msgspec.json.decode(text, type=_Document).traceEvents
    except msgspec.DecodeError:  # torch writes NaN, which JSON has not; and other producers write numbers as text
        events = json.loads(text)["traceEvents"]
    known = [event for event in events if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES]
    return [
        _Event("X", e["cat"], e["name"], float(e["ts"]), float(e["dur"]), msgspec.Raw(json.dumps(e["args"]).encode()))
        for e in known
    ]


# -- spans of time --------------------------------------------------------------------------------------------------------


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same moments, as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Microseconds in spans that do not overlap."""
    return sum(end - start for start, end in spans)


def shared_us(span: Span, others: Sequence[Span]) -> float:
    """Microseconds of `span` that lie in one of `others`, which are merged."""
    first = max(0, bisect.bisect_right(others, (span[0], span[0])) - 1)
    total = 0.0
    for start, end in others[first:]:
        if start >= span[1]:
            break
        total += max(0.0, min(end, span[1]) - max(start, span[0]))
    return total


def gaps_between(spans: Sequence[Span]) -> list[Span]:
    """What lies between merged spans."""
    return [(one[1], other[0]) for one, other in itertools.pairwise(spans)]


# -- what a trace says ----------------------------------------------------------------------------------------------------


class Profile:
    """One system's trace of `units` equal pieces of work (prompts sent one after another, or decode steps).

    Prompts are told apart at the units - 1 longest pauses of the forward stream (`separate`), which count as no gaps: there the
    client has sent nothing. Raises ValueError when there are too few pauses.
    """

    def __init__(self, launches: Sequence[Launch], units: int, *, separate: bool) -> None:
        self.launches, self.units = launches, units
        busy = Counter[int]()
        for launch in launches:
            busy[launch.stream] += launch.us
        self.forward_stream = busy.most_common(1)[0][0]
        self.forward = [launch for launch in launches if launch.stream == self.forward_stream]
        self._spans = merged((launch.start_us, launch.end_us) for launch in self.forward)
        pauses = sorted(gaps_between(self._spans), key=lambda gap: gap[0] - gap[1])
        wanted = units - 1 if separate else 0
        if len(pauses) < wanted:
            raise ValueError(f"{len(pauses)} pauses of the forward stream do not tell {units} prompts apart")
        self._pauses = sorted(pauses[:wanted])
        # Those of the forward stream itself (a look at the link, pages that come back) run beside nothing of it.
        self.page_copies = [one for one in launches if one.is_page_copy and one.stream != self.forward_stream]
        self.copies = merged((one.start_us, one.end_us) for one in self.page_copies)

    def unit_of(self, launch: Launch) -> int:
        """Which prompt a launch of the forward stream belongs to."""
        return bisect.bisect_right(self._pauses, (launch.start_us, launch.start_us))

    def ordered(self) -> dict[str, dict[tuple[int, int], Launch]]:
        """Launches of the forward stream by name, then by (prompt, how many of that name in the prompt before it)."""
        found: dict[str, dict[tuple[int, int], Launch]] = defaultdict(dict)
        seen = Counter[tuple[str, int]]()
        for launch in self.forward:
            unit = self.unit_of(launch)
            found[launch.name][unit, seen[launch.name, unit]] = launch
            seen[launch.name, unit] += 1
        return found

    def streams(self) -> list[dict[str, Any]]:
        """Busy time of every stream, per unit."""
        by_stream: dict[int, list[Launch]] = defaultdict(list)
        for launch in self.launches:
            by_stream[launch.stream].append(launch)
        rows = []
        for stream, launches in by_stream.items():
            busy = length(merged((launch.start_us, launch.end_us) for launch in launches))
            is_forward = stream == self.forward_stream
            rows.append({"stream": stream, "forward": is_forward, "launches": self._per(len(launches)), "busy_us": self._per(busy)})
        return sorted(rows, key=lambda row: -row["busy_us"])

    def kernels(self) -> list[dict[str, Any]]:
        """Count and time of every name, per unit, those of the forward stream apart from the others; the longest first."""
        counts, times = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
        for launch in self.launches:
            key = launch.name, launch.stream == self.forward_stream
            counts[key] += 1
            times[key] += launch.us
        return [
            {"kernel": name, "forward": is_forward, "count": self._per(counts[name, is_forward]), "us": self._per(us)}
            for (name, is_forward), us in times.most_common()
        ]

    def gaps(self) -> dict[str, Any]:
        """Time between the first and the last launch of the forward stream in which none of it ran, per unit."""
        pauses = set(self._pauses)
        inside = [end - start for start, end in gaps_between(self._spans) if (start, end) not in pauses]
        return {
            "gap_us": self._per(sum(inside)),
            "gaps": self._per(len(inside)),
            "longest_us": round(max(inside, default=0.0), 1),
            "over_20_us": self._per(sum(gap > 20 for gap in inside)),
            "span_us": self._per(self._spans[-1][1] - self._spans[0][0] - length(self._pauses)),
            "between_units_us": round(length(self._pauses) / max(1, len(self._pauses)), 1),
        }

    def overlap(self, plain: "Profile | None" = None) -> dict[str, Any]:
        """What page copies of other streams do to the forward's kernels beside which they run.

        Of each name: launches that share time with a copy (`inside`) and those that do not, and their means. Launches of one name
        differ in size, so `plain_us` is the mean of the same launches in `plain`: the same name, the same place in the same
        prompt; None where the two do not have as many.
        """
        known = {} if plain is None else plain.ordered()
        rows = []
        for name, launches in self.ordered().items():
            inside = {key: one for key, one in launches.items() if shared_us((one.start_us, one.end_us), self.copies)}
            if not inside:
                continue
            outside = [one.us for key, one in launches.items() if key not in inside]
            same = known.get(name, {})
            is_same = same.keys() == launches.keys()
            rows.append({
                "kernel": name,
                "inside": self._per(len(inside)),
                "inside_us": _mean([one.us for one in inside.values()]),
                "outside_us": _mean(outside),
                "plain_us": _mean([same[key].us for key in inside]) if is_same else None,
                "lost_us": self._per(sum(one.us - same[key].us for key, one in inside.items())) if is_same else None,
            })  # fmt: skip
        return {
            "copies": self._per(len(self.page_copies)),
            "copy_us": self._per(length(self.copies)),
            "overlapped_us": self._per(sum(shared_us(span, self.copies) for span in self._spans)),
            "kernels": sorted(rows, key=lambda row: -(row["inside"] * (row["inside_us"] or 0.0))),
        }

    def report(self, plain: "Profile | None" = None) -> dict[str, Any]:
        """All of it, for the result file. Times are microseconds per unit, but for means and the longest gap."""
        return {
            "units": self.units,
            **self.gaps(),
            "streams": self.streams(),
            "overlap": self.overlap(plain),
            "kernels": self.kernels(),
        }

    def _per(self, total: float) -> float:
        return round(total / self.units, 2)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def differences(ours: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours minus plain for every name of `Profile.kernels`, per unit; the largest first, whatever its sign."""
    keys = [{(row["kernel"], row["forward"]): row for row in rows} for rows in (ours, plain)]
    none = {"count": 0.0, "us": 0.0}
    rows = []
    for kernel, is_forward in dict.fromkeys((*keys[0], *keys[1])):
        mine, other = (known.get((kernel, is_forward), none) for known in keys)
        rows.append({
            "kernel": kernel,
            "forward": is_forward,
            "count": mine["count"],
            "plain_count": other["count"],
            "us": mine["us"],
            "plain_us": other["us"],
            "difference_us": round(mine["us"] - other["us"], 2),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -abs(row["difference_us"]))
