"""Goal: the checkers bite. Method: plant one protocol bug at a time; the simulator must see it within a few thousand
schedules.

I1 to I7 and the review's rules have planted bugs in mutations.py. I8 (what validation accepts, admission admits) is
checked here on the policy alone, and against SGLang's admission in tests/memory. I9 (every output entry of the
resolver is written) belongs to the resolver: its contract tests poison the output before each call.
"""

from __future__ import annotations

import pytest
from residency.stage import Stage

from sglang_hisparse.residency import SpillPolicy
from sim.border_mutations import BORDER_MUTATIONS
from sim.mutations import MUTATIONS, Mutation, hunt
from sim.sharing_mutations import SHARING_MUTATIONS

SEED = 40_000
LIMIT = 8_000
PLANTED = (*MUTATIONS, *BORDER_MUTATIONS, *SHARING_MUTATIONS)


@pytest.mark.parametrize("mutation", PLANTED, ids=[mutation.name for mutation in PLANTED])
def test_planted_bug_is_caught(mutation: Mutation) -> None:
    """Goal: the simulator sees this bug. Method: run schedules with it until one fails."""
    assert hunt(mutation, SEED, LIMIT) is not None, f"{mutation.name} survived {LIMIT} schedules"


@pytest.mark.parametrize(
    "invariant",
    ["I1", "I2", "I3", "I4", "I5", "I6", "I7", "I10", "R4", "R5", "R7", "R9", "R12", "R19", "R20", "R22", "R30"],
)
def test_every_rule_has_a_planted_bug(invariant: str) -> None:
    """Goal: no rule is without a test of its test. Method: look through the table."""
    assert any(mutation.breaks == invariant for mutation in PLANTED)


def admits_all(policy: type[SpillPolicy], device: int) -> bool:
    """Whether every prompt that fits the device is admitted by a system that holds cached pages only (I8)."""
    for num_pages in range(1, device + 1):
        stage = Stage(device=device, logical=3 * device)
        stage.policy = policy(stage.coordinator)
        stage.cache(1, device)
        if not stage.policy.make_room(num_pages):
            return False
    return True


class PolicyThatKeepsReserve(SpillPolicy):
    """Refuses to use the last page: validation and admission reserve different slack."""

    def make_room(self, num_pages: int) -> bool:
        return super().make_room(num_pages + 1)


def test_admission_without_slack() -> None:
    """Goal: I8, and that its check bites. Method: all sizes in a full cache, with the policy and with one that keeps
    a page."""
    assert admits_all(SpillPolicy, 6)
    assert not admits_all(PolicyThatKeepsReserve, 6)


def test_shortage_is_no_exception() -> None:
    """Goal: I7, and that its check bites. Method: a policy that raises where it should refuse must end a schedule."""

    class PolicyThatRaises(SpillPolicy):
        def make_room(self, num_pages: int) -> bool:
            if not super().make_room(num_pages):
                raise RuntimeError("out of device pages")
            return True

    from sim.ranks import Parts

    found = hunt(Mutation("raises on shortage", "I7", Parts(policy=PolicyThatRaises)), SEED, LIMIT)
    assert found is not None and found[1] == "I7"
