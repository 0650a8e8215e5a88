"""Comparing a server's tokens with those of plain SGLang, and reading its counters before and after.

`verify_server` calls it. The expected tokens live in one JSON file, so that a later call need not run plain again.
"""

import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.client import Reply, send
from serving.results import read_document, write_json
from serving.server import Server

COUNTERS = ("pages_mirrored", "pages_spilled", "pages_promoted", "rows_fetched", "errors", "audited_rows", "mismatches")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens of a wave held against the expected ones. first_difference[i] is None where prompt i agrees."""

    first_difference: list[int | None]
    failures: list[str]

    @property
    def prompts(self) -> int:
        """Prompts compared."""
        return len(self.first_difference)

    @property
    def identical(self) -> int:
        """Prompts whose every token agrees."""
        return sum(place is None for place in self.first_difference)

    def text(self) -> str:
        """One line for the log."""
        differing = {index: place for index, place in enumerate(self.first_difference) if place is not None}
        line = f"{self.identical} of {self.prompts} identical"
        if differing:
            line += f"; prompt: first differing token {differing}"
        if self.failures:
            line += f"; {len(self.failures)} failed: {self.failures[0]}"
        return line


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None when the sequences are equal."""
    for index, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def compare(expected: Sequence[Sequence[int]], replies: Sequence[Reply]) -> Comparison:
    """Hold replies against expected tokens, prompt by prompt. Raises ValueError when their numbers differ."""
    pairs = list(zip(expected, replies, strict=True))
    return Comparison(
        [first_difference(tokens, reply.tokens) for tokens, reply in pairs],
        [reply.error for reply in replies if reply.error],
    )


@dataclass(slots=True)
class PlainOutputs:
    """Tokens of plain SGLang: `single` one prompt at a time, `batch` all together, `tails` short prompts one at a time, all of them
    twice. `key` says for which prompts."""

    key: dict[str, Any]
    single: list[list[int]] = field(default_factory=list)
    batch: list[list[int]] = field(default_factory=list)
    tails: list[list[int]] = field(default_factory=list)

    def save(self, path: pathlib.Path) -> None:
        """Write the file that `load` reads."""
        write_json(path, {"key": self.key, "single": self.single, "batch": self.batch, "tails": self.tails})

    @classmethod
    def load(cls, path: pathlib.Path, key: dict[str, Any]) -> "PlainOutputs":
        """Raises ValueError when the file is missing or was made for other prompts."""
        if not path.exists():
            raise ValueError(f"{path} does not exist: run the phase `plain` first, or name its file with --plain")
        document = read_document(path)
        if document["key"] != key:
            raise ValueError(f"{path} was made with {document['key']}, not with {key}")
        return cls(document["key"], document["single"], document["batch"], document["tails"])


def settled_counters(server: Server, pause_s: float = 2.3) -> dict[str, int]:
    """The server's counters, all work before this call included; empty without the plugin.

    Counters are written every two seconds of activity and show device counts one write late: two small requests, a
    period apart, make a current write happen.
    """
    if not server.spec.plugin:
        return {}
    for _ in range(2):
        time.sleep(pause_s)
        send(server.url, [[11] * 32], 4, 1, timeout_s=60)
    return server.counters()


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What each counter of COUNTERS gained."""
    return {name: after.get(name, 0) - before.get(name, 0) for name in COUNTERS}
