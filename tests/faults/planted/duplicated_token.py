"""The tokenizer, but after a loss its ledger has forgotten the last token that each client was sent."""

from tokenizer_proc.handover import Handover
from tokenizer_proc.ledger import Entry
from tokenizer_proc.tokenizer import cli

again = Handover.again


def forget(self: Handover, entry: Entry) -> None:
    for choice in entry.choices:
        del choice.emitted[-1:]
    again(self, entry)


if __name__ == "__main__":
    Handover.again = forget  # type: ignore[method-assign]
    cli()
