"""Mixed load for a soak: what is asked, what may come back, and what came back. `soak_server` calls it.

A `Load` keeps about as many tokens in flight as it is told, with random lengths, shared prefixes, aborts and disconnects,
while a second task pauses, continues and flushes the server. Every request ends in exactly one count of `Tally`; what should
not have happened is a failure in words. It starts no server.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from serving.client import Reply
from serving.fidelity import first_difference

PAUSE_MODES = ("in_place", "retract", "abort")
FAMILIES = 5
KEPT_FAILURES = 50


@dataclass(slots=True)
class Question:
    """One request. reference: the tokens expected, as many as are known, or None. stop_after_s: when the client gives up."""

    prompt: list[int]
    output: int
    reference: list[int] | None = None
    stop: str = ""  # "", "abort" (asked for by id) or "disconnect"
    stop_after_s: float = 0.0
    may_abort: bool = False
    reply: Reply = field(default_factory=Reply)

    @property
    def tokens(self) -> int:
        """Cache rows that it will need."""
        return len(self.prompt) + self.output


@dataclass(slots=True)
class Tally:
    """Counts of one soak. Every question sent is finished, aborted, disconnected or failed in the end."""

    sent: int = 0
    finished: int = 0
    aborted_by_client: int = 0
    aborted_by_pause: int = 0
    disconnected: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    checked_answers: int = 0
    wrong_answers: int = 0
    retractions: int = 0
    most_tokens_in_flight: int = 0
    longest_prompt: int = 0
    slowest_s: float = 0.0
    pauses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAUSE_MODES, 0))
    flushes_granted: int = 0
    flushes_refused: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether every question ended as it should."""
        ended = self.finished + self.aborted_by_client + self.aborted_by_pause + self.disconnected
        return ended == self.sent and not self.failed and not self.wrong_answers

    def fail(self, what: str) -> None:
        """Keep a failure, the first ones in words."""
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(what)

    def settle(self, question: Question, seconds: float) -> None:
        """Count the end of a question, whose reply is complete."""
        reply = question.reply
        self.output_tokens += len(reply.tokens)
        self.cached_tokens += reply.cached_tokens
        self.retractions += reply.retractions
        self.slowest_s = max(self.slowest_s, seconds)
        if question.reference is not None:
            self._check(question)
        aborted = reply.finish == "abort" or "abort" in reply.error.lower()
        if reply.error == "" and reply.finish == "length" and len(reply.tokens) == question.output:
            self.finished += 1
        elif reply.error == "disconnected":
            self.disconnected += 1
        elif aborted and question.stop == "abort":
            self.aborted_by_client += 1
        elif aborted and question.may_abort:
            self.aborted_by_pause += 1
        else:
            self.failed += 1
            self.fail(
                f"{len(question.prompt)} + {question.output} tokens, {question.stop or 'to finish'}: "
                f"{reply.error or reply.finish or 'no end'} after {len(reply.tokens)} tokens, {seconds:.1f} s"
            )

    def _check(self, question: Question) -> None:
        got, expected = question.reply.tokens, question.reference or []
        self.checked_answers += bool(got)
        length = min(len(got), len(expected))
        place = first_difference(expected[:length], got[:length])
        if place is not None:
            self.wrong_answers += 1
            self.fail(f"answer to a prompt of {len(question.prompt)} tokens differs from token {place} on")


def draw_length(rng: random.Random, shortest: int, longest: int) -> int:
    """A length whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))


@dataclass(frozen=True, slots=True)
class Texts:
    """Random prompts, half of which begin like others. Depends on the seed only."""

    seed: int
    longest: int
    families: list[list[int]]

    @classmethod
    def make(cls, seed: int, longest: int, vocab_size: int = 32768) -> "Texts":
        """`longest`: tokens of the longest prompt."""
        rng = random.Random(f"{seed}/families")
        return cls(seed, longest, [rng.choices(range(10, vocab_size), k=longest) for _ in range(FAMILIES)])

    def prompt(self, rng: random.Random, shortest: int = 32, vocab_size: int = 32768) -> list[int]:
        """A prompt of `shortest` to `longest` tokens: with even odds its front part is a family's, cut anywhere."""
        length = draw_length(rng, min(shortest, self.longest), self.longest)
        shared = rng.randrange(length) if rng.random() < 0.5 else 0
        return rng.choice(self.families)[:shared] + rng.choices(range(10, vocab_size), k=length - shared)

    def prompts(self, count: int, label: str, shortest: int = 32) -> list[list[int]]:
        """`count` prompts that depend on (seed, label, shortest) only."""
        rng = random.Random(f"{self.seed}/{label}")
        return [self.prompt(rng, shortest) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Mix:
    """How rough the load is. Shares are of all questions; `pause_every_s` and `flush_every_s` are means.

    compare_from: tokens of the shortest prompt whose answer is kept to be asked for again. The checkpoint looks up to 3,700
    tokens back; after a shorter prompt two tokens may be equally good, and rounding decides.
    """

    tokens_in_flight: int
    most_output: int = 256
    most_questions: int = 96
    abort_share: float = 0.12
    disconnect_share: float = 0.06
    known_share: float = 0.5
    pause_every_s: float = 20.0
    pause_longest_s: float = 2.0
    flush_every_s: float = 15.0
    compare_from: int = 4096
    patience_s: float = 240.0


class Load:
    """One soak against the server at `url`. known: (prompt, expected tokens) pairs that questions are drawn from."""

    def __init__(
        self, url: str, mix: Mix, texts: Texts, known: Sequence[tuple[list[int], list[int]]], tally: Tally
    ) -> None:
        self.url, self.mix, self.texts, self.known, self.tally = url, mix, texts, known, tally
        self.fresh: list[Question] = []  # a sample of finished questions without a reference
        self._rng = random.Random(f"{texts.seed}/load")
        self._running: dict[asyncio.Task[None], Question] = {}
        self._aborting = False
        self._fresh_seen = 0

    def run(self, seconds: float, alive: Callable[[], None], progress: Callable[[str], None]) -> None:
        """Load for `seconds`, then wait for every answer. `alive` raises when the server is gone."""
        asyncio.run(self._run(seconds, alive, progress))

    async def _run(self, seconds: float, alive: Callable[[], None], progress: Callable[[str], None]) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self.mix.patience_s)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 24) as session:
            ends, report = time.monotonic() + seconds, 0.0
            trouble = asyncio.create_task(self._trouble(session, ends))
            while time.monotonic() < ends:
                self._fill(session)
                if time.monotonic() >= report:
                    report = time.monotonic() + 2.0
                    alive()
                    progress("load")
                await asyncio.sleep(0.02)
            await trouble
            while self._running:
                progress("draining")
                alive()
                await asyncio.wait(self._running, timeout=2.0)

    # -- asking ---------------------------------------------------------------------------------------------------

    def _fill(self, session: aiohttp.ClientSession) -> None:
        while len(self._running) < self.mix.most_questions:
            in_flight = sum(question.tokens for question in self._running.values())
            self.tally.most_tokens_in_flight = max(self.tally.most_tokens_in_flight, in_flight)
            if in_flight >= self.mix.tokens_in_flight:
                return
            question = self._draw()
            task = asyncio.create_task(self._ask(session, question, f"{self.tally.sent:08d}"))
            self.tally.sent += 1
            self.tally.prompt_tokens += len(question.prompt)
            self.tally.longest_prompt = max(self.tally.longest_prompt, len(question.prompt))
            self._running[task] = question
            task.add_done_callback(lambda done: self._running.pop(done))

    def _draw(self) -> Question:
        rng, mix = self._rng, self.mix
        output = draw_length(rng, 1, mix.most_output)
        if self.known and rng.random() < mix.known_share:
            prompt, expected = rng.choice(self.known)
            question = Question(prompt, min(output, len(expected)), expected)
        else:
            question = Question(self.texts.prompt(rng), output)
        fate = rng.random()
        if fate < mix.abort_share + mix.disconnect_share:
            question.stop = "abort" if fate < mix.abort_share else "disconnect"
            question.stop_after_s = rng.choice((0.0, rng.uniform(0, 0.5), rng.uniform(0, 5), rng.uniform(0, 15)))
        question.may_abort = self._aborting
        return question

    async def _ask(self, session: aiohttp.ClientSession, question: Question, rid: str) -> None:
        reply, begin = question.reply, time.monotonic()
        stopper = None
        if question.stop == "abort":
            stopper = asyncio.create_task(self._abort_later(session, rid, question.stop_after_s))
        try:
            limit_s = question.stop_after_s if question.stop == "disconnect" else None
            async with asyncio.timeout(limit_s):
                await self._stream(session, question, rid)
        except TimeoutError:
            reply.error = "disconnected" if question.stop == "disconnect" else "not answered in time"
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            if stopper is not None:
                stopper.cancel()
        self.tally.settle(question, time.monotonic() - begin)
        self._sample(question)

    async def _stream(self, session: aiohttp.ClientSession, question: Question, rid: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": question.output, "ignore_eos": True}
        body = {"input_ids": question.prompt, "rid": rid, "stream": True, "sampling_params": sampling}
        question.reply.start_s = time.perf_counter()
        async with session.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                question.reply.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                question.reply.take(line)

    async def _abort_later(self, session: aiohttp.ClientSession, rid: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:  # an id that has not arrived yet is unknown, and the request to abort it is without effect
            await self._post(session, "/abort_request", {"rid": rid})
            await asyncio.sleep(0.5)

    def _sample(self, question: Question, size: int = 16) -> None:
        """Keep a uniform sample of the finished questions whose answer nobody knows yet."""
        known = question.reference is not None or len(question.prompt) < self.mix.compare_from
        if known or question.reply.error or len(question.reply.tokens) != question.output:
            return
        self._fresh_seen += 1
        if len(self.fresh) < size:
            self.fresh.append(question)
        elif (place := self._rng.randrange(self._fresh_seen)) < size:
            self.fresh[place] = question

    # -- trouble --------------------------------------------------------------------------------------------------

    async def _trouble(self, session: aiohttp.ClientSession, ends: float) -> None:
        rng = random.Random(f"{self.texts.seed}/trouble")
        next_pause = time.monotonic() + rng.uniform(0.5, 1.5) * self.mix.pause_every_s
        next_flush = time.monotonic() + rng.uniform(0.5, 1.5) * self.mix.flush_every_s
        while time.monotonic() < ends:
            if time.monotonic() >= next_flush:
                await self._flush(session)
                next_flush = time.monotonic() + rng.uniform(0.5, 1.5) * self.mix.flush_every_s
            if time.monotonic() >= next_pause:
                await self._pause(session, rng)
                next_pause = time.monotonic() + rng.uniform(0.5, 1.5) * self.mix.pause_every_s
            await asyncio.sleep(0.05)

    async def _pause(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        mode = PAUSE_MODES[sum(self.tally.pauses.values()) % len(PAUSE_MODES)]
        if mode == "abort":
            self._aborting = True
            for question in self._running.values():
                question.may_abort = True
        paused = await self._post(session, "/pause_generation", {"mode": mode})
        await asyncio.sleep(rng.uniform(0.0, self.mix.pause_longest_s))
        if rng.random() < 0.5:
            await self._flush(session)
        resumed = await self._post(session, "/continue_generation", {})
        self._aborting = False
        self.tally.pauses[mode] += 1
        if (paused, resumed) != (200, 200):
            self.tally.fail(f"pause {mode}: HTTP {paused}, continue: HTTP {resumed}")

    async def _flush(self, session: aiohttp.ClientSession) -> None:
        status = await self._post(session, "/flush_cache", {})
        self.tally.flushes_granted += status == 200
        self.tally.flushes_refused += status == 400
        if status not in (200, 400):
            self.tally.fail(f"flush: HTTP {status}")

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, str]) -> int:
        """Status of the answer, 0 when there was none."""
        try:
            async with session.post(self.url + path, json=body) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return 0
