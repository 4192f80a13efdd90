"""Whether the model thinks is known from what its chat template makes of a conversation."""

import json
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.logprobs import LogprobRows, Logprobs
from common.messages import Generate, Tokenize, ints
from tests.helpers_templates import QWEN3
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import World, answering, events, play, words

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
ASSISTANT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
TEMPLATES = {
    "off by default": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + ASSISTANT
    + "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}{% endif %}",
    "two ends": ASSISTANT + "{% if enable_thinking is defined and enable_thinking is true %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "by effort": ASSISTANT + "{% if reasoning_effort != 'none' %}<think>{% else %}</think>{% endif %}{% endif %}",
    "always": ASSISTANT + "<think>\n{% endif %}",
    "qwen": QWEN3,
}  # fmt: skip
SILENT: dict[str, Any] = {}
THINKING, ENABLED = ({"chat_template_kwargs": {name: True}} for name in ("thinking", "enable_thinking"))
QUIET, DISABLED = ({"chat_template_kwargs": {name: False}} for name in ("thinking", "enable_thinking"))
NO_EFFORT = {"reasoning_effort": "none"}
OPENED, CLOSED, TAGS = ("", "</think>"), ("", ""), ("<think>", "</think>")  # around what a grammar holds for


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("off by default", SILENT, CLOSED), ("off by default", QUIET, CLOSED), ("off by default", NO_EFFORT, CLOSED),
        ("off by default", THINKING, OPENED),
        ("two ends", SILENT, CLOSED), ("two ends", DISABLED, CLOSED), ("two ends", ENABLED, OPENED),
        ("by effort", SILENT, OPENED), ("by effort", NO_EFFORT, CLOSED),
        ("by effort", {"reasoning_effort": "low"}, OPENED), ("always", SILENT, OPENED),
        ("qwen", SILENT, TAGS), ("qwen", ENABLED, TAGS), ("qwen", DISABLED, CLOSED), ("qwen", NO_EFFORT, CLOSED),
    ],
)  # fmt: skip
def test_answers_are_read_as_the_prompt_ends(
    short_dir: Path, template: str, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    text = {OPENED: "a</think>b", CLOSED: "b", TAGS: "<think>a</think>b"}[expected]

    async def test(world: World) -> None:
        body = CHAT | fields | {"response_format": {"type": "json_object"}}
        message = (await world.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("b", None if expected == CLOSED else "a")
        grammar = (await world.generated()).params.grammar
        assert grammar is not None and (grammar.opening, grammar.closing) == expected
        deltas = [
            e["choices"][0]["delta"] for e in events(await world.post("/v1/chat/completions", body | {"stream": True}))
        ]
        assert "".join(d.get("content", "") for d in deltas) == "b"

    play(short_dir, answering(words(text), replace(INFO, chat_template=TEMPLATES[template])), test)


def test_the_template_is_asked_once_for_each_set_of_arguments(short_dir: Path) -> None:
    info = replace(INFO, chat_template=TEMPLATES["off by default"])
    asked: list[str] = []

    def answer(msg: Any) -> Any:
        if isinstance(msg, Tokenize):
            asked.append(msg.template_args)
        return answering(words("b"), info)(msg)

    async def test(world: World) -> None:
        for _ in range(2):
            for fields in (SILENT, QUIET, {"chat_template_kwargs": {"other": 1}}):
                await world.post("/v1/chat/completions", CHAT | fields)
            assert (await world.post("/v1/responses", {"input": "x"})).json()["output"][0]["content"][0]["text"] == "b"
        assert [json.loads(args) for args in asked] == [{"thinking": False}, {"other": 1}], (
            "the cluster says the plain one"
        )

    play(short_dir, answer, test)


def test_a_message_that_goes_on_has_no_opened_tag(short_dir: Path) -> None:
    async def test(world: World) -> None:
        body = CHAT | {"add_generation_prompt": False, "response_format": {"type": "json_object"}}
        message = (await world.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        assert message["content"] == "b" and "reasoning_content" not in message

    play(short_dir, answering(words("b"), replace(INFO, chat_template=TEMPLATES["always"])), test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_hidden_reasoning_shows_in_no_tokens(short_dir: Path, stream: bool, hidden: bool) -> None:
    """Neither as ids nor as log probabilities."""
    texts = ("<think>", "secret", " plan", "</think>", "b", "c")

    def generate(msg: Generate) -> Iterable[Any]:
        for i, batch in enumerate(words(*texts)(msg)):
            scores = Logprobs(ints(20 + i), array("f", [-0.5]), ints(1), ints(0), ints(), array("f"))
            yield replace(batch, logprobs=LogprobRows.of({0: scores}), token_bytes={20 + i: texts[i].encode()})

    async def test(world: World) -> None:
        body = CHAT | {"logprobs": True, "return_token_ids": True, "include_reasoning": not hidden, "stream": stream}
        response = await world.post("/v1/chat/completions", body)
        choices = [e["choices"][0] for e in (events(response) if stream else [response.json()])]
        tokens = [e["token"] for c in choices for e in (c["logprobs"] or {"content": ()})["content"]]
        ids = [token for c in choices for token in c.get("token_ids", ())]
        assert tokens[-2:] == ["b", "c"] and ids[-2:] == [24, 25]
        assert (tokens, ids) == (list(texts), list(range(20, 26))) or hidden
        assert not hidden or not {"secret", " plan"} & set(tokens) | {21, 22} & set(ids)

    play(short_dir, answering(generate, replace(INFO, chat_template=QWEN3)), test)
