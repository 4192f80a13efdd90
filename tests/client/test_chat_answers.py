"""Chats with models that reason, over the cluster's own socket: what is asked, and reasoning apart from answers."""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat_answers import ChatFormat, is_read
from common.connection import Row
from common.fields import FieldError
from common.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from common.messages import Abort, ChatMessage, Finish, Generate, Info
from common.parsers import THINK, Reasoning
from common.parsers.reasoning import COHERE
from common.sampling_params import Grammar, SamplingParams
from rhizome import LLM, AsyncLLM
from rhizome import SamplingParams as Params
from tests.client.client_runs import run
from tests.client.fake_openai import FakeOpenAI
from tests.client.test_chat_command import Terminal, contents
from tests.helpers_parsers import split
from tests.helpers_templates import HARMONY, LLAMA31, MISTRAL, QWEN3
from tests.unit.fake_frontend import FakeFrontend, rows
from tests.unit.frontend_world import INFO
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.prompt import prompt_end

TAGGED = "<think>\nhm, well\n</think>\n\nYes. <b>"
CHANNELS = f"{CHANNEL}analysis{MESSAGE}hm, well{END}{START}assistant{CHANNEL}final{MESSAGE}Yes. <b>"
FORMATS = {
    Reasoning.NONE: "hm, wellYes. <b>",
    Reasoning.TAGS: TAGGED,
    Reasoning.OPENED: TAGGED.removeprefix("<think>"),
    Reasoning.CHANNEL: CHANNELS,
}
CHAT = [ChatMessage("user", "hi")]
ASKED = [{"role": "user", "content": "hi"}]
HARMONIC, THINKING = replace(INFO, chat_template=HARMONY), replace(INFO, chat_template=QWEN3)
Answer = Callable[[Any], Iterable[Any]]


@given(st.sampled_from(sorted(FORMATS, key=str)), st.lists(st.integers(0, 10**6), max_size=20))
def test_rows_are_read_however_they_are_cut(reasoning: Reasoning, points: list[int]) -> None:
    reader = ChatFormat(reasoning).reader(2)
    texts = split(FORMATS[reasoning], points)
    found = []
    for i, text in enumerate(texts):
        for choice in range(2):
            assert not reader.ended
            finish = Finish.STOP if i == len(texts) - 1 else Finish.NONE
            found.append(reader.read(Row(7, choice, text, [5], finish, 3, 0, (), 0)))
    assert reader.ended
    for choice in range(2):
        own = [row for row in found if row.choice == choice]
        expected = ("", "hm, wellYes. <b>") if reasoning is Reasoning.NONE else ("hm, well", "Yes. <b>")
        assert ("".join(row.reasoning for row in own), "".join(row.text for row in own)) == expected
        assert [(row.token_ids, row.finish) for row in own][-1] == ([5], Finish.STOP) and len(own) == len(texts)


def test_which_answers_are_read() -> None:
    plain, raw = SamplingParams(), SamplingParams(skip_special_tokens=False)
    assert is_read(CHAT, plain) and not is_read(CHAT, raw)
    assert not any(is_read(prompt, plain) for prompt in ("hi", "", [5, 6], []))


def test_what_is_asked_for() -> None:
    params = SamplingParams(seed=3, grammar=Grammar("regex", "a+"))
    assert (
        ChatFormat.of_model(replace(INFO, chat_template="")).asked(params)
        == ChatFormat(Reasoning.NONE).asked(params)
        == params
    )
    tags = ChatFormat.of_model(replace(INFO, chat_template=QWEN3)).asked(params)
    assert tags == replace(params, grammar=Grammar("regex", "a+", "<think>", "</think>"))
    channels = ChatFormat.of_model(replace(INFO, chat_template=HARMONY)).asked(params)
    assert channels.skip_special_tokens is False and channels.seed == 3
    assert channels.grammar is not None and channels.grammar.heading == "<|channel|>final<|message|>"
    own = replace(params, grammar=Grammar("regex", "a+", closing="</x>"))
    assert ChatFormat.of_model(replace(INFO, chat_template=HARMONY)).asked(own).grammar == own.grammar
    shown = replace(params, include_stop_str_in_output=True)
    assert ChatFormat.of_model(replace(INFO, chat_template=QWEN3)).asked(shown).include_stop_str_in_output
    with pytest.raises(FieldError, match="include_stop_str_in_output"):
        ChatFormat.of_model(replace(INFO, chat_template=HARMONY)).asked(shown)


def saying(text: str) -> Answer:
    """Answer every choice with a text, a character and a token at a time; `wait` stops before the last."""

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Abort):
            yield rows(msg.rid, "", finish=Finish.ABORT)
        elif isinstance(msg, Generate):
            for choice in range(msg.n):
                for letter in text[:-1]:
                    yield rows(msg.rid, letter, 5, choice=choice)
                if not (msg.chat and msg.chat[-1].content == "wait"):
                    yield rows(msg.rid, text[-1], 5, choice=choice, finish=Finish.STOP)

    return answer


@pytest.mark.parametrize(("info", "text"), [(HARMONIC, CHANNELS), (THINKING, TAGGED)], ids=["harmony", "think"])
def test_the_client_prints_answers(short_dir: Path, info: Info, text: str) -> None:
    here = ("--run-dir", str(short_dir / "run"))
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED}}
    (short_dir / "in").write_text(json.dumps(batch) + "\n")
    with FakeFrontend(short_dir / "run", saying(text), info=info) as cluster:
        assert run("hi", "--chat", *here).stdout == "Yes. <b>\n"
        assert cluster.next(Generate).params.skip_special_tokens is (info is THINKING)
        assert run("hi", "--chat", "--n", "2", *here).stdout == "--- 1/2\nYes. <b>\n--- 2/2\nYes. <b>\n"
        result = json.loads(run("hi", "--chat", "--json", "--n", "2", *here).stdout)
        assert (result["reasoning"], result["text"]) == ("hm, well", "Yes. <b>") and len(result["token_ids"]) == len(
            text
        )
        assert [choice["reasoning"] for choice in result["choices"]] == ["hm, well"] * 2
        assert run("hi", "--chat", "--keep-special-tokens", *here).stdout == text + "\n"
        assert run("hi", *here).stdout == text + "\n", "a prompt that is no chat"
        assert run("chat", *here, stdin="one\ntwo\n").stdout == "Yes. <b>\nYes. <b>\n"
        while (last := cluster.next(Generate)).chat is None or len(last.chat) < 3:
            pass
        assert contents(last) == [("user", "one"), ("assistant", "Yes. <b>"), ("user", "two")]
        assert run("batch", str(short_dir / "in"), str(short_dir / "out"), *here).returncode == 0
    body = json.loads((short_dir / "out").read_text())["response"]["body"]
    thought = {"reasoning": "hm, well", "reasoning_content": "hm, well"}
    expected = {"role": "assistant", "content": "Yes. <b>", **thought}
    assert body["choices"][0]["message"] == expected


@pytest.mark.parametrize(("term", "dim", "bright"), [("xterm", "\x1b[2m", "\x1b[22m"), ("dumb", "", "")])
def test_a_terminal_shows_reasoning_apart(short_dir: Path, term: str, dim: str, bright: str) -> None:
    with FakeFrontend(short_dir, saying(CHANNELS), info=HARMONIC) as cluster:
        terminal = Terminal("chat", "--run-dir", str(short_dir), term=term)
        terminal.wait_for("> ")
        terminal.type("hi\n")
        for letter in "hm, well":
            terminal.wait_for(f"{dim}{letter}{bright}")
        terminal.wait_for("\r\n\r\nYes. <b>")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.close() == 0
        cluster.next(Generate)


def test_over_http_a_terminal_shows_what_the_server_tells_apart() -> None:
    with FakeOpenAI() as server:
        terminal = Terminal("complete", "think", "--chat", "--url", server.url, term="xterm")
        terminal.wait_for("\x1b[2mhm\x1b[22m\x1b[2mm\x1b[22m\r\n\r\nthink")
        assert terminal.close() == 0
        assert run("think", "--chat", "--url", server.url).stdout == "think\n"


def test_an_answer_that_is_stopped_in_its_reasoning_is_taken_back(short_dir: Path) -> None:
    with FakeFrontend(short_dir, saying(CHANNELS.partition(END)[0]), info=HARMONIC) as cluster:
        terminal = Terminal("chat", "--run-dir", str(short_dir))
        terminal.wait_for("> ")
        terminal.type("wait\n")
        terminal.wait_for("hm, wel")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        terminal.wait_for("> ")
        terminal.type("again\n")
        terminal.wait_for("hm, well")
        terminal.type("/exit\n")
        assert terminal.close() == 0
        cluster.next(Generate)
        cluster.next(Abort)
        assert contents(cluster.next(Generate)) == [("user", "again")]


@pytest.mark.parametrize(("info", "text"), [(HARMONIC, CHANNELS), (THINKING, TAGGED)], ids=["harmony", "think"])
def test_the_python_api(short_dir: Path, info: Info, text: str) -> None:
    with FakeFrontend(short_dir, saying(text), info=info), LLM.connect(short_dir) as llm:
        (found,) = llm.chat(ASKED, Params(n=2))
        assert [(answer.text, answer.reasoning) for answer in found.outputs] == [("Yes. <b>", "hm, well")] * 2
        assert len(found.outputs[0].token_ids) == len(text)
        pieces = list(llm.stream(ASKED))
        assert "".join(piece.reasoning for piece in pieces) == "hm, well" and pieces[-1].finish_reason == "stop"
        assert "".join(piece.text for piece in pieces) == "Yes. <b>" and len(pieces) == len(text)
        (raw,) = llm.chat(ASKED, Params(skip_special_tokens=False))
        (plain,) = llm.generate("hi")
        assert [(o.outputs[0].text, o.outputs[0].reasoning) for o in (raw, plain)] == [(text, None)] * 2


def test_the_python_api_with_asyncio(short_dir: Path) -> None:
    async def use() -> None:
        async with AsyncLLM.connect(short_dir) as llm:
            outputs = await llm.chat([ASKED, ASKED])
            assert [(o.outputs[0].text, o.outputs[0].reasoning) for o in outputs] == [("Yes. <b>", "hm, well")] * 2
            pieces = [piece async for piece in llm.stream(ASKED)]
            assert "".join(piece.reasoning for piece in pieces) == "hm, well"
            assert "".join(piece.text for piece in pieces) == "Yes. <b>"
            assert (await llm.generate("hi"))[0].outputs[0].text == CHANNELS
            await llm.chat(ASKED, tools=TOOLS)
            with pytest.raises(ValueError, match="prompt 0: include_stop_str_in_output: does not go with"):
                await llm.chat([ASKED, ASKED], Params(include_stop_str_in_output=True))

    with FakeFrontend(short_dir, saying(CHANNELS), info=HARMONIC) as cluster:
        asyncio.run(use())
        assert [bool(cluster.next(Generate).tools) for _ in range(5)] == [False] * 4 + [True]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = f"{CHANNEL}analysis{MESSAGE}hm{END}{START}assistant"
TO_F = f"{START}assistant{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}" + '{"x": 1}'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (HARMONY, CALLED + TO_F.removeprefix(f"{START}assistant")),
        (QWEN3, '<think>hm</think><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]'),
        (LLAMA31, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}'),
    ],
    ids=["harmony", "hermes", "mistral", "llama"],
)
def test_calls_are_text_as_the_model_wrote_them(short_dir: Path, template: str, written: str) -> None:
    """With marks that may be special tokens, so that what calls is told from what is said."""
    expected = TO_F if template == HARMONY else written.removeprefix("<think>hm</think>")
    thought = "hm" if "hm" in written else None
    (short_dir / "tools").write_text(json.dumps(TOOLS))
    with FakeFrontend(short_dir / "run", saying(written), info=replace(INFO, chat_template=template)) as cluster:
        with LLM.connect(short_dir / "run") as llm:
            (output,) = llm.chat(ASKED, Params(max_tokens=900), tools=TOOLS)
            sent = cluster.next(Generate)
            assert (json.loads(sent.tools), sent.params.skip_special_tokens) == (TOOLS, False)
            assert (output.outputs[0].text, output.outputs[0].reasoning) == (expected, thought)
            pieces = list(llm.stream(ASKED, tools=TOOLS))
            assert "".join(piece.text for piece in pieces) == expected
        flags = ("--tools", str(short_dir / "tools"), "--run-dir", str(short_dir / "run"))
        assert run("hi", "--chat", *flags).stdout == run("chat", *flags, stdin="hi").stdout == expected + "\n"
        cluster.next(Generate)
        assert [json.loads(cluster.next(Generate).tools) for _ in range(2)] == [TOOLS] * 2


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("[", "--tools: not JSON"),
        ("5", "tools: must be a list"),
        ('[{"function": {}}]', "tools[0].function.name: is missing"),
    ],
)
def test_bad_tools_are_refused_before_anything_is_sent(tmp_path: Path, tools: str, said: str) -> None:
    (tmp_path / "tools").write_text(tools)
    for command in (("chat",), ("hi", "--chat")):
        ended = run(*command, "--tools", str(tmp_path / "tools"))
        assert ended.returncode == 2 and said in ended.stderr, ended.stderr
    (tmp_path / "tools").write_text(json.dumps(TOOLS))
    assert "--tools needs --chat." in run("hi", "--tools", str(tmp_path / "tools")).stderr


def test_what_does_not_go_with_the_model_is_refused_as_the_cluster_refuses(short_dir: Path) -> None:
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
             "body": {"messages": ASKED, "include_stop_str_in_output": True}}  # fmt: skip
    (short_dir / "in").write_text(json.dumps(batch) + "\n")
    (short_dir / "lines").write_text(json.dumps({"messages": ASKED}) + '\n{"prompt": "x"}\n')
    said = "include_stop_str_in_output: does not go with chats of this model"
    with FakeFrontend(short_dir / "run", saying(CHANNELS), info=HARMONIC):
        here = ("--run-dir", str(short_dir / "run"))
        for command in (("hi", "--chat", "--include-stop"), ("chat", "--include-stop")):
            ended = run(*command, *here, stdin="hi\n")
            assert ended.returncode == 1 and f"Error: {said}\n" in ended.stderr and "Traceback" not in ended.stderr
        lines = run("--jsonl", str(short_dir / "lines"), "--include-stop", *here)
        assert lines.returncode == 1 and "Traceback" not in lines.stderr
        bad, good = map(json.loads, lines.stdout.splitlines())
        assert bad["error"] == {"code": "invalid", "message": said} and good["text"] == CHANNELS
        assert run("batch", str(short_dir / "in"), str(short_dir / "out"), *here).returncode == 1
    assert json.loads((short_dir / "out").read_text())["response"]["status_code"] == 400


def test_tools_do_not_work_over_http(short_dir: Path) -> None:
    (short_dir / "tools").write_text(json.dumps(TOOLS))
    (short_dir / "lines").write_text(json.dumps({"messages": ASKED, "tools": TOOLS}))
    with FakeOpenAI() as server:
        for command in (("hi", "--chat"), ("chat",)):
            ended = run(*command, "--tools", str(short_dir / "tools"), "--url", server.url)
            assert ended.returncode == 2 and "--tools does not work over HTTP" in ended.stderr
        ended = run("--jsonl", str(short_dir / "lines"), "--url", server.url)
    assert ended.returncode == 1 and "tools: do not work over HTTP" in ended.stderr


def test_the_options_of_a_chat_say_how_its_answer_is_read() -> None:
    params = SamplingParams(grammar=Grammar("regex", "a+"))
    opened = "{{ messages[0].content }}{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    for template, options, expected in (
        (QWEN3, {"template_args": '{"enable_thinking": true}'}, ChatFormat(Reasoning.TAGS)),
        (QWEN3, {"template_args": '{"enable_thinking": false}'}, ChatFormat(Reasoning.NONE)),
        (opened, {}, ChatFormat(Reasoning.OPENED)),
        (opened, {"template_args": '{"other": 1}'}, ChatFormat(Reasoning.OPENED)),
        (opened, {"add_generation_prompt": False}, ChatFormat(Reasoning.TAGS)),
        (
            opened,
            {"add_generation_prompt": False, "continue_final_message": True},
            ChatFormat(Reasoning.TAGS, None, True),
        ),
    ):
        info = replace(INFO, chat_template=template, prompt_end="Hello<think>" if template == opened else "assistant\n")
        found = ChatFormat.of_model(info, **options)  # type: ignore[arg-type]
        assert found == expected, options
        assert found.goes_on == (found.asked(params) == params) or found.reasoning is Reasoning.NONE


def test_a_model_thinks_where_its_prompts_end_so() -> None:
    """What a template does without its switch is known from what it renders, not from its text."""
    for switch, expected in (("false", Reasoning.NONE), ("true", Reasoning.OPENED)):
        source = "{% if not thinking is defined %}{% set thinking = " + switch + " %}{% endif %}"
        source += "{{ messages[0].content }}{% if add_generation_prompt %}"
        source += "{{ '<think>' if thinking else '</think>' }}{% endif %}"
        info = replace(INFO, chat_template=source, prompt_end=prompt_end(ChatTemplate(source, {})))
        assert info.prompt_end in ("Hello<think>", "Hello</think>")
        assert ChatFormat.of_model(info) == ChatFormat(expected)
    refusing = ChatTemplate("{{ raise_exception('no') }}", {})
    assert prompt_end(refusing) == prompt_end(None) == prompt_end("no template") == ""


def test_under_a_grammar_special_tags_are_not_looked_for() -> None:
    opened = ChatFormat(Reasoning.OPENED, tags=COHERE)
    free, bound = SamplingParams(), SamplingParams(grammar=Grammar("json_object"))
    assert not opened.under(free).asked(free).skip_special_tokens
    form = opened.under(bound)
    assert form.asked(bound).grammar == Grammar("json_object") and form.asked(bound).skip_special_tokens
    assert form.reader(1).read(Row(7, 0, "{}", [5], Finish.STOP, 3, 0, (), 0)).text == "{}"
    for kept, params in (
        (opened, SamplingParams(grammar=Grammar("json_object", closing="</x>"))),
        (ChatFormat(Reasoning.OPENED, tags=THINK), bound),
    ):
        assert kept.under(params) == kept
