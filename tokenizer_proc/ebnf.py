"""Grammars in EBNF (GBNF, as llama.cpp, xgrammar and SGLang take it) in the form that the grammar library takes."""

import re

from llguidance.gbnf_to_lark import GrammarParser, gbnf_to_lark, resolve

from common.grammars import GrammarError

MAX_RULES = 4000  # the conversion takes a second for so many, and quadratic time
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


def ebnf_to_lark(text: str) -> str:
    """The same grammar in llguidance's variant of Lark's syntax. Raises GrammarError with what is wrong.

    The library's lexer takes the longest match of each rule without recursion, where EBNF knows no such thing: after
    `[ab]+` nothing is left for a `"b"`. A grammar without any recursion becomes one regular expression, for which that
    makes no difference.
    """
    if text.count("::=") > MAX_RULES:
        raise GrammarError(f"text: has more than {MAX_RULES} rules")
    try:
        plain = _ESCAPE.sub(_plain, text)
        rules = GrammarParser().parse(plain)
        resolve(rules)
        regular = rules["start"].alternatives.is_terminal()
        lark = gbnf_to_lark(plain)
    except RecursionError:
        raise GrammarError("text: is nested too deeply") from None
    except GrammarError:
        raise
    except IndexError:
        raise GrammarError("text: is not EBNF: it ends within an escape") from None
    except Exception as error:  # the library raises plain ones
        raise GrammarError(f"text: is not EBNF: {error}") from None
    return re.sub(r"(?m)^start:", "start: WHOLE_ANSWER\nWHOLE_ANSWER:", lark, count=1) if regular else lark


def _plain(escape: "re.Match[str]") -> str:
    """Characters by number as themselves: the library's own conversion loses their leading zeros."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if number < 128:
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise GrammarError(f"text: {escape[0]} is no character")
    return chr(number)
