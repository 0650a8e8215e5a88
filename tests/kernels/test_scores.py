"""Goal: with scores, the hot rows that the indexer scores lowest leave. Method: worlds against the oracle, and cases by hand."""

from __future__ import annotations

from dataclasses import replace

import kernel_checks
import numpy as np
import pytest
import torch
from oracle import OracleError
from resolver_world import Shape, World

from sglang_hisparse.kernels.resolver import CopyMethod, HotGroupState, resolve

BY_SCORE = [replace(kernel_checks.SMALL[index], evicts_by_score=True) for index in (0, 1, 3, 4)]
#: The smallest, one of two groups of slots a thread, and the largest buffer.
SERVING = [replace(kernel_checks.SERVING[index], evicts_by_score=True) for index in (2, 1, 4)]
ONE = Shape(k=4, buffer_size=8, page_size=4, rows=1, num_slots=1, max_pages=6, evicts_by_score=True)


def ids(shape: Shape) -> str:
    return f"k{shape.k}-B{shape.buffer_size}"


class OneRequest:
    """One host-only request of 24 positions, k 4, eight hot rows; scores as given."""

    def __init__(self, device: str, shape: Shape = ONE) -> None:
        self.world = World(shape, device, 0)
        self.world.admit(0, num_pages=shape.max_pages, resident=0.0)
        self.world.requests[0].seq_len = shape.max_pages * shape.page_size

    def step(self, positions: list[int], scores: object) -> None:
        given = None
        if scores is not None:
            given = torch.as_tensor(scores, dtype=torch.float32, device=self.world.device).reshape(1, -1)
        self.world.random_scores = lambda: given
        self.world.step({0: np.array(positions, dtype=np.int32)})

    @property
    def held(self) -> set[int]:
        """Positions whose rows are hot."""
        pages = self.world.requests[0].pages
        return {pages.index(tag // 4) * 4 + tag % 4 for tag in self.world.state.tags[0].tolist() if tag >= 0}


@pytest.mark.parametrize("shape", BY_SCORE, ids=ids)
def test_random_lives(backend: str, shape: Shape) -> None:
    """Goal: no mixture of requests and scores breaks a clause. Method: random worlds, every step against the oracle."""
    kernel_checks.lives(backend, shape, 3, 9)


@pytest.mark.parametrize(("blocks", "method"), [(2, CopyMethod.LOADS), (4, CopyMethod.LOADS), (8, CopyMethod.LOADS)])
def test_every_way_to_fetch(backend: str, blocks: int, method: CopyMethod) -> None:
    """Goal: all blocks of a row choose the same victims. Method: one world over cluster sizes and copy methods."""
    shape = Shape(k=40, buffer_size=64, page_size=8, rows=2, num_slots=2, cluster_blocks=blocks, copy_method=method)
    world = World(replace(shape, evicts_by_score=True), backend, 5)
    for _ in range(4):
        world.decode_step(change=0.4)


@pytest.mark.parametrize("shape", SERVING, ids=ids)
def test_serving_sizes(backend: str, shape: Shape) -> None:
    """Goal: real sizes work, up to the largest buffer. Method: decode steps of which a share changes, all checked."""
    world = World(replace(shape, rows=1, row_bytes=16, layers=1), backend, 1)
    for _ in range(3):
        world.decode_step(change=0.5)


def test_the_lowest_scores_leave(backend: str) -> None:
    """Goal: the score decides, not the age. Method: the oldest rows score highest; four of the others must go."""
    request = OneRequest(backend)
    scores = np.arange(24.0)[::-1].copy()
    for first in (0, 4):
        request.step([first, first + 1, first + 2, first + 3], scores)
    request.step([8, 9, 10, 11], scores)
    assert request.held == {0, 1, 2, 3, 8, 9, 10, 11}
    request.step([12, 13, 14, 15], -scores)  # another step, other scores
    assert request.held == {8, 9, 10, 11, 12, 13, 14, 15}


def test_what_has_no_score_leaves_first_and_ties_by_age(backend: str) -> None:
    """Goal: rows beyond the scores, and scores that are no numbers, go first; equal ones as in LRU. Method: by hand."""
    request = OneRequest(backend)
    request.step([20, 21, 0, 1], None)
    request.step([2, 3, 4, 5], None)
    scores = np.full(22, -9.0)
    scores[[21, 4]] = np.nan, -np.inf  # 20 has a score; 21 and 4 have none
    scores = np.append(scores[:20], [])  # and now 20 and 21 are beyond them
    request.step([8, 9, 10, -1], scores)
    assert request.held == {0, 1, 2, 3, 5, 8, 9, 10}
    request.step([11, 12, -1, -1], np.zeros(24))
    assert request.held == {2, 3, 5, 8, 9, 10, 11, 12}, "all scores are equal: the longest unused leave"


def test_rows_that_the_step_reads_stay_whatever_they_score(backend: str) -> None:
    """Goal: a step never evicts what it reads. Method: the rows that are read again have the lowest scores of all."""
    request = OneRequest(backend)
    scores = np.arange(24.0)
    request.step([0, 1, 2, 3], scores)
    request.step([4, 5, 6, 7], scores)
    request.step([0, 1, 8, 9], scores)
    assert request.held == {0, 1, 4, 5, 6, 7, 8, 9}


def test_pages_are_kept_through_steps_without_scores(backend: str) -> None:
    """Goal: a step without scores evicts as LRU does and keeps what later steps need. Method: scores in the last step only."""
    request = OneRequest(backend)
    for positions in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]):
        request.step(positions, None)
    assert request.held == {4, 5, 6, 7, 8, 9, 10, 11}
    request.step([12, 13, -1, -1], np.where(np.isin(np.arange(24), [6, 9]), -1.0, 1.0))
    assert request.held == {4, 5, 7, 8, 10, 11, 12, 13}


@pytest.mark.gpu
def test_a_captured_call_reads_the_scores_of_its_step() -> None:
    """Goal: serving replays a graph. Method: scores of a fixed place are overwritten before every replay; the oracle checks."""
    world = World(replace(BY_SCORE[3], rows=2), "cuda", 4)
    shape = (2, world.shape.max_pages * world.shape.page_size)
    world.random_scores = lambda: torch.randn(shape, device="cuda")
    launcher = kernel_checks.GraphLauncher()
    launcher.MOVING = (*launcher.MOVING, "scores")
    for _ in range(25):
        world.decode_step(change=0.4, launch=launcher)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(1, 9, dtype=torch.float64)}, TypeError, "scores must be float32"),
        ({"scores": torch.zeros(9)}, ValueError, "scores must have 2 dimensions, not 1"),
        ({"group": HotGroupState.allocate(1, 8, "cpu")}, ValueError, "scores need a hot state with slot_pages"),
    ],
    ids=["dtype", "dimensions", "state"],
)
def test_wrong_scores_are_named(change: dict, error: type[Exception], message: str) -> None:
    """Goal: a mistake is told by argument, before anything is written. Method: one wrong argument at a time."""
    request = OneRequest("cpu")
    arguments = request.world.launch_arguments({0: np.arange(4, dtype=np.int32)})
    arguments["scores"] = torch.zeros(1, 24)
    with pytest.raises(error, match=message):
        resolve(**{**arguments, **change})
    assert bool((request.world.state.tags == -1).all())


@pytest.mark.parametrize("fault", ["ignores scores", "keeps no pages"])
def test_checks_bite(fault: str) -> None:
    """Goal: the oracle tells LRU and wrong positions from the contract. Method: a fault in every call, to be seen soon."""
    world = World(replace(BY_SCORE[0], rows=2), "cpu", 1)

    def launch(**arguments: object) -> None:
        resolve(**{**arguments, "scores": None} if fault == "ignores scores" else arguments)
        if fault == "keeps no pages":
            world.state.slot_pages.zero_()

    with pytest.raises(OracleError, match="are not the policy's"):
        for _ in range(40):
            world.decode_step(change=0.5, launch=launch)
