"""Sends random-token prompts to a server and times the answers. It starts no server and writes no file."""

import asyncio
import bisect
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp


@dataclass(slots=True)
class Reply:
    """One answer. Times are time.perf_counter() seconds; at `arrivals[i]` there were `counts[i]` tokens.

    prompt_tokens, cached_tokens, retractions and finish (the type of its finish reason) are as the server last told.
    """

    tokens: list[int] = field(default_factory=list)
    start_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    finish: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.start_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.counts[-1] - self.counts[0])

    def count_at(self, moment_s: float) -> int:
        """Tokens that had arrived at `moment_s`."""
        index = bisect.bisect_right(self.arrivals, moment_s)
        return self.counts[index - 1] if index else 0

    def take(self, line: bytes) -> None:
        """Read one line of the event stream, whose chunks carry all tokens so far."""
        if not line.startswith(b"data:") or b"[DONE]" in line:
            return
        chunk = json.loads(line[5:])
        if "error" in chunk:
            self.error = str(chunk["error"])[:200]
        meta = chunk.get("meta_info") or {}
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        self.cached_tokens = meta.get("cached_tokens", self.cached_tokens)
        self.retractions = meta.get("num_retractions", self.retractions)
        self.finish = (meta.get("finish_reason") or {}).get("type", self.finish)
        tokens = chunk.get("output_ids") or []
        if len(tokens) > len(self.tokens):
            self.tokens = tokens
            self.arrivals.append(time.perf_counter())
            self.counts.append(len(tokens))


@dataclass(frozen=True, slots=True)
class Timing:
    """A wave in figures: output tokens per second overall and after the last first token; mean TTFT and ITL."""

    output_tok_s: float
    decode_tok_s: float
    ttft_s: float
    itl_ms: float


def random_prompts(seed: int | str, lengths: Sequence[int], vocab_size: int = 32768) -> list[list[int]]:
    """One prompt of uniform random tokens for each length; prompt i depends on (seed, i) only."""
    return [
        random.Random(f"{seed}/{index}").choices(range(10, vocab_size), k=length)
        for index, length in enumerate(lengths)
    ]


def spread_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """`count` lengths from shortest to longest, evenly apart, in an order that mixes short and long."""
    step = (longest - shortest) / max(1, count - 1)
    lengths = [round(shortest + step * index) for index in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


async def _generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], output_tokens: int, gate: asyncio.Semaphore
) -> Reply:
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
    reply = Reply()
    async with gate:
        reply.start_s = time.perf_counter()
        try:
            body = {"input_ids": prompt, "stream": True, "sampling_params": sampling}
            async with session.post(f"{url}/generate", json=body) as response:
                if response.status != 200:
                    reply.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return reply
                async for line in response.content:
                    reply.take(line)
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            reply.error = f"{type(error).__name__}: {error}"
    if not reply.error and len(reply.tokens) != output_tokens:
        reply.error = f"{len(reply.tokens)} tokens instead of {output_tokens}"
    return reply


async def run_wave(
    url: str, prompts: Sequence[list[int]], output_tokens: int, concurrency: int, timeout_s: float = 300.0
) -> list[Reply]:
    """Send every prompt, at most `concurrency` at a time; replies in the order of the prompts, failures included."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 24) as session:
        return await asyncio.gather(*(_generate(session, url, prompt, output_tokens, gate) for prompt in prompts))


def send(
    url: str, prompts: Sequence[list[int]], output_tokens: int, concurrency: int, timeout_s: float = 300.0
) -> list[Reply]:
    """`run_wave` for callers without an event loop."""
    return asyncio.run(run_wave(url, prompts, output_tokens, concurrency, timeout_s))


def summarise(waves: Sequence[Sequence[Reply]]) -> Timing:
    """Figures over waves that ran one after another. Raises ValueError when a request failed.

    Decode throughput counts, in each wave, the tokens after the wave's last first token: nobody is in prefill then.
    """
    failed = [reply.error for wave in waves for reply in wave if reply.error]
    if failed:
        raise ValueError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    wall_s = decode_s = 0.0
    tokens = decode_tokens = 0
    for wave in waves:
        last_first = max(reply.arrivals[0] for reply in wave)
        end = max(reply.arrivals[-1] for reply in wave)
        wall_s += end - min(reply.start_s for reply in wave)
        decode_s += end - last_first
        tokens += sum(len(reply.tokens) for reply in wave)
        decode_tokens += sum(len(reply.tokens) - reply.count_at(last_first) for reply in wave)
    replies = [reply for wave in waves for reply in wave]
    return Timing(
        output_tok_s=tokens / wall_s,
        decode_tok_s=decode_tokens / max(decode_s, 1e-9),
        ttft_s=sum(reply.ttft_s for reply in replies) / len(replies),
        itl_ms=1e3 * sum(reply.itl_s for reply in replies) / len(replies),
    )
