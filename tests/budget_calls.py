"""How tests ask the budget about a request. Shared by memory/test_budget.py and memory/test_ledger.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from runtime_world import PAGE

from sglang_hisparse.memory.budget import HiSparsePrefillBudget


class Cached(list[int]):
    """A request as far as the budget looks at one: the pages that it finds in the cache. The end of its output is not known."""

    rid = "cached"
    output_ids: Sequence[int] = ()
    sampling_params = SimpleNamespace(max_new_tokens=1 << 20)


def checked(
    budget: HiSparsePrefillBudget, tokens: int, *, new: int = 64, total: int = PAGE, extend: int | None = None
) -> bool:
    """Whether the budget admits a request of `tokens` tokens, `extend` of them not cached, that costs `total` in SGLang's own
    ledger."""
    return budget.check_prefill(
        extend_input_len=tokens if extend is None else extend,
        total_tokens=total,
        max_new_tokens=new,
        input_tokens=tokens,
        swa_host_hit_length=0,
        chunk_limit=None,
    )[0]
