"""The tokenizer, but after a loss its ledger has forgotten the last token that each client was sent."""

from common.fields import IntArray
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.ledger import Choice
from tokenizer_proc.tokenizer import cli

submit = Frontend._submit


def forget(self: Frontend, choice: Choice, prompt: IntArray, left_ms: int, *, again: bool = False) -> None:
    if again:
        del choice.emitted[-1:]
    submit(self, choice, prompt, left_ms, again=again)


if __name__ == "__main__":
    Frontend._submit = forget  # type: ignore[method-assign]
    cli()
