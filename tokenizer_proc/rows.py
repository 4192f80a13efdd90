"""The columns of a TextBatch while it is put together."""

from array import array
from dataclasses import dataclass, field

from common.fields import IntArray
from common.messages import TextBatch


def _column() -> IntArray:
    return array("i")


@dataclass(slots=True)
class Rows:
    rids: IntArray = field(default_factory=_column)
    choices: IntArray = field(default_factory=_column)
    counts: IntArray = field(default_factory=_column)
    token_ids: IntArray = field(default_factory=_column)
    texts: list[str] = field(default_factory=list)
    finish: bytearray = field(default_factory=bytearray)
    prompt_tokens: IntArray = field(default_factory=_column)
    cached: IntArray = field(default_factory=_column)

    def add(
        self, rid: int, choice: int, tokens: IntArray, text: str, finish: int, prompt_tokens: int, cached: int
    ) -> None:
        self.rids.append(rid)
        self.choices.append(choice)
        self.counts.append(len(tokens))
        self.token_ids.extend(tokens)
        self.texts.append(text)
        self.finish.append(finish)
        self.prompt_tokens.append(prompt_tokens)
        self.cached.append(cached)

    def batch(self, times: IntArray) -> TextBatch:
        return TextBatch(
            self.rids,
            self.choices,
            self.counts,
            self.token_ids,
            tuple(self.texts),
            bytes(self.finish),
            self.prompt_tokens,
            self.cached,
            times,
        )
