"""The official Python SDK of OpenAI, used as its documentation shows."""

import asyncio
import json
from typing import Any

import openai
from checks import Suite, Target, expect
from pydantic import BaseModel

suite = Suite(f"openai {openai.__version__}")
QUESTION: list[Any] = [{"role": "user", "content": "What does str.join do?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Release(BaseModel):
    name: str
    stable: bool
    level: int


# pydantic writes no bounds for plain types, and a model that knows little may write long values: keep them short
RELEASE: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "release",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "stable": {"type": "boolean"},
                "level": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "stable", "level"],
            "additionalProperties": False,
        },
    },
}


def client_of(target: Target, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.url, **{"api_key": target.key, "max_retries": 0, "timeout": 60, **options})


@suite.check("models: list and retrieve")
def models(target: Target) -> None:
    client = client_of(target)
    listed = [model.id for model in client.models.list()]
    expect(target.model in listed, listed)
    expect(client.models.retrieve(target.model).id == target.model, "another model came back")


@suite.check("completions: a text, ids, lists of both")
def prompts(target: Target) -> None:
    client = client_of(target)
    for prompt, count in (("The with", 1), ([40, 50, 60], 1), (["The", "A"], 2), ([[40, 50], [60]], 2)):
        answer = client.completions.create(model=target.model, prompt=prompt, max_tokens=4, temperature=0)  # type: ignore[arg-type]
        expect([c.index for c in answer.choices] == list(range(count)), answer)
        expect(answer.object == "text_completion" and answer.id and answer.model == target.model, answer)
        expect(all(c.finish_reason in ("length", "stop") for c in answer.choices), answer)


@suite.check("completions: a stream says what the whole answer says, with the same usage")
def completion_stream(target: Target) -> None:
    client = client_of(target)
    options: dict[str, Any] = {"model": target.model, "prompt": "Return a copy of", "max_tokens": 24, "seed": 7}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    expect("".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text, chunks)
    expect(chunks[-1].choices == [] and chunks[-1].usage is not None, chunks[-1])
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        expect(getattr(chunks[-1].usage, field) == getattr(whole.usage, field), (chunks[-1].usage, whole.usage))


@suite.check("completions: echo and log probabilities of the prompt")
def echo(target: Target) -> None:
    answer = client_of(target).completions.create(
        model=target.model, prompt="The with statement", max_tokens=2, echo=True, logprobs=3, temperature=0
    )
    choice = answer.choices[0]
    expect(choice.text.startswith("The with statement"), choice.text)
    found = choice.logprobs
    expect(found and found.tokens and found.token_logprobs and found.top_logprobs, found)
    expect("".join(found.tokens) == choice.text, found.tokens)  # type: ignore[union-attr,arg-type]
    expect(found.token_logprobs[0] is None and found.token_logprobs[1] < 0, found.token_logprobs)  # type: ignore[union-attr,index]
    expect(len(found.tokens) == answer.usage.total_tokens, answer.usage)  # type: ignore[union-attr,arg-type]


@suite.check("completions: n, best_of, stop, penalties, logit_bias, seed")
def options(target: Target) -> None:
    client = client_of(target)
    several: dict[str, Any] = {"model": target.model, "prompt": "The", "max_tokens": 8, "n": 3, "seed": 1}
    first = client.completions.create(**several, best_of=3)
    again = client.completions.create(**several)
    expect(len({c.text for c in first.choices}) == 3, first.choices)
    expect([c.text for c in first.choices] == [c.text for c in again.choices], "the same seed gave other texts")
    stopped = client.completions.create(
        model=target.model, prompt="The", max_tokens=60, temperature=0, stop=[" ", "\n"], presence_penalty=0.5,
        frequency_penalty=0.5,
    )  # fmt: skip
    expect(stopped.choices[0].finish_reason == "stop" and " " not in stopped.choices[0].text, stopped.choices)
    biased = client.completions.create(model=target.model, prompt="The", max_tokens=3, logit_bias={"300": 100})
    only = client.completions.create(model=target.model, prompt=[300, 300, 300], max_tokens=1, echo=True)
    expect(only.choices[0].text.startswith(biased.choices[0].text), (biased.choices, only.choices))


@suite.check("chat: an answer with usage, parts as content, developer role")
def chat(target: Target) -> None:
    client = client_of(target)
    messages: list[Any] = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "What does"}, {"type": "text", "text": "len do?"}]},
    ]
    for limit in ({"max_tokens": 9}, {"max_completion_tokens": 9}):
        answer = client.chat.completions.create(model=target.model, messages=messages, **limit)
        message, usage = answer.choices[0].message, answer.usage
        expect(answer.object == "chat.completion" and message.role == "assistant", answer)
        expect(isinstance(message.content, str) and usage is not None, answer)
        expect(usage.completion_tokens <= 9, usage)  # type: ignore[union-attr]
        expect(usage.prompt_tokens_details.cached_tokens is not None, usage)  # type: ignore[union-attr]


@suite.check("chat: a stream says what the whole answer says; role first, finish reason last")
def chat_stream(target: Target) -> None:
    client = client_of(target)
    options: dict[str, Any] = {"model": target.model, "messages": QUESTION, "max_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**options).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    expect(len({chunk.id for chunk in chunks}) == 1, "chunks of one answer have several ids")
    shown = [chunk.choices[0] for chunk in chunks if chunk.choices]
    expect("".join(c.delta.content or "" for c in shown) == whole.message.content, shown)
    expect(shown[0].delta.role == "assistant" and shown[-1].finish_reason == whole.finish_reason, shown)
    expect(chunks[-1].usage is not None and not chunks[-1].choices, chunks[-1])
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot  # get_final_completion refuses answers that were cut off
    expect({"chunk", "content.delta", "content.done"} <= kinds, kinds)
    expect(final.choices[0].message.content == whole.message.content, final)


@suite.check("chat: log probabilities, whole and streamed")
def chat_logprobs(target: Target) -> None:
    client = client_of(target)
    options: dict[str, Any] = {
        "model": target.model, "messages": QUESTION, "max_tokens": 6, "temperature": 0, "logprobs": True,
        "top_logprobs": 4,
    }  # fmt: skip
    answer = client.chat.completions.create(**options)
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    expect(entries is not None and len(entries) == answer.usage.completion_tokens, answer.usage)  # type: ignore[union-attr]
    for entry in entries or []:
        expect(len(entry.top_logprobs) == 4 and entry.bytes is not None and entry.logprob <= 0, entry)
        expect(entry.top_logprobs[0].logprob >= entry.logprob - 1e-6, entry)
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    expect(streamed == [entry.token for entry in entries or []], streamed)


@suite.check("chat: several turns, and n choices that add up in usage")
def turns(target: Target) -> None:
    client = client_of(target)
    messages = list(QUESTION)
    for question in ("And len?", "And sum?"):
        answer = client.chat.completions.create(model=target.model, messages=messages, max_tokens=12)
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    several = client.chat.completions.create(
        model=target.model, messages=messages, n=4, max_tokens=5, extra_body={"ignore_eos": True}
    )
    expect(len(several.choices) == 4 and several.usage.completion_tokens == 20, several.usage)  # type: ignore[union-attr]


@suite.check("chat: fields of vLLM and SGLang through extra_body")
def extras(target: Target) -> None:
    answer = client_of(target).chat.completions.with_raw_response.create(
        model=target.model, messages=QUESTION, max_tokens=5, store=False, user="u",
        metadata={"run": "1"}, extra_headers={"X-Request-ID": "conformance-1", "X-Session-Affinity": "s"},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "no_such_field": 1},
    )  # fmt: skip
    expect(answer.headers["x-request-id"] == "conformance-1", answer.headers)
    expect("no_such_field" in answer.headers["x-rhizome-ignored-fields"], answer.headers)
    expect(answer.parse()._request_id == "conformance-1", "the SDK did not find the request id")


@suite.check("errors: the SDK's own exceptions with param and code")
def errors(target: Target) -> None:
    client = client_of(target)
    long = [{"role": "user", "content": "x" * 9000}]
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None, str | None]] = [
        (openai.BadRequestError, {"temperature": -1}, "temperature", None),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", None),
        (openai.BadRequestError, {"messages": []}, "messages", None),
        (openai.BadRequestError, {"messages": long}, None, "context_length_exceeded"),
        (openai.BadRequestError, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        (openai.NotFoundError, {"model": "gpt-none"}, "model", "model_not_found"),
    ]  # fmt: skip
    for stream in (False, True):
        for kind, fields, param, code in wrong:
            body: dict[str, Any] = {"model": target.model, "messages": QUESTION, "max_tokens": 2, "stream": stream}
            try:
                client.chat.completions.create(**(body | fields))
            except kind as error:
                expect(param is None or error.param == param, (fields, error.param))
                expect(code is None or error.code == code, (fields, error.code))
                expect(error.request_id, f"no request id in {error}")
            else:
                raise AssertionError(f"accepted: {fields}")
    try:
        client_of(target, api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


@suite.check("a stream that is closed early ends the request; the client goes on")
def closed(target: Target) -> None:
    client = client_of(target)
    for _ in range(5):
        stream = client.completions.create(model=target.model, prompt="The", max_tokens=800, stream=True)
        next(iter(stream))
        stream.close()
    client.completions.create(model=target.model, prompt="The", max_tokens=1)


@suite.check("AsyncOpenAI: 16 streams side by side answer as one by one")
def concurrent(target: Target) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=target.model, messages=[{"role": "user", "content": f"Number {number}"}], max_tokens=12,
            temperature=0, stream=True,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=target.url, api_key=target.key, max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, i) for i in range(16)))
            for i in range(0, 16, 5):
                expect(await ask(client, i) == together[i], f"answer {i} is another one alone")

    asyncio.run(all_of_them())


@suite.check("structured output: json_schema, json_object, parse() into a pydantic model")
def structured(target: Target) -> None:
    client = client_of(target)
    answer = client.chat.completions.create(model=target.model, messages=QUESTION, response_format=RELEASE, n=3)
    for choice in answer.choices:
        Release.model_validate_json(choice.message.content or "", strict=True)
    chunks = client.chat.completions.create(model=target.model, messages=QUESTION, response_format=RELEASE, stream=True)
    Release.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    free = client.chat.completions.create(
        model=target.model, messages=QUESTION, response_format={"type": "json_object"}, max_tokens=400, temperature=0
    )
    if free.choices[0].finish_reason == "stop":
        expect(isinstance(json.loads(free.choices[0].message.content or ""), dict), free)

    class Flags(BaseModel):
        stable: bool
        beta: bool

    parsed = client.chat.completions.parse(model=target.model, messages=QUESTION, response_format=Flags)
    expect(isinstance(parsed.choices[0].message.parsed, Flags), parsed)


@suite.check("tools: forced by name and required, whole and streamed; the result goes back")
def tools(target: Target) -> None:
    client = client_of(target)
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        options: dict[str, Any] = {
            "model": target.model, "messages": messages, "tools": [WEATHER], "tool_choice": choice,
            "parallel_tool_calls": False, "seed": 5,
        }  # fmt: skip
        answer = client.chat.completions.create(**options).choices[0]
        call: Any = (answer.message.tool_calls or [None])[0]
        expect(call is not None and call.function.name == "get_weather" and call.id, answer)
        expect(set(json.loads(call.function.arguments)) == {"city", "unit"}, call)
        streamed = {"name": "", "arguments": ""}
        for chunk in client.chat.completions.create(**options, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                streamed["name"] += delta.function.name or ""  # type: ignore[union-attr]
                streamed["arguments"] += delta.function.arguments or ""  # type: ignore[union-attr]
        expect(streamed == {"name": "get_weather", "arguments": call.function.arguments}, (streamed, call))
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 4}'}
    client.chat.completions.create(
        model=target.model, messages=[*messages, answer.message, result], tools=[WEATHER], max_tokens=5
    )


@suite.check("tools: auto and none answer with text or a call")
def optional_tools(target: Target) -> None:
    for choice in ("auto", "none"):
        answer = client_of(target).chat.completions.create(
            model=target.model, messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=10
        )
        message = answer.choices[0].message
        expect(message.content or message.tool_calls, answer)
        expect(choice == "auto" or not message.tool_calls, answer)


@suite.check("responses: whole, streamed as typed events, parse() into a pydantic model")
def responses(target: Target) -> None:
    client = client_of(target)
    options: dict[str, Any] = {"model": target.model, "instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(**options, input="What does len do?", max_output_tokens=12)
    expect(whole.status in ("completed", "incomplete") and whole.usage and whole.output_text, whole)
    with client.responses.stream(**options, input="What does len do?", max_output_tokens=12) as stream:
        seen = list(stream)
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    expect(text == whole.output_text, (text, whole.output_text))
    expect(seen[0].type == "response.created" and seen[-1].type == f"response.{whole.status}", seen[-1])
    turns: list[Any] = [{"role": "user", "content": "Hi"}, *whole.output, {"role": "user", "content": "And sum?"}]
    client.responses.create(**options, input=turns, max_output_tokens=4)

    class Flags(BaseModel):
        stable: bool
        beta: bool

    parsed = client.responses.parse(**options, input="Which?", text_format=Flags)
    expect(isinstance(parsed.output_parsed, Flags), parsed)


@suite.check("responses: functions that must be called, whole, streamed and parsed; their results go back")
def response_tools(target: Target) -> None:
    class Flags(BaseModel):
        """Switches."""

        stable: bool
        beta: bool

    client = client_of(target)
    tool: Any = openai.pydantic_function_tool(Flags, name="set_flags")["function"] | {"type": "function"}
    for choice in ("required", {"type": "function", "name": "set_flags"}):
        options: dict[str, Any] = {
            "model": target.model, "input": "Set them.", "tools": [tool], "tool_choice": choice,
            "parallel_tool_calls": False, "extra_body": {"seed": 5},
        }  # fmt: skip
        whole: Any = client.responses.create(**options).output[0]
        with client.responses.stream(**options) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            streamed: Any = stream.get_final_response().output[0]
        expect("".join(deltas) == streamed.arguments == whole.arguments, (deltas, streamed, whole))
        expect(whole.name == "set_flags" and Flags.model_validate_json(whole.arguments), whole)
    result: Any = {"type": "function_call_output", "call_id": whole.call_id, "output": "done"}
    turns: list[Any] = [{"role": "user", "content": "Set them."}, whole, result]
    client.responses.create(model=target.model, input=turns, tools=[tool], max_output_tokens=4)


if __name__ == "__main__":
    suite.main()
