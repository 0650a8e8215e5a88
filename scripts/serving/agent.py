"""Conversations of an agent: a long first turn, then short ones, each prompt holding all that came before.

`bench_agent` calls it. It sends the turns, condenses the rows and says which of a known file's still hold; it starts no server
and writes no file.
"""

import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.client import Reply, random_prompts, send

# The published agent trace: tokens of the first turn, new tokens of each later one, answer tokens, turns.
FIRST_TOKENS, LATER_TOKENS, OUTPUT_TOKENS, TURNS = 74_160, 753, 220, 13
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Token counts of one conversation: of its first turn, of what each later turn adds, of each answer."""

    turns: int
    first: int
    later: int
    output: int

    @classmethod
    def scaled(cls, scale: float, turns: int = TURNS) -> "Shape":
        """The trace's shape with every length multiplied by `scale`."""
        return cls(turns, *(max(1, round(tokens * scale)) for tokens in (FIRST_TOKENS, LATER_TOKENS, OUTPUT_TOKENS)))

    @property
    def final_tokens(self) -> int:
        """Cache rows of a whole conversation, in whole pages."""
        tokens = self.first + (self.turns - 1) * self.later + self.turns * self.output
        return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


@dataclass(slots=True)
class Conversation:
    """One agent: the tokens it will add, turn by turn, its history, and the answers it got."""

    additions: list[list[int]]
    history: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def ask(self) -> list[int]:
        """The prompt of the next turn, which becomes part of the history."""
        self.history = self.history + self.additions[len(self.answers)]
        return self.history

    def hear(self, answer: list[int]) -> None:
        """Take the answer to `ask` into the history."""
        self.answers.append(answer)
        self.history = self.history + answer


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of all conversations took. prefilled_tokens: prompt tokens not found in a cache, summed over them.

    least_ttft_s, most_ttft_s: where the median is high, they tell a pause before all from conversations that come one after the other.
    """

    ttft_s: float
    output_tok_s: float
    prefilled_tokens: int
    least_ttft_s: float
    most_ttft_s: float


def conversations(count: int, shape: Shape, seed: int | str) -> list[Conversation]:
    """`count` conversations of random tokens; conversation i depends on (seed, i) only."""
    lengths = [shape.first] + [shape.later] * (shape.turns - 1)
    return [Conversation(random_prompts(f"{seed}/{index}", lengths)) for index in range(count)]


def play_turn(url: str, group: Sequence[Conversation], output: int, at_once: int, timeout_s: float) -> Turn:
    """Send the next turn of every conversation, `at_once` at a time, and wait for all. Raises ValueError on a failure."""
    replies = send(url, [conversation.ask() for conversation in group], output, at_once, timeout_s)
    for conversation, reply in zip(group, replies, strict=True):
        if reply.error:
            raise ValueError(f"turn {len(conversation.answers) + 1}: {reply.error}")
        conversation.hear(reply.tokens)
    return condense(replies)


def condense(replies: Sequence[Reply]) -> Turn:
    """Median TTFT and its spread, output throughput from the first sending to the last token, and the tokens prefilled."""
    wall_s = max(reply.arrivals[-1] for reply in replies) - min(reply.start_s for reply in replies)
    return Turn(
        ttft_s=statistics.median(reply.ttft_s for reply in replies),
        output_tok_s=sum(len(reply.tokens) for reply in replies) / wall_s,
        prefilled_tokens=sum(reply.prompt_tokens - reply.cached_tokens for reply in replies),
        least_ttft_s=min(reply.ttft_s for reply in replies),
        most_ttft_s=max(reply.ttft_s for reply in replies),
    )


def play(
    url: str,
    group: Sequence[Conversation],
    shape: Shape,
    *,
    at_once: int,
    think_s: float,
    timeout_s: float,
    ends: float,
) -> Iterator[tuple[int, Turn]]:
    """Yield (turn from 1, figures) until all turns are played or time.monotonic() has passed `ends`."""
    for number in range(1, shape.turns + 1):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            return
        if number > 1 and think_s:
            time.sleep(think_s)
        yield number, play_turn(url, group, shape.output, at_once, min(timeout_s, left_s + 10.0))


def agreement(left: Sequence[Conversation], right: Sequence[Conversation]) -> dict[str, Any]:
    """How many answers agree, and the first (conversation, turn), both from 1, that does not; turns both have."""
    answers = identical = 0
    first: list[int] | None = None
    for index, (one, other) in enumerate(zip(left, right, strict=True), 1):
        for turn, (mine, theirs) in enumerate(zip(one.answers, other.answers, strict=False), 1):
            answers += 1
            identical += mine == theirs
            if mine != theirs and first is None:
                first = [index, turn]
    return {"answers": answers, "identical": identical, "first_difference": first}


# ---- from rows to totals ---------------------------------------------------------------------------------------------


def carry_over(known: Mapping[str, Any], counts: Collection[int], setting: Mapping[str, Any]) -> dict[str, Any]:
    """The result file `known` as it can take rows of `counts` conversations made with `setting`.

    A number of conversations whose rows were made with another setting loses all that was measured of it: systems and
    turns are compared within one setting only. Settings are equal when all but the command is.
    """
    settings = dict(known.get("settings", {}))

    def made_with(one: Mapping[str, Any] | None) -> dict[str, Any]:
        return {key: value for key, value in (one or {}).items() if key != "command"}

    stale = {count for count in counts if made_with(settings.get(str(count))) != made_with(setting)}
    cases = {case_of(count) for count in stale}
    settings |= {str(count): dict(setting) for count in counts}
    return {
        **known,
        "settings": {count: settings[count] for count in sorted(settings, key=int)},
        "identity": [one for one in known.get("identity", []) if one["case"] not in cases],
        "counters": {case: one for case, one in known.get("counters", {}).items() if case not in cases},
        "rows": [row for row in known.get("rows", []) if row["conversations"] not in stale],
    }


def case_of(count: int) -> str:
    """Name of `count` conversations at once in a result file's identity and counters."""
    return f"{count} at once"


def outputs_of(document: Mapping[str, Any]) -> dict[int, int]:
    """Tokens of an answer, by number of conversations."""
    return {int(count): setting["shape"]["output"] for count, setting in document.get("settings", {}).items()}


def totals(rows: Sequence[Mapping[str, Any]], outputs: Mapping[int, int]) -> list[dict[str, Any]]:
    """One entry per (conversations, system): turns measured, mean TTFT after turn 1, throughput, tokens prefilled.

    outputs: tokens of an answer, by number of conversations.
    """
    found = []
    for conversations_, system in dict.fromkeys((row["conversations"], row["system"]) for row in rows):
        mine = [row for row in rows if (row["conversations"], row["system"]) == (conversations_, system)]
        found.append(_total(mine, conversations_, system, outputs[conversations_]))
    return found


def _total(mine: Sequence[Mapping[str, Any]], count: int, system: str, output: int) -> dict[str, Any]:
    later = [row["ttft_s"] for row in mine if row["turn"] > 1]
    wall_s = sum(count * output / row["output_tok_s"] for row in mine)
    return {
        "conversations": count,
        "system": system,
        "turns": len(mine),
        "ttft_s_first": next((row["ttft_s"] for row in mine if row["turn"] == 1), None),
        "ttft_s_later": round(statistics.mean(later), 4) if later else None,
        "output_tok_s": round(len(mine) * count * output / wall_s, 1),
        "prefilled_tokens": sum(row["prefilled_tokens"] for row in mine),
        "wall_s": round(wall_s, 2),
    }


def ratios(rows: Sequence[Mapping[str, Any]], outputs: Mapping[int, int]) -> list[dict[str, Any]]:
    """Ours against the others per number of conversations, over the turns that all systems there have.

    ttft_over_ours: mean TTFT of turns 2 and later, of each other system over ours. throughput_over: ours over the best
    other, which is named. A number of conversations with one system alone has no entry. With ours_elastic there is a second
    entry, with the key system.
    """
    entries = []
    for count in dict.fromkeys(row["conversations"] for row in rows):
        mine = [row for row in rows if row["conversations"] == count]
        systems = dict.fromkeys(row["system"] for row in mine)
        shared = set.intersection(*({row["turn"] for row in mine if row["system"] == name} for name in systems))
        table = {one["system"]: one for one in totals([row for row in mine if row["turn"] in shared], outputs)}
        others = [one for name, one in table.items() if not name.startswith("ours")]
        for ours in (one for name, one in table.items() if name.startswith("ours") and others):
            best = max(others, key=lambda one: one["output_tok_s"])
            entry = {"conversations": count, "turns": len(shared), "best_other": best["system"]}
            if ours["system"] != "ours":
                entry["system"] = ours["system"]
            entry["throughput_over_best_other"] = round(ours["output_tok_s"] / best["output_tok_s"], 3)
            if ours["ttft_s_later"]:
                entry["ttft_over_ours"] = {
                    one["system"]: round(one["ttft_s_later"] / ours["ttft_s_later"], 2) for one in others
                }
            entries.append(entry)
    return entries
