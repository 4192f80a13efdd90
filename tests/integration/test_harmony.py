"""A model of gpt-oss's architecture on a real cluster: answers in OpenAI's harmony format, through HTTP.

Its weights are random, so grammars and biases make it speak: whatever they leave to it must be read all the same.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from common.harmony import END
from rhizome import LLM, SamplingParams
from tests.helpers_harmony import make_harmony_checkpoint, token_id
from tests.integration.cluster import Cluster, running

TIMEOUT_S = 60.0
USER = {"role": "user", "content": "How is the weather in Rome?"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
NUMBER = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
          "additionalProperties": False, "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}}  # fmt: skip
SCHEMAS = {"get_weather": CITY, "math.add": NUMBER}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in SCHEMAS.items()]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "math.add"}}}
IN_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_harmony_checkpoint(tmp_path_factory.mktemp("harmony") / "tiny-oss")
    # float32, so that sampled tokens do not depend on what else is in the batch
    with running(model, "--port", "0", "--dtype", "float32", "--kv-tokens", "32768") as cluster:
        yield cluster


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.info["addresses"]["http"], timeout=TIMEOUT_S) as client:
        yield client


def ask(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """A whole answer."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request whose thoughts, if it begins one, end after some words."""
    brief = {"max_tokens": 400, "seed": 5, "logit_bias": {str(token_id(END)): 4.0}}
    return {"messages": list(messages or (USER,)), **brief, **fields}


def refused(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices that the deltas of a stream make, put together as clients do it."""
    found: dict[int, dict[str, Any]] = {}
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                whole = found.setdefault(choice["index"], {"message": {"tool_calls": []}, "finish_reason": None})
                _add(whole["message"], choice["delta"])
                whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return [found[index] for index in sorted(found)]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        if part["index"] == len(message["tool_calls"]):
            message["tool_calls"].append(part)
        else:
            call = message["tool_calls"][part["index"]]
            call["function"]["arguments"] += part["function"]["arguments"]


def check_calls(choices: list[dict[str, Any]], names: set[str]) -> int:
    """Every answer that was not cut off is one valid call, and nothing but thoughts before it; returns how many."""
    complete = [choice for choice in choices if choice["finish_reason"] != "length"]
    for choice in complete:
        assert choice["finish_reason"] == "tool_calls" and not choice["message"].get("content")
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"] and call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return len(complete)


def shown(choice: dict[str, Any]) -> tuple[Any, ...]:
    """What a whole answer and a stream have in common: all but the ids of calls."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return calls, message.get("content") or "", message.get("reasoning_content", ""), choice["finish_reason"]


@pytest.mark.parametrize(
    ("forced", "names"), [(REQUIRED, set(SCHEMAS)), (NAMED, {"math.add"})], ids=["required", "named"]
)
@pytest.mark.parametrize("sampling", [{"n": 8}, {"temperature": 0}], ids=["drawn", "greedy"])
def test_forced_calls_are_valid(
    http: httpx.Client, forced: dict[str, Any], names: set[str], sampling: dict[str, Any]
) -> None:
    answer = ask(http, **chat(**forced, **sampling))
    assert check_calls(answer["choices"], names) >= len(answer["choices"]) / 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 0
    stream = streamed(http, **chat(**forced, **sampling))
    assert [shown(choice) for choice in stream] == [shown(choice) for choice in answer["choices"]]
    assert all(choice["message"]["tool_calls"][0]["index"] == 0 for choice in stream if choice["message"]["tool_calls"])


def test_both_headers_of_calls_and_thoughts_before_them_are_read(http: httpx.Client) -> None:
    choices = [choice for seed in (1, 100) for choice in ask(http, **chat(**REQUIRED, n=32, seed=seed))["choices"]]
    assert check_calls(choices, set(SCHEMAS)) >= 32
    messages = [choice["message"] for choice in choices]
    assert {"reasoning_content" in message for message in messages} == {True, False}
    assert {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())} == set(SCHEMAS)


def test_a_schema_holds_for_the_content_and_reasoning_is_apart(http: httpx.Client) -> None:
    answer = ask(http, **chat(**IN_SCHEMA, n=16))
    complete = [choice["message"] for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert len(complete) >= 8
    for message in complete:
        jsonschema.validate(json.loads(message["content"]), CITY)
    assert {"reasoning_content" in message for message in complete} == {True, False}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    stream = streamed(http, **chat(**IN_SCHEMA, n=16))
    assert [shown(choice) for choice in stream] == [shown(choice) for choice in answer["choices"]]


def test_calls_of_strict_tools_are_valid(http: httpx.Client) -> None:
    """Beside a response_format, too."""
    for fields in (IN_SCHEMA, {}):
        choices = ask(http, **chat(tools=STRICT, **fields, n=16))["choices"]
        called = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
        assert called
        for choice in called:  # what the model said before it is free
            check_calls([{**choice, "message": {**choice["message"], "content": None}}], set(SCHEMAS))
        for choice in choices:
            if choice["finish_reason"] == "stop" and fields:
                jsonschema.validate(json.loads(choice["message"]["content"]), CITY)


def test_an_answer_that_ends_in_its_thoughts_has_no_content(http: httpx.Client) -> None:
    endless = chat(**IN_SCHEMA, n=8, max_tokens=40, logit_bias={str(token_id(END)): -100.0})
    for choice in ask(http, **endless)["choices"]:
        thought = choice["message"].get("reasoning_content")
        if thought is not None:
            assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
            assert "analysis" not in thought and "<|" not in thought


def test_plain_chats(http: httpx.Client) -> None:
    for sampling in ({"temperature": 0}, {"n": 4}):
        plain = chat(max_tokens=60, **sampling)
        answer = ask(http, **plain)
        assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
        assert [shown(choice) for choice in streamed(http, **plain)] == [shown(choice) for choice in answer["choices"]]
    offered = ask(http, **chat(max_tokens=60, tools=TOOLS))
    assert offered["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    with_scores = ask(http, **chat(max_tokens=9, logprobs=True, top_logprobs=2, ignore_eos=True))
    assert len(with_scores["choices"][0]["logprobs"]["content"]) == 9


def test_efforts(http: httpx.Client) -> None:
    prompts = set()
    for effort in ("low", "medium", "high"):
        answer = ask(http, **chat(max_tokens=1, reasoning_effort=effort))
        prompts.add(answer["usage"]["prompt_tokens"])
        assert ask(http, "/v1/responses", input="hi", max_output_tokens=1, reasoning={"effort": effort})
    assert len(prompts) > 1, "the template writes it down"
    error = refused(http, "/v1/chat/completions", **chat(reasoning_effort="minimal"))
    assert error["param"] == "reasoning_effort" and "low, medium, high" in error["message"]
    error = refused(http, "/v1/responses", input="hi", reasoning={"effort": "minimal"})
    assert error["param"] == "reasoning.effort" and "low, medium, high" in error["message"]


def test_a_second_turn_with_the_result_of_a_call(http: httpx.Client) -> None:
    first = ask(http, **chat(**NAMED, temperature=0))["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    called = first["message"]
    (call,) = called["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    for said in (
        called,
        {**called, "reasoning_content": "hm"},
        {**called, "reasoning_content": "hm", "content": "So."},
    ):
        second = ask(http, **chat(USER, said, result, tools=TOOLS, tool_choice="none", **IN_SCHEMA))
        assert check_schema(second)
    again = ask(http, **chat(USER, called, result, **REQUIRED, n=4))
    assert check_calls(again["choices"], set(SCHEMAS)) >= 2
    stray = refused(http, "/v1/chat/completions", **chat(USER, result, tools=TOOLS))
    assert stray["param"] == "messages"


def test_an_answer_goes_on_under_a_grammar(http: httpx.Client) -> None:
    begun = {"role": "assistant", "content": "It is"}
    answer = ask(http, **chat(USER, begun, continue_final_message=True, structured_outputs={"choice": [" sunny."]}))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" sunny.", "stop")
    assert answer["usage"]["completion_tokens"] <= len(" sunny.") + 1, "no thought, no header"


def check_schema(answer: dict[str, Any]) -> bool:
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    return choice["finish_reason"] in ("stop", "length")


def test_responses_show_channels_as_items(http: httpx.Client) -> None:
    form = {"text": {"format": {"type": "json_schema", "name": "place", "schema": CITY}}}
    complete = thought = 0
    for seed in range(12):
        asked = {"input": "hi", "max_output_tokens": 400, "seed": seed, **form}
        answer = ask(http, "/v1/responses", **asked)
        text = "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
        thoughts = [item for item in answer["output"] if item["type"] == "reasoning"]
        assert bool(thoughts) == (answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0)
        if answer["status"] == "completed":
            jsonschema.validate(json.loads(text), CITY)
            complete += 1
            thought += answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        stream = http.post("/v1/responses", json={**asked, "stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in stream if line.startswith("data: {")]
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
    assert complete >= 6 and thought >= 1


def test_the_client_and_the_python_api_show_the_final_channel(cluster: Cluster) -> None:
    """Over the cluster's own socket; a prompt that is no chat stays raw text."""
    flags = ("--max-tokens", "400", "--logit-bias", f"{token_id(END)}:4", "--choice", "So be it.")
    seen = set()
    for seed in range(8):
        asked = ("hi", "--chat", "--seed", str(seed), *flags)
        result = json.loads(cluster.client(*asked, "--json").stdout)
        if result["finish_reason"] == "stop":
            assert result["text"] == "So be it." and "<|" not in result.get("reasoning", "")
            seen.add("reasoning" in result)
    assert seen == {True, False}
    said = cluster.client("chat", "--seed", "0", *flags, input="hi\nand now?\n")
    assert said.returncode == 0 and set(said.stdout.splitlines()) <= {"So be it.", ""}, said.stderr
    raw = cluster.client("hi", "--chat", "--max-tokens", "30", "--keep-special-tokens", "--lark", "/dev/stdin",
                         input='start: <|channel|> "final" <|message|> "x"\n')  # fmt: skip
    assert raw.stdout == "<|channel|>final<|message|>x\n", raw.stderr
    with LLM.connect(cluster.run_dir) as llm:
        params = SamplingParams(n=8, seed=5, max_tokens=400, logit_bias={token_id(END): 4.0}, choice=["So be it."])
        (output,) = llm.chat([USER], params)
        answers = [answer for answer in output.outputs if answer.finish_reason == "stop"]
        assert {answer.text for answer in answers} == {"So be it."}
        assert {answer.reasoning is None for answer in answers} == {True, False}
        (plain,) = llm.generate("hi", SamplingParams(max_tokens=5, ignore_eos=True))
        assert plain.outputs[0].reasoning is None and len(plain.outputs[0].token_ids) == 5
