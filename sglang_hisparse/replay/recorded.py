"""Recordings as a load: the same selections that a server made, for the engine and for the policies.

Built by command.py from a file that recording/reader.py has checked. The engine sees requests that arrive in the order
of the recording and select, at each length, what they selected then; their text is made up. It must never change a
selection.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from sglang_hisparse.recording.format import RecordingError
from sglang_hisparse.recording.reader import RecordedRequest, Recording
from sglang_hisparse.replay.comparison import Selection
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.prefix_cache import PrefixCache
from sglang_hisparse.replay.profiles import TopKStream
from sglang_hisparse.replay.workload import RECORDED, Phase, Request, Workload

#: Share of the running requests' pages that a replayed recording's device pool holds, unless its size is given.
DEVICE_SHARE = 0.4


class RecordedStream:
    """One request and group of a recording. At a length that it lacks, the selection before is made again."""

    def __init__(self, recording: Recording, request: RecordedRequest, group: int, num_positions: int) -> None:
        self._recording, self._request, self._group = recording, request, group
        self._num_positions = num_positions

    def append(self, count: int = 1) -> None:
        self._num_positions += count

    def select(self) -> np.ndarray:
        index = max(bisect.bisect_right(self._request.seq_lens, self._num_positions) - 1, 0)
        step, place = self._request.steps[index], self._request.places[index]
        positions = self._recording.positions(step, self._group, place)
        return positions[positions < self._num_positions]


class RecordedWorkload(Workload):
    """Each recorded request once, in order. groups: those of the recording that are replayed."""

    def __init__(self, options: ReplayOptions, recording: Recording) -> None:
        super().__init__(options)
        self._recording = recording
        self._groups = spread(len(recording.header.groups), options.num_groups)
        self._recorded = recording.requests()
        self._arrived = 0

    def has_arrivals(self, phase: Phase) -> bool:
        return self.num_left > 0

    @property
    def num_left(self) -> int:
        return len(self._recorded) - self._arrived

    def arrival(self, phase: Phase, cache: PrefixCache, busy: set[int]) -> Request:
        recorded = self._recorded[self._arrived]
        self._arrived += 1
        request = self.new_request(prompt=max(1, recorded.seq_lens[0] - 1))
        request.goal_tokens = max(recorded.seq_lens[-1], request.prompt_tokens + 1)
        return request

    def profile_names(self, request: Request) -> list[str]:
        return [RECORDED] * len(self._groups)

    def streams(self, request: Request) -> list[TopKStream]:
        recorded = self._recorded[request.number]
        return [RecordedStream(self._recording, recorded, group, request.length) for group in self._groups]


def recorded_phases(options: ReplayOptions) -> list[Phase]:
    return [Phase("recording", None, options.max_requests, 0.0, "what a server selected, until its last request ends")]


def recorded_options(
    options: ReplayOptions, recording: Recording, *, buffer_size: int | None, device_pages: int | None
) -> ReplayOptions:
    """Options for this recording: sizes that it gives, and a device pool under pressure unless its size is given."""
    header, requests = recording.header, recording.requests()
    if not requests:
        raise RecordingError("the recording holds no step of any request")
    page = header.page_size
    longest = max(request.seq_lens[0] for request in requests)
    output = max(request.seq_lens[-1] - request.seq_lens[0] + 1 for request in requests)
    at_once = min(options.max_requests, len(requests))
    changed = {
        "profile": "paper",  # not used: streams come from the recording
        "top_k": header.top_k,
        "page_size": page,
        "buffer_size": buffer_size or -(-2 * header.top_k // page) * page,
        "num_groups": min(options.num_groups, len(header.groups)),
        "max_requests": at_once,
        "min_context": page,
        "max_context": max(longest, page),
        "max_output": output,
        "chunk_tokens": max(options.chunk_tokens, page),
    }
    pages_of_one = -(-(max(longest, page) + 2 * output + 2) // page)
    # One request, a hot lease beside it, and the watermark must fit: what ReplayOptions asks for, and a little more.
    least = int((pages_of_one + changed["buffer_size"] // page + 2) / (1 - options.watermark_high)) + 1
    changed["device_pages"] = device_pages or max(least, int(DEVICE_SHARE * at_once * pages_of_one))
    # Places for every request that runs, whatever the pool is.
    ratio = (at_once + 1) * pages_of_one / changed["device_pages"]
    return dataclasses.replace(options, host_to_device_ratio=max(options.host_to_device_ratio, ratio), **changed)


def recorded_selections(recording: Recording, wanted: Sequence[tuple[RecordedRequest, int]]) -> list[list[Selection]]:
    """The streams of some (request, group) for the policies."""
    return [[(positions, None) for positions in sets if positions.size] for sets in recording.gather(wanted)]


def spread(total: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `total`, evenly spread."""
    count = min(total, wanted)
    return [index * total // count for index in range(count)]
