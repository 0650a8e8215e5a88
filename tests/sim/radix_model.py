"""The radix tree of the simulator: whole pages, one node a page, leaf-first eviction, locks along a path.

Tokens are unique to their prefix (options: families of prompts), so the last token of a page names the whole path.
"""

from __future__ import annotations

from collections.abc import Sequence


class Node:
    """One cached page."""

    __slots__ = ("children", "key", "locks", "page", "parent")

    def __init__(self, key: int, page: int, parent: Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children = 0
        self.locks = 0


class RadixModel:
    """Maps token prefixes to logical pages; the caller frees what `evict` returns."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.nodes: dict[int, Node] = {}  # least recently used first

    def match(self, tokens: Sequence[int], max_pages: int) -> list[Node]:
        """The longest cached prefix, at most `max_pages` pages."""
        path: list[Node] = []
        for index in range(max_pages):
            node = self.nodes.get(tokens[(index + 1) * self.page_size - 1])
            if node is None:
                break
            path.append(node)
        for node in reversed(path):
            self.nodes[node.key] = self.nodes.pop(node.key)
        return path

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_pages: int) -> list[Node]:
        """Cache the first `num_pages` pages; returns the path, whose pages are the tree's own where it had them
        already."""
        path = self.match(tokens, num_pages)
        for index in range(len(path), num_pages):
            parent = path[-1] if path else None
            node = Node(tokens[(index + 1) * self.page_size - 1], pages[index], parent)
            if parent is not None:
                parent.children += 1
            self.nodes[node.key] = node
            path.append(node)
        return path

    @staticmethod
    def lock(path: Sequence[Node], sign: int) -> None:
        for node in path:
            node.locks += sign

    def evict(self, num_pages: int) -> list[int]:
        """Drop up to `num_pages` unlocked leaves, least recently used first; returns their pages."""
        evicted: list[int] = []
        progress = True
        while len(evicted) < num_pages and progress:
            progress = False
            for node in list(self.nodes.values()):
                if node.locks or node.children:
                    continue
                del self.nodes[node.key]
                if node.parent is not None:
                    node.parent.children -= 1
                evicted.append(node.page)
                progress = True
                if len(evicted) == num_pages:
                    break
        return evicted
