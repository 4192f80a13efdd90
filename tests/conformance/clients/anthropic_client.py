"""Anthropic's SDK on the Messages API."""

import json
from importlib.metadata import version
from typing import Any

import anthropic
from anthropic import Anthropic
from checks import Suite, Target, expect

suite = Suite(f"anthropic {version('anthropic')}")
GREEDY = {"temperature": 0}  # Anthropic's models of today do not take it, so neither does the SDK by name
ASKED: dict[str, Any] = {
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "What is len?"}],
    "extra_body": GREEDY,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "How it is there.", "input_schema": CITY | {"additionalProperties": False}}


def client(target: Target, key: str = "") -> Anthropic:
    return Anthropic(base_url=target.url.removesuffix("/v1"), api_key=key or target.key, max_retries=0)


@suite.check("messages: whole and streamed, usage as counted")
def messages(target: Target) -> None:
    with client(target) as sdk:
        whole = sdk.messages.create(model=target.model, system="Answer briefly.", **ASKED)
        with sdk.messages.stream(model=target.model, system="Answer briefly.", **ASKED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        counted = sdk.messages.count_tokens(
            model=target.model, system="Answer briefly.", messages=ASKED["messages"]
        ).input_tokens
    (block,) = whole.content
    expect(block.text == text and text, (whole, text))
    expect((final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens), final)
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    expect(read == counted, (whole.usage, counted))


@suite.check("a tool that must be called, whole and streamed, and its result")
def tools(target: Target) -> None:
    more = ASKED | {"max_tokens": 200, "tools": [TOOL]}
    with client(target) as sdk:
        choice = {"type": "tool", "name": "weather"}
        answer = sdk.messages.create(model=target.model, tool_choice=choice, **more)
        (call,) = answer.content
        expect(answer.stop_reason == "tool_use" and call.name == "weather" and call.input["city"], answer)
        with sdk.messages.stream(model=target.model, tool_choice=choice, **more) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            streamed = stream.get_final_message()
        expect(json.loads("".join(parts)) == streamed.content[0].input and streamed.stop_reason == "tool_use", streamed)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
        turns = [*ASKED["messages"], {"role": "assistant", "content": answer.content}]
        turns.append({"role": "user", "content": [result]})
        after = sdk.messages.create(model=target.model, **(more | {"messages": turns, "max_tokens": 8}))
    expect(after.usage.output_tokens, after)


@suite.check("stop sequences, and a beginning that is gone on with")
def stops(target: Target) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    with client(target) as sdk:
        free = sdk.messages.create(model=target.model, **(ASKED | {"messages": turns}))
        word = free.content[0].text.split()[-1]
        cut = sdk.messages.create(model=target.model, stop_sequences=[word], **(ASKED | {"messages": turns}))
    expect((cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word), cut)
    expect(all(word not in block.text for block in cut.content), cut)


@suite.check("errors: the SDK's own exceptions")
def errors(target: Target) -> None:
    with client(target) as sdk, client(target, "wrong") as stranger:
        for asked, kind in (
            (lambda: stranger.messages.create(model=target.model, **ASKED), anthropic.AuthenticationError),
            (lambda: sdk.messages.create(model="other", **ASKED), anthropic.NotFoundError),
            (
                lambda: sdk.messages.create(model=target.model, **(ASKED | {"extra_body": {"top_p": 3}})),
                anthropic.BadRequestError,
            ),
        ):
            try:
                asked()
            except kind as error:
                expect(error.body["type"] == "error" and error.body["error"]["message"], error)
            else:
                raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    suite.main()
