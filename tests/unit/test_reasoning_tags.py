"""Reasoning between other tags than `<think>`, what stands around content, and how a template tells them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.parsers import THINK, Formats, Reasoning, ToolFormat, detect_formats, needs_special_tokens, tags_of
from common.parsers.reasoning import APERTUS, COHERE, GEMMA, HUNYUAN, HUNYUAN3, MISTRAL, SEED
from tests.helpers_parsers import parse, shown, split

TAGS = [THINK, HUNYUAN, HUNYUAN3, COHERE, GEMMA, SEED, MISTRAL, APERTUS]
ANSWERING, ANSWERED = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


@pytest.mark.parametrize("tags", TAGS)
def test_reasoning(tags):
    for tools in (None, *ToolFormat):
        if tools is ToolFormat.HARMONY:
            continue
        text = f"{tags.open}\nhm <b>\n{tags.close}\n\nYes {tags.close}."
        for pieces in ([text], text):
            assert shown(parse(pieces, tools, Reasoning.TAGS, tags=tags)) == [("think", "hm <b>"), f"Yes {tags.close}."]
        rest = text.removeprefix(tags.open)
        assert shown(parse([rest], tools, Reasoning.OPENED, tags=tags)) == [("think", "hm <b>"), f"Yes {tags.close}."]
        assert shown(parse([text], tools, Reasoning.OPENED, tags=tags, together=True)) == [text]
        assert shown(parse([f"a {text}"], tools, Reasoning.TAGS, tags=tags)) == [f"a {text}"]
    assert needs_special_tokens(None, Reasoning.TAGS, tags) == (tags not in (THINK, HUNYUAN))
    assert not needs_special_tokens(None, Reasoning.NONE, tags)


@pytest.mark.parametrize(
    ("tags", "text", "expected"),
    [
        (COHERE, f"{ANSWERING}Yes.{ANSWERED}", ["Yes."]),
        (COHERE, f"<|START_THINKING|>hm<|END_THINKING|>{ANSWERING} Yes. {ANSWERED}\n", [("think", "hm"), "Yes."]),
        (COHERE, "<|START_TEXT|>Yes. ", ["Yes. "]),
        (COHERE, f"Yes {ANSWERING}.", [f"Yes {ANSWERING}."]),
        (COHERE, "<|START_RES", ["<|START_RES"]),
        (HUNYUAN, "<think>\nhm\n</think>\n<answer>\nYes </b>\n</answer>", [("think", "hm"), "Yes </b>"]),
        (HUNYUAN, "<answer>\nYes.\n</answer> and", ["Yes. and"]),
        (HUNYUAN, "助手：Yes.", ["Yes."]),
        (HUNYUAN, " Yes <answer>\n", [" Yes <answer>\n"]),
    ],
)
def test_what_is_around_content_is_not_shown(tags, text, expected):
    for pieces in ([text], text):
        assert shown(parse(pieces, None, Reasoning.TAGS, tags=tags)) == expected


def test_calls_behind_what_is_around_content():
    call = '[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'
    for before, shows in (("", []), (f"{ANSWERING}Hm.{ANSWERED}", ["Hm."])):
        text = f"<|START_THINKING|>hm<|END_THINKING|>{before}<|START_ACTION|>{call}"
        found = shown(parse(text, ToolFormat.COHERE, Reasoning.TAGS, tags=COHERE))
        assert found == [("think", "hm"), *shows, ("f", "{}")]
    answer = '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'
    text = f"<think>\nhm\n</think>\n<answer>\n{answer}\n</answer>"
    assert shown(parse(text, ToolFormat.HUNYUAN, Reasoning.TAGS, tags=HUNYUAN)) == [("think", "hm"), ("f", "{}")]


@pytest.mark.parametrize(
    ("tools", "tags", "call"),
    [
        (ToolFormat.MISTRAL, MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
        (ToolFormat.COHERE, COHERE, '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>'),
        (ToolFormat.SEED, SEED, "<seed:tool_call><function=f></function></seed:tool_call>"),
        (ToolFormat.APERTUS, APERTUS, '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'),
        (
            ToolFormat.HUNYUAN3,
            HUNYUAN3,
            "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource></tool_call:opensource>",
        ),
    ],
)
def test_a_call_ends_reasoning_that_was_not_closed(tools, tags, call):
    for text in (f"{tags.open}hm\n{call}", f"{tags.open}hm{tags.close}{call}"):
        for pieces in ([text], text):
            assert shown(parse(pieces, tools, Reasoning.TAGS, tags=tags)) == [("think", "hm"), ("f", "{}")]


PIECES = [*(mark for tags in TAGS for mark in (tags.open, tags.close, *(m for pair in tags.around for m in pair)))]
TEXTS = st.lists(st.sampled_from([*filter(None, PIECES), " ", "\n", "text", "<", "[", "é🙂"]), max_size=16).map("".join)


@given(TEXTS, st.lists(st.integers(0, 10**6), max_size=20), st.sampled_from(TAGS), st.booleans())
def test_a_split_changes_nothing(text, points, tags, together):
    for tools in (None, ToolFormat.COHERE, ToolFormat.GEMMA):
        for reasoning in (Reasoning.NONE, Reasoning.TAGS, Reasoning.OPENED):
            more = {"tags": tags, "together": together}
            whole = parse([text], tools, reasoning, **more)
            assert parse(split(text, points), tools, reasoning, **more) == whole
            assert parse(text, tools, reasoning, **more) == whole, "character by character"


@pytest.mark.parametrize(
    ("template", "tools", "tags"),
    [
        ("{{ '<|tool_call>call:' }}{{ '<|channel>thought\\n<channel|>' }}", ToolFormat.GEMMA, GEMMA),
        ("{{ '<｜tool▁calls▁begin｜>' }}</think>", ToolFormat.DEEPSEEK, THINK),
        ('{% set dsml_token = "｜DSML｜" %}<{{ dsml_token }}function_calls></think>', ToolFormat.DSML, THINK),
        ("<|tool_calls_section_begin|><think></think>", ToolFormat.KIMI, THINK),
        ("<minimax:tool_call>\n<invoke name=", ToolFormat.MINIMAX, None),
        ("<seed:tool_call>\n<function=f>{{ '</seed:think>' }}<seed:think>", ToolFormat.SEED, SEED),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", ToolFormat.COHERE, COHERE),
        ("<tool_calls>[{}]</tool_calls><|extra_0|><think>\\n\\n</think>", ToolFormat.HUNYUAN, HUNYUAN),
        ("{{ '<|tool_call_start|>[' }}<think></think>", ToolFormat.PYTHONIC, THINK),
        ("<function_calls>\nget_weather(city='New York')\n</function_calls>", ToolFormat.PYTHONIC, None),
        ("Use exact format: [func_name1(param1=value1, param2=value2)]<|start_header_id|>", ToolFormat.PYTHONIC, None),
        ("<|header_start|>assistant<|header_end|>{'name': ", ToolFormat.PYTHONIC, None),
        ('{% set s = "List of tools: <|tool_list_start|>[" %}', ToolFormat.PYTHONIC, None),
        ('{% set s = "List of tools: [" %}<think></think>', ToolFormat.PYTHONIC, THINK),
        ("<start_function_call>call:f{}<end_function_call>", ToolFormat.FUNCTION_GEMMA, None),
        ("within <tool_call></tool_call> tags: <tool_calls>[{}]</tool_calls>", ToolFormat.HUNYUAN, None),
        ("<TOOLCALL>[{}]</TOOLCALL><think></think>", ToolFormat.HUNYUAN, THINK),
        ("{{ '<tool_sep{}>'.format(x) }}{{ '<think{}>'.format(x) }}", ToolFormat.HUNYUAN3, HUNYUAN3),
        ("<|inner_prefix|><|inner_suffix|><|tools_prefix|>[", ToolFormat.APERTUS, APERTUS),
        ("[THINK][/THINK][TOOL_CALLS]", ToolFormat.MISTRAL, MISTRAL),
    ],
)
def test_formats_from_the_template(template, tools, tags):
    reasoning = Reasoning.NONE if tags is None else Reasoning.TAGS
    assert detect_formats(template, prompt="user: hello") == Formats(tools, reasoning, tags or THINK)
    assert detect_formats(template, takes_tools=False).tools is ToolFormat.HERMES
    assert tags_of(template) == tags


def test_where_a_prompt_ends():
    for tags in TAGS:
        template = f"{tags.open} {tags.close}<|extra_0|>" + "".join(mark for pair in tags.around for mark in pair)
        opened, closed = f"{tags.open}\n", f"{tags.open}\n{tags.close}\n"
        none = Reasoning.TAGS if tags.special else Reasoning.NONE  # special tokens are never text
        for end, reasoning in (("", Reasoning.TAGS), (opened, Reasoning.OPENED), (closed, none)):
            assert detect_formats(template, prompt=f"hi{end}").reasoning is reasoning
        assert detect_formats(template, thinking=False).reasoning is none
    budget = "<seed:think><seed:cot_budget_reflect>"
    assert detect_formats(budget, prompt=budget).reasoning is Reasoning.OPENED
