"""Who arrives when, and what they bring: the script of a replay run.

Called by the engine, which asks for the next request whenever the phase wants more of them. A *conversation* is a text
that grows by turns; its first turn may begin with a *family's* shared prefix. A finished turn leaves its full pages in the
prefix cache, and a later turn re-arrives with them. This module must never look at residency: it is the outside world.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_hisparse.replay.content import position_seeds
from sglang_hisparse.replay.options import ReplayOptions
from sglang_hisparse.replay.prefix_cache import Key, PrefixCache
from sglang_hisparse.replay.profiles import PROFILES, TopKStream

RECORDED = "recording"  #: the profile's name of a stream that was recorded
PROFILE_NAMES = [*PROFILES, RECORDED]


@dataclass(frozen=True, slots=True)
class Phase:
    """`steps` None: until the last request is gone."""

    name: str
    steps: int | None
    max_requests: int  #: wanted at once, waiting ones included
    returning_share: float  #: of arrivals that continue a finished conversation, where there is one
    goal: str


@dataclass(slots=True, eq=False)
class Request:
    """One turn. `length` counts the tokens that launched forwards have written."""

    number: int
    conversation: int
    family: int | None
    seeds: np.ndarray  #: int64 [max tokens], home content by position
    prompt_tokens: int
    goal_tokens: int
    starts_on_host: bool  #: decode at once over a prefix that lives on the host only, without bringing it back
    finds_family: bool = True  #: False: it comes too early to find its family's prefix, computes it again, and shares it then
    length: int = 0
    slot: int = -1
    streams: list[TopKStream] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return ("conversation", self.conversation)

    @property
    def is_prefilling(self) -> bool:
        return self.length < self.prompt_tokens


def standard_phases(options: ReplayOptions) -> list[Phase]:
    """Steps and concurrency of the built-in script."""

    def steps(count: int) -> int:
        return max(1, round(count * options.scale))

    full = options.max_requests
    fits = max(1, options.device_pages // options.max_pages_per_slot)
    return [
        Phase("warm-up", steps(100), min(full, fits), 0.0, "everything fits the device"),
        Phase("growth", steps(150), min(full, 2 * fits), 0.2, "the device fills up, cached pages leave first"),
        Phase("pressure", steps(300), full, 0.2, "far more requests than fit"),
        Phase("re-arrival", steps(250), full, 1.0, "finished conversations return, their prefix on the host"),
        Phase("drain", None, 0, 0.0, "nobody arrives; what is left comes back to the device and ends"),
    ]


class Workload:
    """Makes requests from one seeded generator."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self._rng = np.random.default_rng([options.seed, 1])
        self._next_content = 1
        self._next_number = 0
        page = options.page_size
        self._families = []
        for _ in range(options.num_families):
            pages = int(self._rng.integers(max(1, options.min_context // (4 * page)), max(2, options.min_context // (2 * page) + 1)))
            self._families.append(position_seeds(self._content_id(), 0, pages * page))
        self._texts: dict[int, tuple[int | None, np.ndarray]] = {}  # conversation -> family, seeds of its cached pages

    def _content_id(self) -> int:
        self._next_content += 1
        return self._next_content - 1

    def family_pages(self, family: int) -> int:
        return self._families[family].size // self._options.page_size

    def has_arrivals(self, phase: Phase) -> bool:
        """Whether the phase may bring further requests."""
        return phase.steps is not None

    @property
    def num_left(self) -> int:
        """Requests that will arrive whatever the phase is."""
        return 0

    def profile_names(self, request: Request) -> list[str]:
        """The profile of each index group's stream."""
        return self._options.profile_names(request.number)

    def streams(self, request: Request) -> list[TopKStream]:
        """The selections of each index group, of a request that begins to decode at its present length."""
        options = self._options
        return [
            PROFILES[name].stream(
                num_positions=request.length,
                top_k=options.top_k,
                rng=np.random.default_rng([options.seed, 2, request.number, group]),
                buffer_size=options.buffer_size,
            )
            for group, name in enumerate(self.profile_names(request))
        ]

    def new_request(self, prompt: int) -> Request:
        """A text of its own, with a prompt of so many tokens."""
        return self._request(self._next_number, None, np.zeros(0, dtype=np.int64), prompt, starts_on_host=False)

    def new_conversation(self) -> Request:
        options, number = self._options, self._next_number
        family = int(self._rng.integers(options.num_families)) if options.num_families and number % 2 else None
        prompt = int(self._rng.integers(options.min_context, options.max_context + 1))
        prefix = self._families[family] if family is not None else np.zeros(0, dtype=np.int64)
        request = self._request(number, family, prefix, max(prompt, prefix.size + 1), starts_on_host=False)
        request.finds_family = bool(self._rng.random() < 0.75)
        return request

    def returning_turn(self, conversation: int) -> Request:
        """The next turn: on the host only and decoding at once, or with a new prompt behind the old text."""
        options = self._options
        family, text = self._texts[conversation]
        starts_on_host = bool(self._rng.random() < 0.6)
        added = 0 if starts_on_host else int(self._rng.integers(1, options.max_output + 1))
        prompt = min(text.size + added, options.max_context + options.max_output)
        return self._request(conversation, family, text, prompt, starts_on_host)

    def _request(self, conversation: int, family: int | None, known: np.ndarray, prompt: int, starts_on_host: bool) -> Request:
        options = self._options
        output = int(self._rng.integers(max(1, options.max_output // 4), options.max_output + 1))
        seeds = np.zeros(options.max_tokens, dtype=np.int64)
        seeds[: known.size] = known
        # A new turn writes new text from the first position that is not kept, never the same bytes again.
        seeds[known.size :] = position_seeds(self._content_id(), known.size, options.max_tokens)
        number = self._next_number
        self._next_number += 1
        goal = min(prompt + output, options.max_tokens - 1)
        return Request(number, conversation, family, seeds, prompt, goal, starts_on_host)

    def finished(self, request: Request, cached_tokens: int) -> None:
        """`cached_tokens` of the request's text are kept in the prefix cache."""
        self._texts[request.conversation] = (request.family, request.seeds[:cached_tokens].copy())

    def text(self, conversation: int) -> np.ndarray:
        """Seeds of the cached positions of a conversation."""
        return self._texts[conversation][1]

    def arrival(self, phase: Phase, cache: PrefixCache, busy: set[int]) -> Request:
        """The next request of a phase; a returning one continues the conversation that was used longest ago."""
        if self._rng.random() < phase.returning_share:
            longest = self._options.max_context + self._options.max_output // 2
            for kind, conversation in cache.keys_by_use():
                if kind == "conversation" and conversation not in busy and self._texts[conversation][1].size <= longest:
                    return self.returning_turn(conversation)
        return self.new_conversation()
