"""Chats with tools, calls, reasoning and template arguments: rendered as transformers does, and refused by name."""

import dataclasses
import json
import sys
from functools import cache
from typing import Any

import msgpack
import pytest

from common.codec import FrameError, decode, encode
from common.messages import ChatMessage, ErrorCode, Generate, RequestError, Tokenize, Tokens
from common.parsers import Reasoning, ToolFormat, detect_formats, make_parser
from tests.helpers_templates import HERMES, LLAMA31, QWEN3, TEMPLATES
from tests.helpers_tokenizers import CHATML, byte_level
from tests.helpers_wire import whole_body
from tests.unit.frontend_world import GREEDY, World, request, run
from tokenizer_proc.chat_request import parse_messages, parse_tools
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.limits import Limits, Refused
from tokenizer_proc.prompt import PromptEncoder

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather, <now> & “later”",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
DECODED = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Grüße 🙂, how is it?"}
ANSWER = {"role": "assistant", "content": "Fine.", "reasoning_content": "hm\n"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
DEEP = 700 if sys.version_info < (3, 12) else 1200  # read by json, too deep for a function of our own from then on
RESULT = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abc123def", "name": "get_weather"}


tokenizer = cache(byte_level)


@cache
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)


@cache
def encoder_of(template: str) -> PromptEncoder:
    return PromptEncoder(tokenizer(), ChatTemplate(template, SPECIAL), Limits(10_000, 10_000, 1000, 9, 9))


def wire(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    extras = [{name: m[name] for name in m if name not in ("role", "content")} for m in messages]
    return tuple(
        ChatMessage(m["role"], m["content"], json.dumps(extra) if extra else "")
        for m, extra in zip(messages, extras, strict=True)
    )


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt, by way of the wire and the tokenizer."""
    msg = Generate(1, None, None, wire(messages), GREEDY, **fields)
    tokens = encoder_of(template).encode(decode(encode(msg), {Generate}))
    return tokenizer().decode(list(tokens), skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no-tools", "tools"])
@pytest.mark.parametrize(
    "messages",
    [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [USER, CALLS, RESULT], [USER, CALLS, RESULT, ANSWER, USER]],
    ids=["user", "system", "reasoned", "called", "long"],
)
@pytest.mark.parametrize("prompted", [True, False])
def test_equal_to_transformers(
    name: str, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]], prompted: bool
) -> None:
    template = TEMPLATES[name]
    decoded = [{**m, "tool_calls": [DECODED]} if "tool_calls" in m else m for m in messages]
    theirs = reference().apply_chat_template(
        decoded, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompted
    )
    sent = "" if tools is None else json.dumps(tools)
    assert rendered(template, messages, tools=sent, add_generation_prompt=prompted) == theirs


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, {"enable_thinking": True}, {}])
def test_template_arguments(arguments: dict[str, Any]) -> None:
    theirs = reference().apply_chat_template(
        [USER], chat_template=QWEN3, tokenize=False, add_generation_prompt=True, **arguments
    )
    assert rendered(QWEN3, [USER], template_args=json.dumps(arguments) if arguments else "") == theirs
    other = rendered(LLAMA31, [USER], template_args='{"date_string": "today"}')
    assert "Today: today" in other


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", ["Sure, it is", "a  b\n\nc", "ends. "])
def test_the_answer_goes_on_with_the_last_message(name: str, begun: str) -> None:
    messages = [USER, {"role": "assistant", "content": begun}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = rendered(TEMPLATES[name], messages, **options)
    theirs = reference().apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    assert ours.endswith(begun) and ours.rstrip() == theirs.rstrip()


def test_a_template_that_does_not_show_the_last_message() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(Refused, match="does not show the last message"):
        rendered("{{ messages[0].content }}", [USER, ANSWER], **options)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tools": "{"}, "tools", "not JSON"),
        ({"tools": "[" * 100_000}, "tools", "nested too deeply"),
        ({"tools": "[" * DEEP + '"\\ud83d"' + "]" * DEEP}, "tools", "nested too deeply"),
        ({"tools": "{}"}, "tools", "a list"),
        ({"tools": "[1]"}, "tools[0]", "an object"),
        ({"tools": '[{"type": "function"}]'}, "tools[0].function", "missing"),
        ({"tools": '[{"function": {}}]'}, "tools[0].function.name", "missing"),
        ({"tools": '[{"function": {"name": "f", "parameters": 3}}]'}, "tools[0].function.parameters", "an object"),
        ({"tools": json.dumps(TOOLS * 2000)}, "tools", "1024"),
        ({"template_args": "[]"}, "template_args", "an object"),
        ({"template_args": '{"enable_thinking": "no"}'}, "template_args.enable_thinking", "true or false"),
        ({"template_args": '{"thinking": true}'}, "template_args.thinking", "enable_thinking"),
        ({"template_args": '{"messages": []}'}, "template_args.messages", "other fields"),
        ({"template_args": '{"bos_token": "x"}'}, "template_args.bos_token", "does not use"),
        ({"template_args": '{"step budget": 1}'}, "template_args.step budget", "does not use"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        rendered(QWEN3, [USER], **fields)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID, field)
    assert len(refused.value.problem) < 300


@pytest.mark.parametrize(
    ("extra", "field", "words"),
    [
        ("[", "chat[1]", "not JSON"),
        ("[]", "chat[1]", "an object"),
        ('{"weight": 1}', "chat[1].weight", "not known"),
        ('{"name": 1}', "chat[1].name", "text"),
        ('{"role": "system"}', "chat[1].role", "not known"),
        ('{"tool_calls": {}}', "chat[1].tool_calls", "a list"),
        ('{"tool_calls": [{}]}', "chat[1].tool_calls[0].function", "missing"),
        ('{"tool_calls": [{"function": {"name": "f", "arguments": [3]}}]}', "chat[1].tool_calls[0].function.arguments",
         "an object"),
    ],
)  # fmt: skip
def test_bad_messages_are_refused_by_place(extra: str, field: str, words: str) -> None:
    async def test() -> None:
        world = World(QWEN3)
        world.receive(request(chat=(ChatMessage("user", "a"), ChatMessage("assistant", "", extra))))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError) and not world.added
        assert (error.code, error.field) == (ErrorCode.INVALID, field) and words in error.problem

    run(test)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "a", "tools": "[]"}, "tools"),
        ({"text": "a", "template_args": "{}"}, "template_args"),
        ({"text": "a", "continue_final_message": True}, "continue_final_message"),
        ({"chat": (ChatMessage("user", "a"),), "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        request(**fields)
    body = whole_body(request(text="a"))
    assert decode(msgpack.packb(body), {Generate})
    place = [f.name for f in dataclasses.fields(Generate)].index("continue_final_message") + 2  # behind version and tag
    with pytest.raises(FrameError) as refused:
        decode(msgpack.packb([*body[:place], True]), {Generate})
    assert refused.value.field == "continue_final_message" and refused.value.rids == (5,)


def test_a_question_about_tokens_sees_the_same_chat() -> None:
    async def test() -> None:
        world = World(QWEN3)
        chat = (ChatMessage("user", "a"),)
        world.receive(Tokenize(2, None, chat, template_args='{"enable_thinking": false}'))
        world.receive(Tokenize(3, None, chat, template_args="{"))
        await world.settle()
        (tokens, error) = sorted(world.answers[b"a"], key=lambda m: m.rid)
        assert isinstance(tokens, Tokens) and isinstance(error, RequestError) and error.field == "template_args"
        text = rendered(QWEN3, [{"role": "user", "content": "a"}], template_args='{"enable_thinking": false}')
        assert tokenizer().decode(list(tokens.token_ids), skip_special_tokens=False) == text

    run(test)


def test_a_template_without_tools_gets_them_described() -> None:
    text = rendered(CHATML, [SYSTEM, USER, CALLS, RESULT, ANSWER], tools=json.dumps(TOOLS))
    system, user, calls, result, answer, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe kind.") and json.dumps(TOOLS[0]["function"], ensure_ascii=False) in system
    assert user == f"user\n{USER['content']}<|im_end|>\n" and answer == "assistant\nFine.<|im_end|>\n"
    assert result == 'user\n<tool_response>\n{"t": 21}\n</tool_response><|im_end|>\n'
    deltas = make_parser(tools=ToolFormat.HERMES).feed(calls.removeprefix("assistant\n").removesuffix("<|im_end|>\n"))
    assert [getattr(delta, "name", getattr(delta, "text", "")) for delta in deltas] == [
        "get_weather", '{"city": "Köln"}',
    ]  # fmt: skip
    assert rendered(CHATML, [USER], tools=json.dumps(TOOLS)).startswith("<|im_start|>system\nYou can call")
    assert "tool" not in rendered(CHATML, [USER, ANSWER])


def test_formats_of_the_templates() -> None:
    formats = {name: detect_formats(template) for name, template in TEMPLATES.items()}
    assert [formats[name].tools for name in ("qwen3", "llama3.1", "mistral", "hermes")] == [
        ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL, ToolFormat.HERMES,
    ]  # fmt: skip
    assert formats["qwen3"].reasoning is Reasoning.TAGS
    assert detect_formats(QWEN3, thinking=False).reasoning is Reasoning.NONE
    assert detect_formats(HERMES).reasoning is Reasoning.NONE


@pytest.mark.parametrize(
    "text", ["", " ", "{", '{"city": "Köl', "3", '["Köln"]', "null", "city=Köln", '{"a":' * 100_000]
)
def test_arguments_that_broke_off_are_none(text: str) -> None:
    """A model may be cut off in its call, or write it wrongly. Its conversation goes on, as with vLLM."""
    calls = {"tool_calls": [{"function": {"name": "f", "arguments": text}}, {"function": CALL["function"]}]}
    (message,) = parse_messages([ChatMessage("assistant", "", json.dumps(calls))])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{}, {"city": "Köln"}]


def test_halves_of_surrogate_pairs() -> None:
    """A cut emoji, as models write it and clients send it back, is a replacement character in the prompt."""
    half = '{"tool_calls": [{"function": {"name": "f", "arguments": "{\\"x\\": \\"a\\\\ud83d\\"}"}}]}'
    messages = parse_messages([ChatMessage("assistant", "", half)])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": "a\N{REPLACEMENT CHARACTER}"}
    assert parse_tools('[{"function": {"name": "\\ud83d\\ude00"}}]') == [{"function": {"name": "\N{GRINNING FACE}"}}]
    refusal = Refused(ErrorCode.INVALID, "template_args.\ud800: is not known", "template_args.\ud800").answer(3)
    assert decode(encode(refusal), {RequestError}) == refusal and refusal.field == "template_args.?"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("ba", "ab"), ("cab", "abc"), ("abc", "abc"), ("bba", "abb"), ("xba", "xba"), ("b-a", "b-a"), ("b|a", "b|a"),
    ],
)  # fmt: skip
def test_results_come_in_the_order_of_their_calls(told: str, expected: str) -> None:
    """`-` is a result without an id, `|` something that the user says; there is no call x."""

    def result(name: str) -> dict[str, Any]:
        if name == "|":
            return {**USER, "content": name}
        return {"role": "tool", "content": name} | ({} if name == "-" else {"tool_call_id": name})

    calls = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": name} for name in "abc"]}
    before = [USER, {**calls, "tool_calls": [{**CALL, "id": name} for name in "ba"]}, result("a"), calls]
    messages = parse_messages(wire([*before, *map(result, told)]))
    assert "".join(message["content"] for message in messages[4:]) == expected
    assert [message["role"] for message in messages[:4]] == ["user", "assistant", "tool", "assistant"]


def test_a_template_that_takes_one_call_gets_several_one_by_one() -> None:
    """Llama 3's model can be made to call more, and clients send all of that back."""
    calls = [{**CALL, "id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "content": name.upper(), "tool_call_id": name} for name in "ba"]
    text = rendered(LLAMA31, [USER, {**CALLS, "content": "", "tool_calls": calls}, *results, USER])
    places = [text.index(part) for part in ('{"name": "a"', "\n\nA<", '{"name": "b"', "\n\nB<")]
    assert places == sorted(places)
    one = [USER, {**CALLS, "tool_calls": calls[:1]}, results[1], {**CALLS, "tool_calls": calls[1:]}, results[0], USER]
    assert text == rendered(LLAMA31, one)
    assert [ChatTemplate(source, SPECIAL).one_call for source in TEMPLATES.values()] == [
        source is LLAMA31 for source in TEMPLATES.values()
    ]
