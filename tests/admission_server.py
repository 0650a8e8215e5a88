"""A server without anything in it but time: for the tests of the admission gate.

Owns a clock, a link and a closed loop of clients whose decode steps cost what a formula says. The gate under test sees of it what
it sees of a real one: books, launches, bytes that were fetched a while ago. It must never tell the gate its formula.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_hisparse.admission import AdmissionGate, Pool, StepModel


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


LAG = 10


@dataclass
class FakeLink:
    """Tells, like the device's counts, what had been fetched some steps ago. told: what a probe finds, if it is not the truth."""

    bytes_per_second: float = 50e9
    told: float | None = None
    request_bytes: float = 2.6e6
    totals: list[float] = field(default_factory=lambda: [0.0])

    def step(self, fetched_bytes: float) -> None:
        """One decode step more."""
        self.totals.append(self.totals[-1] + fetched_bytes)

    def look(self) -> float:
        return self.told or self.bytes_per_second

    def fetched(self) -> tuple[int, float]:
        step = max(len(self.totals) - 1 - LAG, 0)
        return step, self.totals[step]


@dataclass
class Server:
    """A closed loop of `clients`: each request prefills for a while, decodes 256 tokens and comes back. Time is simulated.

    page_seconds: what a host-only page costs a decode step, in truth; the model is told only bytes and the clock.
    """

    page_seconds: float
    clients: int = 48
    device_pages: int = 3125
    pages: int = 254
    prefill_seconds: float = 0.137
    base: float = 2.2e-3
    per_request: float = 40e-6
    gated: bool = True
    limit: int = 10**6  # running requests, for a server without a host tier
    tokens: int = 0
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock, self.link = Clock(), FakeLink()
        self.left: list[int] = []  # tokens that each running request still has to decode
        self.gate = AdmissionGate(self.books, StepModel(self.link), lambda figures: figures, self.clock)

    def slow_down(self, times: float) -> None:
        """Others begin to use the link: the same bytes take so many times as long."""
        self.page_seconds *= times
        self.link.bytes_per_second /= times

    def books(self) -> Pool:
        demand, smallest = self.pages * len(self.left), 64 + 3
        beyond = max(0, demand - self.device_pages)
        mixed = -(-beyond // (self.pages - smallest))
        return Pool(len(self.left), self.device_pages, 64, demand, beyond + 64 * mixed)

    def admits(self) -> bool:
        if len(self.left) >= min(self.clients, self.limit):
            return False
        return not self.gated or self.gate.allows(self.gate.look(), self.pages)

    def _prefill(self, output: int) -> None:
        self.clock.now += self.prefill_seconds
        self.left.append(output)
        self.gate.note_extend()

    def _decode(self) -> None:
        books = self.books()
        self.gate.note_decode(len(self.left))
        self.gate.tick()
        self.clock.now += self.base + self.per_request * len(self.left) + self.page_seconds * books.host_pages
        self.link.step(self.page_seconds * books.host_pages * self.link.bytes_per_second)
        self.left = [left - 1 for left in self.left if left > 1]

    def run(self, seconds: float) -> float:
        """Tokens per second over the second half of `seconds`."""
        half, end, before = self.clock.now + seconds / 2, self.clock.now + seconds, 0
        while self.clock.now < end:
            if self.admits():
                self._prefill(256)
                continue
            self.tokens += len(self.left)
            self._decode()
            if self.clock.now < half:
                before = self.tokens
        return (self.tokens - before) / (seconds / 2)

    def burst(self, output: int) -> float:
        """Tokens per second of `clients` requests of `output` tokens that come at once, until the last ends."""
        begin, waiting = self.clock.now, self.clients
        while waiting or self.left:
            if waiting and self.admits():
                waiting -= 1
                self._prefill(output)
            else:
                self._decode()
        return self.clients * output / (self.clock.now - begin)
