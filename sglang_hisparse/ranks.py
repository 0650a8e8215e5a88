"""Which rank this is, and whether there are others: the questions that whoever decides, names files or logs must ask.

A group is None where SGLang has made none, which is one rank.
"""

from __future__ import annotations

import torch


def is_one_of_several(group: torch.distributed.ProcessGroup | None) -> bool:
    """Whether other ranks must decide as this one does (R30)."""
    return group is not None and torch.distributed.get_world_size(group=group) > 1


def is_first(group: torch.distributed.ProcessGroup | None) -> bool:
    """Whether this rank measures, records and logs for all of its group."""
    return group is None or torch.distributed.get_rank(group=group) == 0


def least_of_ranks(group: torch.distributed.ProcessGroup, value: int) -> int:
    """The least of a number over the ranks of a CPU group, each of which asks at the same point."""
    tensor = torch.tensor(value, dtype=torch.int64)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(tensor)
