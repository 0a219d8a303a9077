"""Stop strings in a text that arrives in pieces.

The matcher is the automaton of Aho and Corasick ("Efficient string matching", 1975): its state is the
longest end of the text that begins some stop string, which is exactly the text that must not be shown yet.
Each character is looked at once, whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """Several stop strings compiled into one automaton. Immutable: choices of a request share it."""

    __slots__ = ("children", "fallbacks", "first_characters", "held_lens", "matches")

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: not empty, each with text.

        Node 0 stands for no beginning. children[node][character]: the node of a beginning longer by one.
        fallbacks[node]: node of the next shorter beginning that also ends here. held_lens[node]: characters
        of the beginning. matches[node]: the longest stop string that ends here.
        """
        self.children: list[dict[str, int]] = [{}]
        self.held_lens = [0]
        self.matches: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self.fallbacks = self._link()
        self.first_characters = frozenset(self.children[0])

    def step(self, node: int, character: str) -> int:
        """The node after one more character."""
        children, fallbacks = self.children, self.fallbacks
        while (following := children[node].get(character)) is None:
            if node == 0:
                return 0
            node = fallbacks[node]
        return following

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self.children[node]:
                self.children[node][character] = len(self.children)
                self.children.append({})
                self.held_lens.append(self.held_lens[node] + 1)
                self.matches.append(None)
            node = self.children[node][character]
        self.matches[node] = stop

    def _link(self) -> list[int]:
        """Breadth first, so that the shorter beginnings are linked before the longer ones need them."""
        fallbacks = [0] * len(self.children)
        self.fallbacks = fallbacks
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                fallbacks[child] = self.step(fallbacks[node], character)
                if self.matches[child] is None:
                    self.matches[child] = self.matches[fallbacks[child]]
                queue.append(child)
        return fallbacks


class StopMatcher:
    """Follows one text, releases what cannot become a stop string any more, and ends at the first match.

    The match that ends first wins; of several that end at the same character, the longest, so that no part
    of a stop string is ever released. include: release the stop string too.
    matched: the stop string found, None so far.
    """

    __slots__ = ("_held", "_include", "_node", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._node = 0
        self._held = ""

    def add(self, text: str, *, armed: bool = True) -> str:
        """Take more text and return the text to show. After a match nothing more is.

        armed: whether a stop string that ends in this text counts.
        """
        if self.matched is not None:
            return ""
        stops, node = self._stops, self._node
        if node == 0 and stops.first_characters.isdisjoint(text):
            return text
        for place, character in enumerate(text, start=1):
            node = stops.step(node, character)
            if armed and (match := stops.matches[node]) is not None:
                self.matched = match
                seen = self._held + text[:place]
                self._held = ""
                return seen if self._include else seen[: -len(match)]
        self._node = node
        seen = self._held + text
        num_shown = len(seen) - stops.held_lens[node]
        self._held = seen[num_shown:]
        return seen[:num_shown]

    def flush(self) -> str:
        """The text still held back: the sequence has ended without a match."""
        held, self._held = self._held, ""
        self._node = 0
        return held
