"""Schemas, and drawing answers under a grammar without a model."""

import json
from array import array
from typing import Any

import torch
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from common.messages import EnterGrammar
from common.sampling_params import Grammar
from tests.helpers_tokenizers import EOS, straddling
from tokenizer_proc.text_decoder import TextDecoders
from worker_proc.grammar_matcher import GrammarMatchers, make_vocabulary

PADDING = 13  # entries of the model's vocabulary that are no tokens


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return make_vocabulary(tokenizer, tokenizer.get_vocab_size() + PADDING, [EOS])


def make_matchers(tokenizer: Tokenizer | None = None) -> GrammarMatchers:
    tokenizer = tokenizer or straddling()
    return GrammarMatchers(lambda: vocabulary(tokenizer), tokenizer.get_vocab_size() + PADDING)


def enter(
    matchers: GrammarMatchers,
    slot: int,
    grammar: Grammar,
    generated: list[int] | None = None,
    *,
    ignore_eos: bool = False,
) -> None:
    matchers.enter([EnterGrammar(slot, grammar, ignore_eos, array("i", generated or []))])


def draw_step(matchers: GrammarMatchers, slots: list[int], logits: torch.Tensor) -> tuple[list[int], dict[int, str]]:
    """One step: a token per slot at temperature 1, and the problems by row."""
    masks = matchers.start(torch.tensor(slots))
    if masks is not None:
        matchers.apply(masks, logits)
    tokens = (
        torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(len(slots))).view(-1).tolist()
    )
    failures = matchers.advance(masks, tokens) if masks is not None else []
    return tokens, {failure.row: failure.problem for failure in failures}


def draw_answers(
    matchers: GrammarMatchers, slots: list[int], vocab: int, *, seed: int, most: int = 400, scale: float = 1.0
) -> dict[int, list[int]]:
    """The tokens of each slot's answer with its EOS, drawn together from random logits; at most `most` of them."""
    generator = torch.Generator().manual_seed(seed)
    answers: dict[int, list[int]] = {slot: [] for slot in slots}
    live = list(slots)
    for _ in range(most):
        logits = torch.randn(len(live), vocab, generator=generator) * scale
        tokens, problems = draw_step(matchers, live, logits)
        assert not problems, problems
        for slot, token in zip(live, tokens, strict=True):
            answers[slot].append(token)
        live = [slot for slot in live if answers[slot][-1] != EOS]
        if not live:
            break
    return answers


def text_of(tokens: list[int], tokenizer: Tokenizer | None = None) -> str:
    """What a client would see of an answer."""
    decoder = TextDecoders(tokenizer or straddling()).new(skip_special_tokens=True, continues=True)
    return "".join(decoder.push(token) for token in tokens if token != EOS) + decoder.flush()


def as_grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


_NAMES = st.sampled_from(["a", "b", "name", 'q"\\', "é🙂", "with space", "x/y", ""])
_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-50, 50), st.integers(0, 2000)),
    st.builds(lambda low: {"type": "number", "minimum": low, "maximum": low + 1, "multipleOf": 0.25},
              st.integers(-3, 3)),
    st.builds(lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
              st.integers(0, 4), st.integers(0, 6)),
    st.sampled_from([
        {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{1,3}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "ipv4"},
        {"enum": ["red", "gr\"een", 3, None, True, {"k": [1]}, "é🙂"]},
        {"const": {"fixed": ["a", 1.5, None]}},
        {"type": ["boolean", "null"]},
    ]),
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    objects = st.builds(
        lambda properties, keep: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:keep],
            "additionalProperties": False,
        },
        st.dictionaries(_NAMES, inner, max_size=4),
        st.integers(0, 4),
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    references = inner.map(lambda target: {"$defs": {"t": target}, "$ref": "#/$defs/t"})
    return st.one_of(arrays, tuples, objects, unions, references)


def _rooted(schema: Any) -> bool:
    """References stand at the root only, where their `#` is."""
    return "$ref" not in json.dumps(schema) or (
        isinstance(schema, dict) and "$ref" in schema and "$ref" not in json.dumps(schema["$defs"])
    )


SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=6).filter(_rooted)
