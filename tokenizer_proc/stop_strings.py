"""Stop strings in a stream of text: found across deltas, held back, and shown only where that is asked for."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    The match that ends first wins, and of those the one that starts first (the longest), so the result does not depend
    on how the text is cut. Text that can still become a stop string is held; everything before it is shown at once.
    With `shows_stop` the stop string is shown, too, so that nothing is held.
    The method is Knuth, Morris and Pratt's, one automaton per stop string: linear in the text.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False):
        self._shows_stop = shows_stop
        self._stops = [(stop, _prefix_function(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text so far ends with
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text to show, and the stop string that was found, if any: then what follows it is dropped, and there
        must be no further call.

        Without `may_stop` a stop string that ends in this text is text like any other.
        """
        if not self._stops:
            return text, None
        seen = self._held + text
        if not any(self._matched) and not any(stop[0] in text for stop, _ in self._stops):  # the usual case
            return text, None
        for end, char in enumerate(text, len(self._held) + 1):
            found = self._advance(char, may_stop)
            if found is not None:
                return seen[: end if self._shows_stop else end - len(found)], found
        if self._shows_stop:
            return text, None
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """The held text, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str, may_stop: bool) -> str | None:
        """Take one character; the longest stop string that ends with it."""
        longest: str | None = None
        for i, (stop, back) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = back[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if may_stop and (longest is None or len(stop) > len(longest)):
                    longest = stop
                matched = back[-1]  # from where the search goes on
            self._matched[i] = matched
        return longest


def _prefix_function(stop: str) -> list[int]:
    """For each position the length of the longest proper prefix of `stop` that also ends there."""
    back = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = back[length - 1]
        if stop[i] == stop[length]:
            length += 1
        back[i] = length
    return back
