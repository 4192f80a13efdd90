"""Guesses at a request's next tokens from its own prompt and output: what followed the last time the same words came.

Prompt lookup decoding (Saxena, 2023), which vLLM calls its n-gram proposer. The search is that of deflate (RFC 1951):
hash chains over the shortest n-gram, the latest occurrence first, the longest match wins. As in LZ77 a guess may run
into itself, so that a loop of any period is guessed to its end.
"""

from array import array

from common.fields import IntArray

CHAIN = 16  # earlier occurrences looked at, which bounds a search
AT_ONCE = 4096  # tokens indexed by one call, which bounds the time that a long prompt takes from a step
PATIENCE, SELDOM = 32, 4  # after so many searches in vain only every fourth token is worth one
_FEWEST = 256  # entries of the smallest table


class PromptLookup:
    """Follows the tokens of one request, an array that its owner appends to; calls `took` after each token.

    `at` is the position of the token that is guessed to come next, -1 where there is no guess, and `length` how many
    tokens before it equal the newest ones: at least `shortest`; a search tells lengths up to `longest` apart.
    """

    def __init__(self, tokens: IntArray, shortest: int, longest: int):
        self.at = -1
        self.length = 0
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        size = _FEWEST
        while size < 2 * len(tokens):
            size *= 2
        self._heads = array("i", bytes(4 * size))  # by hash of an n-gram: where it ended last, 0 for nowhere
        self._links = array("i", bytes(4 * shortest))  # by the end of an n-gram: where one with its hash ended before
        self._vain = 0  # searches in a row that found nothing
        self._next = shortest  # the end of the first n-gram that is not in the table

    def took(self) -> bool | None:
        """A token was appended. Whether it was the one guessed, None where nothing was."""
        right = None
        if self.at >= 0:
            right = self._tokens[self.at] == self._tokens[-1]
            if right:
                self.at += 1
                self.length += 1
                return True
            self._vain = 0
        if self._vain < PATIENCE or len(self._tokens) % SELDOM == 0:
            self.search()
            self._vain = 0 if self.at >= 0 else self._vain + 1
        return right

    def search(self) -> None:
        """Look for the newest tokens among those before them. There is no guess while some are not indexed yet."""
        self.at, self.length = -1, 0
        tokens, end = self._tokens, len(self._tokens)
        if not self.index():
            return
        found = self._heads[hash(tuple(tokens[end - self._shortest :])) & (len(self._heads) - 1)]
        for _ in range(CHAIN):
            if not found:
                break
            length, most = 0, min(self._longest, found)
            while length < most and tokens[found - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length >= self._shortest and length > self.length:
                self.at, self.length = found, length
                if length == self._longest:
                    break
            found = self._links[found]

    def guesses(self, count: int) -> IntArray:
        """The `count` tokens that are guessed to come next. There must be a guess."""
        begin, period = self.at, len(self._tokens) - self.at
        if count <= period:
            return self._tokens[begin : begin + count]
        return (self._tokens[begin:] * -(-count // period))[:count]

    def index(self, most: int = AT_ONCE) -> bool:
        """Enter up to `most` n-grams that something follows; whether all of them are in the table now. A table that is
        full is begun anew, twice as large."""
        stop = len(self._tokens)
        if stop > len(self._heads):
            self._heads = array("i", bytes(8 * len(self._heads)))
            self._next = self._shortest
            del self._links[self._shortest :]
        self._enter(min(stop, self._next + most))
        return self._next >= stop

    def _enter(self, stop: int) -> None:
        """The n-grams that end before `stop`."""
        begin, n = self._next, self._shortest
        if begin >= stop:
            return
        heads, links, mask = self._heads, self._links, len(self._heads) - 1
        if stop == begin + 1:  # the usual case, without generators
            slot = hash(tuple(self._tokens[begin - n : begin])) & mask
            links.append(heads[slot])
            heads[slot] = begin
            self._next = stop
            return
        columns = (self._tokens[begin - n + i : stop - n + i] for i in range(n))
        for end, key in enumerate(map(hash, zip(*columns, strict=True)), begin):
            slot = key & mask
            links.append(heads[slot])
            heads[slot] = end
        self._next = stop
