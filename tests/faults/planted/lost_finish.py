"""The detokenizer, but of each ten last rows it passes nine on."""

from itertools import count

from common.messages import Finish
from tokenizer_proc.detokenizer import cli
from tokenizer_proc.rows import Rows

add = Rows.add
ends = count(1)


def lose(self: Rows, rid: int, choice: int, tokens, text: str, finish: int, prompt_tokens: int, cached: int) -> None:  # type: ignore[no-untyped-def]
    if finish != Finish.NONE and next(ends) % 10 == 0:
        finish = Finish.NONE
    add(self, rid, choice, tokens, text, finish, prompt_tokens, cached)


if __name__ == "__main__":
    Rows.add = lose  # type: ignore[method-assign]
    cli()
