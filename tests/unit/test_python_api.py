"""The parts of the Python API that need no cluster of their own: arguments, results, and calls on a played cluster."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import launch
from common import sampling_params as wire
from common.messages import Abort, ChatMessage, ErrorCode, Finish, Generate, GetStats, RequestError, Stats, ints
from common.sampling_params import Grammar
from rhizome import LLM, ClusterError, GenerationError, SamplingParams
from rhizome.cluster import SWITCHES, ChildCluster, _command, _reason
from rhizome.requests import ChatOptions, Options, conversations_of, make_request, make_requests, prompts_of
from tests.unit.fake_frontend import TIMEOUT_S, FakeFrontend, echo, rows, silent_after_one_row
from tests.unit.frontend_world import INFO

GRAMMAR = ("json_schema", "regex", "choice", "lark", "ebnf")


def test_every_field_of_the_wire_is_there_with_its_default() -> None:
    ours = {f.name for f in dataclasses.fields(SamplingParams)}
    theirs = {f.name for f in dataclasses.fields(wire.SamplingParams)}
    assert ours == (theirs - {"grammar"}) | {"n", *GRAMMAR}
    assert SamplingParams().to_wire() == wire.SamplingParams()


def test_python_values_become_those_of_the_wire() -> None:
    params = SamplingParams(temperature=0, stop="x", stop_token_ids=[5], logit_bias={7: -100}, n=2, regex="a+")
    assert params.to_wire() == wire.SamplingParams(
        temperature=0.0, stop=("x",), stop_token_ids=ints(5), logit_bias={7: -100.0}, grammar=Grammar("regex", "a+")
    )
    assert SamplingParams(stop=["a", "b"]).to_wire().stop == ("a", "b")
    made = SamplingParams(allowed_token_ids=[3], bad_words=["x"]).to_wire()
    assert made == wire.SamplingParams(allowed_token_ids=ints(3), bad_words=("x",))
    assert SamplingParams(allowed_token_ids=None, bad_words=None).to_wire() == wire.SamplingParams()
    assert SamplingParams(json_schema=True).to_wire().grammar == Grammar("json_object")
    assert SamplingParams(json_schema={"type": "object"}).to_wire().grammar == Grammar(
        "json_schema", '{"type": "object"}'
    )
    assert SamplingParams(choice=["ä", "b"]).to_wire().grammar == Grammar("choice", '["ä", "b"]')
    assert SamplingParams(ebnf='root ::= "a"').to_wire().grammar == Grammar("ebnf", 'root ::= "a"')
    assert SamplingParams(lark="start: /a/").to_wire().grammar == Grammar("lark", "start: /a/")


def test_options_of_a_call() -> None:
    (request,) = make_requests("prompt", ["x"], None, {"cache_salt": "s", "priority": 3, "deadline_ms": 5})
    assert (request.cache_salt, request.priority, request.deadline_ms) == ("s", 3, 5)
    with pytest.raises(ValueError, match="prompt 0: priority"):
        make_requests("prompt", ["x"], None, {"priority": 10**6})
    with pytest.raises(TypeError, match="'temperature'; how to sample is said by SamplingParams"):
        make_requests("prompt", ["x"], None, {"temperature": 0.5})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="'lora_request'; known are sampling_params, cache_salt"):
        make_requests("prompt", ["x"], None, {"lora_request": None})  # type: ignore[typeddict-unknown-key]


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "hi"}]


def test_options_of_a_chat() -> None:
    options = ChatOptions(tools=TOOLS, chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    (request,) = make_requests("messages", [ASKED], None, options)
    assert json.loads(request.tools) == TOOLS and json.loads(request.template_args) == {"enable_thinking": False}
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    nothing = ChatOptions(tools=None, chat_template_kwargs={}, add_generation_prompt=None, priority=None)
    assert make_requests("messages", [ASKED], None, nothing) == make_requests("messages", [ASKED], None, {})
    assert make_requests("messages", [ASKED], None, {"tools": []})[0].tools == ""
    assert make_requests("prompt", ["x"], None, {"tools": None})[0].tools == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": {}}, "tools: must be a list, not dict"),
        ({"tools": [len]}, "tools\\[0\\]: must be an object, not builtin"),
        ({"tools": [{"name": "f"}]}, "tools\\[0\\].function: is missing"),
        ({"tools": [*TOOLS, {"function": {"name": 5}}]}, "tools\\[1\\].function.name: must be text, not int"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools\\[0\\].function.parameters: must be an obj",
        ),
        ({"tools": [{"function": {"name": "f", "x": {1}}}]}, "tools: is not JSON: Object of type set"),
        ({"tools": TOOLS * 1025}, "tools: has 1025 entries, 1024 is the limit"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be an object, not list"),
        ({"chat_template_kwargs": {"x": len}}, "chat_template_kwargs: is not JSON"),
        ({"chat_template_kwargs": {"x": "y" * 2**16}}, "chat_template_kwargs: must have"),
        ({"add_generation_prompt": 1}, "add_generation_prompt: must be true or false"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message: cannot be together"),
    ],
)
def test_wrong_options_of_a_chat_are_refused_at_once(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"prompt 0: {said}"):
        make_requests("messages", [ASKED], None, options)
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"prompt 0: {name}: is for chats"):
        make_requests("prompt", ["x"], None, options)


def test_messages_in_the_forms_of_openai() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"}, {"role": "assistant", "content": None},
    ]  # fmt: skip
    (request,) = make_requests("messages", [messages], None, {})
    assert request.prompt == [
        ChatMessage("user", "a\nb"), ChatMessage("assistant", "", json.dumps({"tool_calls": [call]})),
        ChatMessage("tool", "5", '{"tool_call_id": "a"}'), ChatMessage("assistant", ""),
    ]  # fmt: skip
    for content, extra, said in (
        ([{"type": "image_url"}], {}, "messages\\[0\\].content: parts must be of type text"),
        ("x", {"tool_calls": {len}}, "messages\\[0\\]: is not JSON"),
    ):
        with pytest.raises(ValueError, match=said):
            make_requests("messages", [[{"role": "user", "content": content, **extra}]], None, {})


def test_what_vllm_calls_the_same() -> None:
    given: list[Any] = [{"prompt": "x"}, {"prompt_token_ids": [5, 6], "prompt": "said"}]
    assert [r.prompt for r in make_requests("prompt", prompts_of(given), None, {})] == ["x", [5, 6]]
    assert make_request(given[1], None, {}).prompt == [5, 6] and prompts_of(given[0]) == [{"prompt": "x"}]
    assert SamplingParams(top_k=-1, stop=None, stop_token_ids=None, logit_bias=None).to_wire() == wire.SamplingParams()


def test_the_clusters_names_of_fields_are_those_of_the_call() -> None:
    for field, ours in (
        ("template_args.x", "chat_template_kwargs.x"), ("chat[0].x", "messages[0].x"), ("chat", "messages"),
        ("tools[0].function.name", "tools[0].function.name"), ("text", "prompt"),
    ):  # fmt: skip
        error = GenerationError.of(3, RequestError(1, ErrorCode.INVALID, f"{field}: is wrong", field))
        assert (error.field, str(error)) == (ours, f"prompt 3: {ours}: is wrong")
    long = "the prompt has 9 tokens; this model's maximum context length is 4"
    assert str(GenerationError.of(0, RequestError(1, ErrorCode.TOO_LONG, long, "text", 4))) == f"prompt 0: {long}"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"n": 0}, "n: must be between 1 and 64"),
        ({"stop": [""]}, "stop\\[0\\]: must have 1 to 512"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: entries"),
        ({"allowed_token_ids": []}, "allowed_token_ids: must have at least 1 entries"),
        ({"allowed_token_ids": range(2**14 + 1)}, "allowed_token_ids: must have at most 16384 entries, got 16385"),
        ({"bad_words": [""]}, "bad_words\\[0\\]: must have 1 to 512"),
        ({"bad_words": "x"}, "bad_words: must be a list, got 'x'"),
        ({"logit_bias": {5: 1000}}, "logit_bias"),
        ({"regex": "a", "choice": ["a"]}, "choice: excludes regex"),
        ({"choice": "yes"}, "choice: must be a list, got 'yes'"),
        ({"choice": [1]}, "choice: must be a list of texts"),
        ({"regex": 5}, "regex: must be text, got 5"),
        ({"json_schema": {"a": {1}}}, "json_schema: must be a JSON schema"),
        ({"stop": 5}, "stop: must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids: must be a list of integers, got 5"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids: must be a list of integers"),
        ({"logit_bias": [1]}, "logit_bias: must map token ids to numbers"),
        ({"logit_bias": {1.5: 1}}, "logit_bias: must map token ids to numbers"),
    ],
)
def test_wrong_parameters_are_refused_at_once(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**values)


def test_one_prompt_or_several() -> None:
    assert prompts_of("x") == ["x"] and prompts_of(["x", [5]]) == ["x", [5]] and prompts_of([]) == []
    assert prompts_of([5, 6]) == [[5, 6]]
    message = {"role": "user", "content": "x"}
    assert conversations_of([message]) == [[message]] and conversations_of([[message], [message]]) == [[message]] * 2


def test_arrays_of_numpy_are_token_ids() -> None:
    numpy = pytest.importorskip("numpy")
    for given, wanted in ((numpy.array([5, 6]), [[5, 6]]), (numpy.array([[5], [6]]), [[5], [6]])):
        assert [r.prompt for r in make_requests("prompt", prompts_of(given), None, {})] == wanted
    assert make_request(numpy.array([5, 6]), None, {}).prompt == [5, 6]
    params = SamplingParams(stop_token_ids=numpy.array([7]), logit_bias={numpy.int64(7): 1.0, "8": 2.0})  # type: ignore[dict-item]
    assert params.to_wire() == wire.SamplingParams(stop_token_ids=ints(7), logit_bias={7: 1.0, 8: 2.0})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: prompts_of(None), "prompts: must be a text, token ids, or a list of these, got None"),
        (lambda: prompts_of(b"x"), "prompts: must be a text"),
        (lambda: make_requests("prompt", prompts_of({"x": 1}), None, {}), "prompt 0: x: is not known; a prompt is"),
        (lambda: make_requests("prompt", [{}], None, {}), "prompt 0: prompt: must be an object with prompt or prompt_"),
        (lambda: conversations_of("hi"), "messages: must be a conversation"),
        (lambda: make_requests("messages", ["hi"], None, {}), "prompt 0: messages: must be a list of messages"),
        (lambda: make_requests("messages", [["hi"]], None, {}), "prompt 0: messages: must be a list of objects"),
        (lambda: make_requests("prompt", [[1.7, 20.2]], None, {}), "prompt 0: token_ids: must be a list of integers"),
        (lambda: make_requests("prompt", [["5"]], None, {}), "prompt 0: token_ids: must be a list of integers"),
        (lambda: make_requests("prompt", [b"hi"], None, {}), "prompt 0: token_ids: must be a list of integers"),
        (lambda: make_request(["a", "b"], None, {}), "prompt 0: token_ids: must be a list of integers"),
        (lambda: make_request(None, None, {}), "prompt: must be a text, token ids or a conversation"),
        (lambda: make_requests("prompt", ["x"], {"n": 2}, {}), "params: must be SamplingParams"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_requests() -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=3)]
    first, second = make_requests(
        "prompt", ["x", (5, 6)], params, Options(cache_salt="salt", priority=1, deadline_ms=2)
    )
    assert (first.prompt, first.params.max_tokens, first.n) == ("x", 1, 1)
    assert (second.prompt, second.n, second.cache_salt, second.priority, second.deadline_ms) == (
        [5, 6],
        3,
        "salt",
        1,
        2,
    )
    with pytest.raises(ValueError, match="params: as many as prompts"):
        make_requests("prompt", ["x"], params, Options())
    with pytest.raises(ValueError, match="prompt 1: token_ids: entries"):
        make_requests("prompt", ["x", [-5]], None, Options())
    with pytest.raises(ValueError, match="prompt 0: priority"):
        make_requests("prompt", ["x"], None, Options(priority=5000))
    with pytest.raises(ValueError, match=r"prompt 0: messages\[0\]"):
        make_requests("messages", [[{"role": "user"}]], None, Options())


def test_options_become_flags_of_launch() -> None:
    command = _command("m", {"tp": 2, "kv_memory": "1GiB", "prefix_cache": False, "record": None}, Path("/r"), 7)
    assert command[1].endswith("launch.py")
    flags = command[2:]
    assert flags[:6] == ["--model", "m", "--run-dir", "/r", "--parent-fd", "7"]
    assert flags[6] == "--no-http" and "--no-http" not in _command("m", {"port": 0}, Path("/r"), 7)
    assert flags[flags.index("--tp") :] == ["--tp", "2", "--kv-memory", "1GiB", "--no-prefix-cache"]
    command = _command("m", {"strict_fields": False, "no_http": False, "port": None}, Path("/r"), 7)
    assert command[-2:] == ["--parent-fd", "7"], "off by default, and HTTP as launch.py has it"
    assert _command("m", {"port": None}, Path("/r"), 7)[-1] == "--no-http"
    with pytest.raises(ValueError, match="run_dir: is set by LLM itself"):
        _command("m", {"run_dir": "x"}, Path("/r"), 7)
    with pytest.raises(ValueError, match="prefix_cache: must be True or False, got 'no'"):
        _command("m", {"prefix_cache": "no"}, Path("/r"), 7)


def test_a_program_that_is_called_launch_does_not_start_itself(tmp_path: Path) -> None:
    program = tmp_path / "launch.py"
    program.write_text(
        "from pathlib import Path\nfrom rhizome.cluster import _command\nprint(_command('m', {}, Path('r'), 7)[1])"
    )
    root = Path(launch.__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, str(program)], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(root / "launch.py"), done.stderr


def test_switches_are_those_of_launch() -> None:
    switches = {p.name for p in launch.main.params if p.secondary_opts}
    assert switches == set(SWITCHES)


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (-9, "ready\n", "launch.py was ended by SIGKILL"),
        (0, "ready\n", "launch.py ended with exit code 0"),
        (3, "ready\n\nbroken\n", "launch.py ended with exit code 3\nready\nbroken"),
        (1, "ready\nError: no memory\nbye\n", "no memory"),
    ],
)
def test_why_a_launcher_ended(code: int, log: str, said: str) -> None:
    assert _reason(log, code) == said


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 and later warn of what is tested here
def test_a_forked_child_is_refused(short_dir: Path) -> None:
    with FakeFrontend(short_dir, answers, info=INFO), LLM.connect(short_dir) as llm:
        llm.generate("x")
        child = os.fork()
        if child == 0:
            try:
                llm.generate("x")
            except ClusterError as error:
                llm.close()
                os._exit(7 if "before the fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert texts(llm.generate("x")) == [["x 0!"]]


def test_why_a_cluster_ended_is_found_behind_a_long_log(tmp_path: Path) -> None:
    cluster = object.__new__(ChildCluster)
    cluster._process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    cluster._log, cluster._log_lock, cluster._closed = (tmp_path / "log").open("w+b"), threading.Lock(), False
    cluster._log.write(b"request id=1 status=200\n" * 100_000 + b"Error: the worker died\n")
    cluster._log.flush()
    assert cluster.ends() and cluster.end == "the cluster has ended: the worker died"
    cluster._log.close()


def test_a_cluster_that_is_closed_during_a_call_says_so(tmp_path: Path) -> None:
    cluster = object.__new__(ChildCluster)
    cluster._process = subprocess.Popen([sys.executable, "-c", ""])
    cluster._log, cluster._log_lock, cluster._closed = (tmp_path / "log").open("w+b"), threading.Lock(), False
    cluster._finalizer = lambda: None  # type: ignore[assignment]
    assert cluster.ends() and cluster.end == "the cluster has ended: launch.py ended with exit code 0"
    cluster.close()
    assert cluster.end == "this LLM was closed during the call" and cluster.log == ""


def answers(msg: Any) -> Iterable[Any]:
    """Echo texts, refuse `bad`, and answer n times."""
    if isinstance(msg, GetStats):
        yield Stats(msg.query, {"a": 1})
    elif isinstance(msg, Abort):
        yield rows(msg.rid, "", finish=Finish.ABORT)
    elif isinstance(msg, Generate) and msg.text == "bad":
        yield RequestError(msg.rid, ErrorCode.TOO_LONG, "is too long", "prompt", 9)
    elif isinstance(msg, Generate) and msg.text == "slow":
        yield rows(msg.rid, "begun", 11)
    elif isinstance(msg, Generate):
        text = msg.text if msg.text is not None else (msg.chat or [ChatMessage("x", "ids")])[-1].content
        for choice in range(msg.n):
            yield rows(msg.rid, f"{text} {choice}", 5, choice=choice)
            yield rows(msg.rid, "!", 6, choice=choice, finish=Finish.LENGTH)


def texts(outputs: Any) -> list[list[str]]:
    return [[answer.text for answer in output.outputs] for output in outputs]


def test_generate_and_chat(short_dir: Path) -> None:
    with FakeFrontend(short_dir, answers, info=INFO), LLM.connect(short_dir) as llm:
        found = llm.generate(["a", [1, 2], "c"], sampling_params=SamplingParams(n=2), use_tqdm=False)
        assert texts(found) == [["a 0!", "a 1!"], ["ids 0!", "ids 1!"], ["c 0!", "c 1!"]]
        first = found[0]
        assert (first.prompt, first.prompt_token_ids, first.prompt_tokens, first.cached_tokens) == ("a", None, 3, 2)
        assert first.num_cached_tokens == 2
        assert found[1].prompt_token_ids == [1, 2] and found[1].prompt is None
        answer = first.outputs[1]
        assert (answer.index, answer.token_ids, answer.finish_reason, answer.logprobs) == (1, [5, 6], "length", None)
        assert texts(llm.chat([{"role": "user", "content": "hi"}])) == [["hi 0!"]]
        assert llm.stats() == {"a": 1}
        assert llm.generate([]) == []
    with pytest.raises(ClusterError, match="closed"):
        llm.generate("x")


def test_an_error_names_the_prompt_and_aborts_the_others(short_dir: Path) -> None:
    with FakeFrontend(short_dir, answers, info=INFO) as cluster, LLM.connect(short_dir) as llm:
        with pytest.raises(GenerationError, match="prompt 1: prompt: is too long") as caught:
            llm.generate(["slow", "bad"])
        assert (caught.value.index, caught.value.code, caught.value.field, caught.value.limit) == (
            1, "too_long", "prompt", 9,
        )  # fmt: skip
        slow = cluster.next(Generate)
        cluster.next(Generate)
        assert cluster.next(Abort).rid == slow.rid
        assert texts(llm.generate("x")) == [["x 0!"]], "the next call is as good as any"


def test_streams(short_dir: Path) -> None:
    with FakeFrontend(short_dir, answers, info=INFO) as cluster, LLM.connect(short_dir) as llm:
        pieces = list(llm.stream("x", SamplingParams(max_tokens=2)))
        assert [(p.index, p.text, p.token_ids, p.finish_reason) for p in pieces] == [
            (0, "x 0", [5], None), (0, "!", [6], "length"),
        ]  # fmt: skip
        assert [p.text for p in llm.stream([{"role": "user", "content": "hi"}])] == ["hi 0", "!"]
        for piece in llm.stream("slow"):
            assert piece.text == "begun"
            assert texts(llm.generate("within")) == [["within 0!"]], "other calls go on beside a stream"
            break
        kinds = [cluster.received.get(timeout=TIMEOUT_S) for _ in range(5)]
        assert isinstance(kinds[-1], Abort) and kinds[-1].rid == kinds[2].rid


def test_threads_share_one(short_dir: Path) -> None:
    found: dict[int, Any] = {}
    with FakeFrontend(short_dir, answers, info=INFO), LLM.connect(short_dir) as llm:

        def work(i: int) -> None:
            found[i] = texts(llm.generate([f"{i}-{j}" for j in range(5)], use_tqdm=False))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert found == {i: [[f"{i}-{j} 0!"] for j in range(5)] for i in range(4)}


def test_a_cluster_that_dies_and_none_at_all(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster, LLM.connect(short_dir) as llm:
        stream = llm.stream("x")
        next(stream)
        cluster.close()
        with pytest.raises(ClusterError, match="its other end is gone"):
            next(stream)
    with pytest.raises(ClusterError, match="no cluster is running"):
        LLM.connect(short_dir)


def test_a_closed_llm_closes_its_connections(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with LLM.connect(short_dir) as llm:
                llm.generate("x")
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
