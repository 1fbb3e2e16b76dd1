"""Stop strings in streaming text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that is complete soonest; of several complete at the same character, the
    longest. The answer does not depend on how the text is cut into pieces. Text that may be the
    beginning of a stop string is held back until it is known not to be.

    Args:
        stops: strings to stop at, none empty.
        include_stop: let the stop string itself out as well.

    Attributes:
        matched: the stop string found, or None.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), "a stop string is empty"
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, new_text: str) -> tuple[str, str | None]:
        """Take in more text.

        Returns:
            text safe to let out, and the stop string found, if any. After a match: "" and it.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._automata:
            return new_text, None
        text = self._held + new_text
        for position, char in enumerate(new_text, start=len(self._held) + 1):
            found = [automaton.stop for automaton in self._automata if automaton.step(char)]
            if found:
                stop = self.matched = max(found, key=len)
                self._held = ""
                return text[: position if self._include_stop else position - len(stop)], stop
        num_held = max(automaton.num_matched for automaton in self._automata)
        safe, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return safe, None

    def flush(self) -> str:
        """What is held back, once no more text comes."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.num_matched = 0
        return held


class _Automaton:
    """Knuth-Morris-Pratt: how much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = [0] * len(stop)
        for index in range(1, len(stop)):
            self._shorter[index] = self._extend(self._shorter[index - 1], stop[index])

    def step(self, char: str) -> bool:
        """Take in a character; whether the stop string is now complete."""
        self.num_matched = self._extend(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _extend(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + 1 if self.stop[num_matched] == char else num_matched
