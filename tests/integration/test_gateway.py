"""Real clusters through HTTP: outputs equal to those of the cluster's own socket, official SDK, disconnects, limits."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from common.answer import Answer
from common.rows import Row
from common.sampling_params import SamplingParams
from tests.helpers_http import dial, head, post, until, until_closed
from tests.integration.cluster import ROOT, Cluster, running, wait_until

DEMO = ROOT / "demo_model"
LONG = {"prompt": "The with statement", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # float32, so that sampled tokens do not depend on what else is in the batch
    with running(DEMO, "--port", "0", "--max-running", "4", "--log-level", "info", "--dtype", "float32") as cluster:
        yield cluster


@pytest.fixture
def url(cluster: Cluster) -> str:
    url: str = cluster.info["addresses"]["http"]
    return url


@pytest.fixture
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def over_ipc(cluster: Cluster, prompt: Any, params: SamplingParams) -> Answer:
    """What the cluster's own socket answers."""
    answer = Answer()
    with cluster.connect() as connection:
        connection.submit(prompt, params)
        while connection.live:
            for row in connection.poll(1):
                assert isinstance(row, Row), row
                answer.add(row)
    return answer


def running_requests(url: str) -> tuple[int, int]:
    stats = httpx.get(f"{url}/server_info").json()["stats"]
    return stats["scheduler.running"], stats["scheduler.waiting"]


def wait_idle(cluster: Cluster, url: str) -> None:
    wait_until(lambda: running_requests(url) == (0, 0), 10, lambda: cluster.log)
    cluster.check_idle()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11, "top_p": 0.9}])
def test_completions_are_those_of_the_cluster(cluster: Cluster, sdk: openai.OpenAI, sampling: dict[str, Any]) -> None:
    expected = over_ipc(cluster, "Return a copy of", SamplingParams(max_tokens=40, **sampling)).as_dict()
    answer = sdk.completions.create(model="demo_model", prompt="Return a copy of", max_tokens=40, **sampling)
    assert answer.choices[0].text == expected["text"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected["prompt_tokens"], expected["completion_tokens"],
    )  # fmt: skip
    stream = sdk.completions.create(
        model="demo_model", prompt="Return a copy of", max_tokens=40, stream=True, **sampling,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == expected["text"]
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_strict_tool_is_called_rightly_or_the_answer_has_its_format(sdk: openai.OpenAI) -> None:
    """Whether it begins with a call's mark or with JSON is the model's choice, which a bias helps along here."""
    number = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": schema}}
    mark = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("<").ids[0]
    found: dict[str, int] = {"call": 0, "json": 0}
    for seed in range(6):
        answer: Any = sdk.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": "Add 5 to it."}], tools=[tool], seed=seed,
            response_format=form, max_tokens=120, temperature=1.0, logit_bias={str(mark): -100 if seed % 2 else 8},
        )  # fmt: skip
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]  # max_tokens may cut the last one
        for call in whole:
            assert call.function.name == "add"
            jsonschema.validate(json.loads(call.function.arguments), schema)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        found["call"] += bool(whole)
        found["json"] += choice.finish_reason == "stop"
    assert found == {"call": 3, "json": 3}


def test_chats_stream_what_they_answer(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "demo_model", "messages": [{"role": "user", "content": "What does str.join do?"}], "n": 3,
        "max_completion_tokens": 30, "temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = sdk.chat.completions.create(**options)
    texts, logprobs, finish = ["", "", ""], [[], [], []], [None, None, None]  # type: ignore[var-annotated]
    for chunk in sdk.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            finish[choice.index] = choice.finish_reason or finish[choice.index]  # type: ignore[call-overload]
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) == 3
    assert finish == [choice.finish_reason for choice in whole.choices]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [e.token for e in choice.logprobs.content] == [e.token for e in streamed]
        for one, other in zip(choice.logprobs.content, streamed, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)
    with sdk.chat.completions.stream(**{k: v for k, v in options.items() if k != "n"}) as helper:
        helper.until_done()
        assert helper.current_completion_snapshot.choices[0].message.content == texts[0]


def test_messages_of_anthropic_s_api_are_the_same_chats(sdk: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {
        "model": "demo_model", "messages": [{"role": "user", "content": "What does str.join do?"}], "max_tokens": 30,
        "temperature": 0,
    }  # fmt: skip
    chat = sdk.chat.completions.create(**asked)
    whole = httpx.post(f"{url}/v1/messages", json=asked).json()
    assert whole["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    usage = whole["usage"]
    assert chat.usage is not None and whole["stop_reason"] == "max_tokens" and usage["output_tokens"] == 30
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    count = httpx.post(f"{url}/v1/messages/count_tokens", json={"messages": asked["messages"]}).json()
    assert count == {"input_tokens": chat.usage.prompt_tokens}
    stopped = httpx.post(f"{url}/v1/messages", json=asked | {"stop_sequences": [" "]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " ")
    text = [event["delta"]["text"] for event in events_of(url, asked) if event["type"] == "content_block_delta"]
    assert "".join(text) == whole["content"][0]["text"] and len(text) > 10
    begun = httpx.post(
        f"{url}/v1/messages", json=asked | {"messages": [*asked["messages"], {"role": "assistant", "content": "It"}]}
    ).json()
    assert begun["usage"]["output_tokens"] <= 30 and begun["content"] != whole["content"]


def test_a_forced_tool_in_anthropic_s_api_and_its_result(url: str) -> None:
    schema = {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["n"],
        "additionalProperties": False,
    }  # fmt: skip
    user = {"role": "user", "content": "Add 5 to it."}
    asked: dict[str, Any] = {
        "messages": [user], "max_tokens": 120, "temperature": 0, "tools": [{"name": "add", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "add"},
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/messages", json=asked).json()
    (call,) = answer["content"]
    assert answer["stop_reason"] == "tool_use" and (call["type"], call["name"]) == ("tool_use", "add")
    jsonschema.validate(call["input"], schema)
    events = events_of(url, asked)
    arguments = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(arguments)) == call["input"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "10"}]}
    turns = [user, {"role": "assistant", "content": answer["content"]}, result]
    more = httpx.post(f"{url}/v1/messages", json=asked | {"messages": turns, "tool_choice": {"type": "none"}})
    assert more.status_code == 200 and more.json()["stop_reason"] in ("end_turn", "max_tokens"), more.text


def events_of(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed message."""
    lines = httpx.post(f"{url}/v1/messages", json=asked | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    return events


def test_prompt_log_probabilities_as_lm_eval_asks_for_them(cluster: Cluster, sdk: openai.OpenAI) -> None:
    prompts = [[2833, 348, 293], [268, 440, 2153, 302], [302]]
    answer = sdk.completions.create(
        model="demo_model", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        assert found is not None and found.tokens is not None and found.token_logprobs is not None
        assert len(found.tokens) == len(found.token_logprobs) == len(prompt) + 1
        assert found.token_logprobs[0] is None and all(v is not None and v <= 0 for v in found.token_logprobs[1:])
        assert "".join(found.tokens) == choice.text
        assert found.text_offset is not None
        assert [choice.text[at:].startswith(t) for at, t in zip(found.text_offset, found.tokens, strict=True)].count(
            False
        ) == 0
    best = sdk.completions.create(
        model="demo_model", prompt="The", max_tokens=5, n=1, seed=3, extra_body={"best_of": 4}
    )
    assert best.usage is not None and best.usage.completion_tokens > 5 and len(best.choices) == 1


def test_a_prompt_that_is_cut(url: str) -> None:
    text = "Return a copy of the string with leading whitespace removed. " * 120
    whole = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    body = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    refused = httpx.post(f"{url}/v1/completions", json={**body, "prompt": text})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    for prompt in (text, whole):
        for more, kept in (
            ({"truncate_prompt_tokens": 9}, whole[-9:]),
            ({"truncate_prompt_tokens": -1}, whole[-1023:]),
            ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, whole[:9]),
        ):
            asked = {**body, **more, "prompt": prompt, "echo": True, "logprobs": 0}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
            (choice,) = answer["choices"]
            assert choice["prompt_token_ids"] == kept and answer["usage"]["prompt_tokens"] == len(kept)
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert len(choice["logprobs"]["tokens"]) == len(kept) + len(choice["token_ids"])
    chat = {**body, "messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 12}
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) == 12
    refused = httpx.post(f"{url}/v1/completions", json={**body, "prompt": text, "truncate_prompt_tokens": 1025})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_tokens_there_and_back(url: str) -> None:
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "hello wörld", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) and tokens["max_model_len"] == 1024
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "hello wörld"
    chat = httpx.post(f"{url}/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] > 3
    outside = httpx.post(f"{url}/detokenize", json={"tokens": [1, 10**6]})
    assert outside.status_code == 400 and outside.json()["error"]["param"] == "tokens[1]"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
        ({"prompt": [1, 999_999]}, "prompt[1]", "invalid_value"),
        ({"stop_token_ids": [999_999]}, "stop_token_ids[0]", "invalid_value"),
        ({"logit_bias": {"999999": 1.0}}, "logit_bias", "invalid_value"),
    ],
)  # fmt: skip
def test_refusals_of_the_tokenizer_name_the_clients_field(
    url: str, fields: dict[str, Any], param: str, code: str
) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param) and error["code"] == code


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_while_it_generates_aborts(cluster: Cluster, url: str, stream: bool) -> None:
    with dial(url) as connection:
        connection.sendall(post("/v1/completions", LONG | {"stream": stream}))
        if stream:
            until(connection, b"data: ")
        else:
            wait_until(lambda: running_requests(url)[0] == 1, 10)
    wait_idle(cluster, url)
    wait_until(lambda: "status=499" in cluster.log, 5, lambda: cluster.log)


def test_a_disconnect_in_the_queue_aborts(cluster: Cluster, url: str) -> None:
    """Five requests where four can run: the fifth leaves while it waits."""
    streams = [dial(url) for _ in range(4)]
    for connection in streams:
        connection.sendall(post("/v1/completions", LONG | {"stream": True}))
        until(connection, b"data: ")
    with dial(url) as waiting:
        waiting.sendall(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}))
        wait_until(lambda: running_requests(url)[1] == 1 or running_requests(url)[0] < 4, 10)
    wait_until(lambda: running_requests(url)[1] == 0, 10)
    for connection in streams:
        connection.close()
    wait_idle(cluster, url)


def test_a_disconnect_in_the_head_and_in_the_body_leaves_nothing(cluster: Cluster, url: str) -> None:
    for cut in (b"POST /v1/comp", head("/v1/completions", 100)[:-2], head("/v1/completions", 100) + b'{"prompt": "x'):
        with dial(url) as connection:
            connection.sendall(cut)
    wait_idle(cluster, url)
    assert httpx.get(f"{url}/health/ready").status_code == 200


def test_a_slow_reader_slows_nobody(cluster: Cluster, url: str, sdk: openai.OpenAI) -> None:
    expected = sdk.completions.create(model="demo_model", prompt="The", max_tokens=20, temperature=0).choices[0].text
    with dial(url, receive_buffer=4096) as slow:
        body = {"prompt": ["a", "b"], "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 2, "logprobs": 20}
        slow.sendall(post("/v1/completions", body))
        until(slow, b"data: ")
        with ThreadPoolExecutor(4) as pool:

            def ask(_: int) -> str:
                return (
                    sdk.completions.create(model="demo_model", prompt="The", max_tokens=20, temperature=0)
                    .choices[0]
                    .text
                )

            assert set(pool.map(ask, range(12))) == {expected}
    wait_idle(cluster, url)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (head("/v1/completions", 10**9), 413),
        (head("/v1/completions", 16, extra="X-Large: " + "x" * 70_000 + "\r\n") + b"{}", 431),
        (head("/v1/completions", 2, extra="".join(f"X-{i}: y\r\n" for i in range(300))) + b"{}", 431),
        (b"GET /" + b"x" * 70_000, 431),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 414),
        (b"\x00\x01 nonsense\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (post("/v1/completions", b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"}"), 400),
        (post("/v1/completions", b'{"prompt": "\xff\xfe"}'), 400),
        (post("/v1/completions", b'{"prompt": "\\ud83d"}'), 400),
    ],
    ids=["body", "header", "headers", "endless line", "url", "nonsense", "length", "nesting", "utf-8", "surrogate"],
)
def test_hostile_requests_are_refused(url: str, request_bytes: bytes, status: int) -> None:
    with dial(url) as connection:
        connection.sendall(request_bytes)
        first = until(connection, b"\r\n\r\n")
        assert first.startswith(f"HTTP/1.1 {status} ".encode()), first
        while b'"error"' not in first:
            first += connection.recv(65536)
    assert httpx.get(f"{url}/health/live").status_code == 200


def test_keep_alive_and_pipelining(url: str) -> None:
    request = post("/v1/completions", {"prompt": "x", "max_tokens": 1, "temperature": 0})
    with dial(url) as connection:
        connection.sendall(request * 3)
        found = b""
        while found.count(b'"text_completion"') < 3:
            found += connection.recv(65536)
        connection.sendall(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert b'"text_completion"' in until_closed(connection)


def test_the_log_tells_each_requests_story(cluster: Cluster, url: str) -> None:
    body = {"prompt": "The with", "max_tokens": 3, "temperature": 0, "user": "u-1", "stream": True}
    httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "story-1"})
    wait_until(lambda: "id=story-1" in cluster.log, 5)
    (line,) = [line for line in cluster.log.splitlines() if "id=story-1" in line]
    for part in (
        "method=POST",
        "route=/v1/completions",
        "status=200",
        "model=demo_model",
        "user=u-1",
        "output=3",
        "finish=length",
    ):
        assert part in line
    assert "ttft_ms=-" not in line and "queue_ms=-" not in line


def test_metrics_add_up(url: str) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))

    names = ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count", "vllm:request_success_total",
             "vllm:inter_token_latency_seconds_count", "vllm:time_to_first_token_seconds_count",
             "vllm:request_params_max_tokens_sum", "vllm:request_params_n_sum", "vllm:request_num_preemptions_count",
             "vllm:request_max_num_generation_tokens_sum", "vllm:request_inference_time_seconds_count",
             "vllm:request_time_per_output_token_seconds_count",
             "vllm:request_prefill_kv_computed_tokens_count")  # fmt: skip
    before = [value(name) for name in names]
    for _ in range(3):
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 5, "ignore_eos": True})
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [15, 3, 3, 12, 3, 15, 3, 3, 15, 3, 3, 3]
    assert value("vllm:cache_config_info") == 1
    assert value("rhizome_process_up") == 6 and value("rhizome_up") == 1
