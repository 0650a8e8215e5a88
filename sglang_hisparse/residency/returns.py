"""Whether prompts return to what the cache keeps: what the border between KV and index-K would gain by moving for it.

Told the pages of every prompt that arrives, as keys of all tokens up to the page's end; remembers as many of them as a border at its
end could keep, whether they are cached or not. So what it says does not depend on where the border stands, and a server that gives
cached prefixes up still sees that they would have been found. Prompts count when they arrive, not when they are admitted: what
waits says early that the cache will be pushed through, and that prompts have returned. No clock: everything is counted in pages of
prompts, which are the same on all ranks (R30).

    near   found again before as many other pages went by as half of the first place holds: cached wherever the border stands
    far    found again later: only a border that has moved keeps it
    new    never seen, or forgotten

The share of far ones among far and new is the prefill that moving saves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

RARE_SHARE = 1 / 16
"""Below this share of a window, prompts do not return: device pages given up for cached prefixes cost more than they save."""

WINDOW_SHARE = 7 / 8
"""Length of a window, of what the last place holds; answers, which are not counted, fill the rest. First turns of conversations may fill
all of it but RARE_SHARE, and are no evidence if the next turns follow."""

COMMON_SHARE = 1 / 4
"""So many far pages, of as many as the first place has, and prompts return after all."""


class PrefixReturns:
    """`are_rare`: the verdict; not before the first window has been judged."""

    def __init__(self, first_pages: int, last_pages: int) -> None:
        """Logical pages of a border's first place and of its last."""
        self._first_pages, self._last_pages = first_pages, last_pages
        self._touched: OrderedDict[int, int] = OrderedDict()  # key -> `_clock` when it was last seen, longest ago first
        self.restart()

    def restart(self) -> None:
        """After a flush: nothing is cached, and nothing known."""
        self._touched.clear()
        self._clock = 0  # pages that were not near
        self.are_rare = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._far = self._new = 0

    def note(self, keys: Iterable[int]) -> None:
        """A prompt has arrived whose whole pages have these keys, in order."""
        touched, near_pages = self._touched, self._first_pages // 2
        for key in keys:
            before = touched.pop(key, None)
            if before is None:
                self._new += 1
                self._clock += 1
            elif self._clock - before > near_pages:
                self._far += 1
                self._clock += 1
            touched[key] = self._clock
            if len(touched) > self._last_pages:
                touched.popitem(last=False)
        self._judge()

    def _judge(self) -> None:
        """Rare only after a window that pushes what was cached at its beginning out of the largest cache too; common again as soon as
        that is seen."""
        seen = self._far + self._new
        if self.are_rare and self._far >= COMMON_SHARE * self._first_pages:
            self._end_window(False)
        elif seen >= (self._first_pages if self.are_rare else WINDOW_SHARE * self._last_pages):
            self._end_window(self.are_rare or self._far < RARE_SHARE * seen)

    def _end_window(self, are_rare: bool) -> None:
        self.are_rare = are_rare
        self._begin_window()
