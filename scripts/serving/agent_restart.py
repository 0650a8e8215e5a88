"""Conversations that go on after the server was started again: what the storage below the host tier gives back.

`bench_agent --restart` calls it. Plain SGLang plays the same turns without an interruption and gives the expected tokens. It
owns the folder that stands for the storage; it writes no result file.
"""

import dataclasses
import pathlib
import shutil
import time
from typing import Any

from serving import agent
from serving.agent import PAGE_TOKENS, Conversation, Shape
from serving.fleet import Member, fleet
from serving.server import Paths, Server

COUNTERS_SECONDS = 2.5
FOLDER_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@dataclasses.dataclass(frozen=True, slots=True)
class Restart:
    """count conversations, played until turn `before`, then on after the restart. settle_s: time to publish."""

    count: int
    before: int
    shape: Shape
    seed: int
    settle_s: float
    timeout_s: float

    def conversations(self) -> list[Conversation]:
        """The same ones on every call."""
        return agent.conversations(self.count, self.shape, f"{self.seed}/restart")

    def play(self, server: Server, group: list[Conversation], turns: int) -> list[dict[str, Any]]:
        """The next `turns` turns, all conversations at once; a row each."""
        rows = []
        for _ in range(turns):
            number = len(group[0].answers) + 1
            prompts = sum(len(one.history) + len(one.additions[number - 1]) for one in group)
            turn = agent.play_turn(server.url, group, self.shape.output, self.count, self.timeout_s)
            row = {"conversations": self.count, "turn": number, "ttft_s": round(turn.ttft_s, 4)}
            rows.append(row | {"prompt_tokens": prompts, "prefilled_tokens": turn.prefilled_tokens})
        return rows

    @property
    def most_prefilled(self) -> int:
        """Tokens that a turn may prefill when everything before is found: what it adds, the last answer's last token, which
        nobody computed, and the tail of a page in front of it."""
        return self.count * (self.shape.later + 1 + PAGE_TOKENS - 1)


def with_storage(member: Member, config: dict[str, Any], folder: pathlib.Path) -> Member:
    """The member with these config keys, its storage in `folder`."""
    spec = member.spec
    spec = dataclasses.replace(spec, config=spec.config | config, env=spec.env | {FOLDER_VARIABLE: str(folder)})
    return dataclasses.replace(member, spec=spec)


def run(
    plan: Restart, ours: Member, plain: Member, config: dict[str, Any], paths: Paths, port: int, start_s: float
) -> dict[str, Any]:
    """The experiment: turns before and after the restart, and how many answers are plain SGLang's.

    Raises ServerError when a server does not start, ValueError when a request failed.
    """
    folder = paths.logs.resolve() / "storage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stored = with_storage(ours, config, folder)
    expected, group = plan.conversations(), plan.conversations()
    with fleet({"ours": stored, "plain": plain}, paths, port, start_s, complete=True) as servers:
        plan.play(servers["plain"], expected, plan.shape.turns)
        rows = plan.play(servers["ours"], group, plan.before)
        time.sleep(plan.settle_s)
        first = servers["ours"].counters()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    again = dataclasses.replace(stored, spec=dataclasses.replace(stored.spec, name=f"{stored.spec.name}-again"))
    with fleet({"ours": again}, paths, port + 50, start_s, complete=True) as servers:
        after = plan.play(servers["ours"], group, plan.shape.turns - plan.before)
        time.sleep(COUNTERS_SECONDS)
        second = servers["ours"].counters()
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "config": config,
        "turns_before": rows,
        "turns_after": after,
        "stored_bytes": size,
        "most_prefilled_if_found": plan.most_prefilled,
        "found": after[0]["prefilled_tokens"] <= plan.most_prefilled,
        "agreement_with_plain": agent.agreement(group, expected),
        "counters": {"first": first, "second": second},
    }
