"""Where a streamed extend finds its pages, and how its requests are cut into windows that the scratch holds one after another.

Pure functions of the book, called by the coordinator after a plan was taken. A page that several requests of a window share is in
it once; one that requests of several windows share is in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_hisparse.errors import InvariantError
from sglang_hisparse.residency.page_book import PageBook
from sglang_hisparse.residency.types import PAD_PAGE, PageState, StreamPlan, StreamWindow

_HOST = int(PageState.HOST)


def plan_of(book: PageBook, slots: Sequence[int]) -> StreamPlan | None:
    """All pages of `slots`, None when every one of them is resident."""
    rows = [book.pages(slot) for slot in slots]
    if not any((book.state[row] == _HOST).any() for row in rows):
        return None
    return _located(book, np.unique(np.concatenate(rows)))


def _located(book: PageBook, pages: np.ndarray) -> StreamPlan:
    on_host = book.state[pages] == _HOST
    resident = pages[~on_host & (pages != PAD_PAGE)]
    return StreamPlan(pages[on_host], resident, book.device_page[resident])


def windows_of(book: PageBook, slots: Sequence[int], new_tokens: Sequence[int], num_pages: int) -> list[StreamWindow]:
    """Requests in the order of the batch, as many to a window as have their pages in `num_pages`.

    new_tokens: of each request. Raises InvariantError when one with host-only pages does not fit by itself (I7).
    """
    groups: list[tuple[int, np.ndarray | None]] = []  # first request, pages; None: the request reads the pool
    for index, slot in enumerate(slots):
        row = book.pages(slot)
        row = np.unique(row[row != PAD_PAGE])
        if len(row) > num_pages:
            if (book.state[row] == _HOST).any():
                raise InvariantError(f"I7: request slot {slot} streams {len(row)} pages through a scratch of {num_pages}")
            groups.append((index, None))
            continue
        first, held = groups[-1] if groups else (index, None)
        if held is not None and len(both := np.union1d(held, row)) <= num_pages:
            groups[-1] = first, both
        else:
            groups.append((index, row))
    starts = [0, *np.cumsum(new_tokens).tolist()]
    edges = [*(first for first, _ in groups), len(slots)]
    return [
        StreamWindow(None if held is None else _located(book, held), starts[first], starts[edges[number + 1]])
        for number, (first, held) in enumerate(groups)
    ]
