"""Chat templates against transformers' apply_chat_template, and what happens to bad ones."""

import json
import tracemalloc
from functools import cache
from pathlib import Path

import jinja2
import pytest

from tests.helpers_tokenizers import CHATML, byte_level
from tokenizer_proc.chat_template import ChatTemplate, ChatTemplateError
from tokenizer_proc.tokenizer_files import load_chat_template, load_special_tokens

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}
        {%- set system = message['content'] | trim %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- if loop.last %}{{ '[' ~ loop.length ~ ' of ' ~ loop.index ~ ']' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}
{% set ns = namespace(users=0) %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% set ns.users = ns.users + 1 %}
[INST] {{ message['content'] }} [/INST]
    {% elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
{{ ns.users }} {{ messages | tojson }} {{ tools is none }} {{ unknown_thing }}
"""
# a model that also sees: what is no part of a content is not shown, or is an error
PARTS = """{% for message in messages %}
{{ message['role'] | capitalize }}:
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}{% endfor %}
{% endfor %}
{% if add_generation_prompt %}Assistant:{% endif %}
"""
STRICT_PARTS = """{% for message in messages %}
{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% else %}{{ raise_exception('no type') }}{% endif %}
{% endfor %}
{% endfor %}
"""
EITHER = """{% for message in messages %}
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content if part.type == 'text' %}in parts: {{ part.text }}{% endfor %}
{% endif %}
{% endfor %}
"""
SYSTEM, USER, ASSISTANT = (
    {"role": "system", "content": "  You are <b>kind</b> & brief. "},
    {"role": "user", "content": 'Grüße 🙂\n\nWhat\'s "up"?'},
    {"role": "assistant", "content": "All well."},
)
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@cache
def reference():  # type: ignore[no-untyped-def]
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama-3", "mistral"])
@pytest.mark.parametrize(
    "messages", [[USER], [USER, ASSISTANT, USER], [SYSTEM, USER]], ids=["one", "three", "with-system"]
)
def test_equal_to_transformers(template: str, messages: list[dict[str, str]]) -> None:
    ours = ChatTemplate(template, SPECIAL)
    if template is MISTRAL and SYSTEM in messages:
        with pytest.raises(ChatTemplateError, match="roles must alternate"):
            ours.render(messages, 10_000)
        return
    theirs = reference().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ours.render(messages, 10_000) == theirs


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages.nothing.at_all }}", "no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{{ 9 ** 99999999 }}", "too large"),
        ("{{ 'x' * 10 ** 12 }}", "too large"),
        ("{% set ns = namespace(n=7) %}{% for _ in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "too large"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "too long|RecursionError"),
    ],
)
def test_errors_say_what_went_wrong(template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(template, {}).render([USER], 1000)


@pytest.mark.soak
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for x in [[]] recursive %}{{ loop([x, x]) if loop.depth < 60 }}{% endfor %}",
    ],
    ids=["ranges", "one-range", "macros", "recursive"],
)
def test_endless_templates_end_at_a_number_of_steps(template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"too long|RecursionError"):
        ChatTemplate(template, {}).render([USER], 1000)


HUGE = "{% set ns = namespace(x=START) %}{% for _ in range(90) %}{% set ns.x = STEP %}{% endfor %}{{ USE }}"


def doubling(start: str, step: str, use: str = "ns.x|length") -> str:
    return HUGE.replace("START", start).replace("STEP", step).replace("USE", use)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x'|center(10 ** 10) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(99999999999) }}",
        "{{ 'a\nb'|indent(10 ** 9) }}",
        "{{ messages|tojson(indent=10 ** 9) }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%99999999999d'|format(1) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ [1]|batch(10 ** 9, 'x')|list }}",
        "{{ [1]|slice(10 ** 9)|list }}",
        "{{ ['x', 'y']|map('center', 10 ** 10)|list }}",
        "{{ ('x' * 10 ** 6)|replace('x', 'y' * 10 ** 6) }}",
        "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
        "{{ range(99999)|join('y' * 10 ** 6) }}",
        "{{ ('y' * 10 ** 6).join('x' * 10 ** 6) }}",
        doubling("'x'", "ns.x ~ ns.x"),
        doubling("'x'", "ns.x + ns.x"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("'xx'", "ns.x|replace('x', 'xx')"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x|string"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x|tojson"),
        doubling("[1]", "[ns.x, ns.x]", "'%s' % ns.x"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x ~ ''"),
        doubling("[1]", "{'a': ns.x, 'b': ns.x}", "ns.x"),
        doubling("1", "ns.x * 10 ** 300"),
        "{{ lipsum(10 ** 9) }}",
        "{% for i in range(90000) %}{% set _ = ('x' * 10 ** 6)|upper %}{% endfor %}",
    ],
)
def test_no_step_makes_something_huge(template: str) -> None:
    """Neither when it is compiled, where jinja2 computes what is constant, nor when it is rendered."""
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            ChatTemplate(template, {}).render([USER], 10**9)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**27
    finally:
        tracemalloc.stop()


def test_what_templates_need_is_not_refused() -> None:
    template = """{{ 'a' ~ 1 ~ none }}{{ 'x'|center(9) }}{{ '%05d' % 7 }}{{ '{:>4}'.format('é') }}
{{- [3, 1]|sort|join(', ') }}
{{- messages|map(attribute='role')|list|tojson(indent=2) }}{{ 'a b'|replace(' ', '_')|upper }}{{ 'Year 20241 %s' % 1 }}
{{- messages[0].content.split('?')[0]|trim|indent(2) }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ (1, 2)|first }}"""
    expected = jinja2.Environment().from_string(template).render(messages=[USER])
    assert ChatTemplate(template, {}).render([USER], 10_000) == expected


def test_long_output_is_cut_soon_after_the_limit() -> None:
    template = ChatTemplate("{% for i in range(99999) %}0123456789{% endfor %}", {})
    assert 1000 < len(template.render([USER], 1000)) < 1100


def test_a_template_that_cannot_be_compiled() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% if %}", {})


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert load_chat_template(tmp_path) == "processor's"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert load_chat_template(tmp_path) == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path) == "usual"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(tmp_path) == "file"


def test_special_tokens_as_text_or_as_objects(tmp_path: Path) -> None:
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True, "x": "y"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert load_special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [PARTS, STRICT_PARTS], ids=["parts", "strict parts"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER, ASSISTANT, USER]])
def test_templates_that_want_parts_get_parts(template, messages):
    expected = reference().apply_chat_template(
        [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages],
        chat_template=template, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert USER["content"] in expected
    assert ChatTemplate(template, SPECIAL).render(messages, 10**6) == expected


def test_a_message_in_parts_can_be_continued():
    text = ChatTemplate(PARTS, SPECIAL).render_open([USER, ASSISTANT], 10**6)
    assert text.endswith("Assistant: All well.")


def test_templates_that_take_both_get_text():
    assert ChatTemplate(EITHER, SPECIAL).render([USER], 10**6).strip() == USER["content"]


FIRST_ALONE = """{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
[{{ message.role }}]{{ message.content }}
{%- endfor %}"""
SHOWN_FIRST = """{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}
{%- for message in messages if message.role != 'system' %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
FIRST_PARTS = FIRST_ALONE.replace(
    "message.content", "(message.content | selectattr('type', 'eq', 'text') | first).text"
)


@pytest.mark.parametrize("template", [FIRST_ALONE, SHOWN_FIRST, FIRST_PARTS], ids=["refused", "left out", "in parts"])
@pytest.mark.parametrize("begun", [True, False], ids=["system", "user"])
def test_what_the_system_says_later_is_put_in_front_where_the_template_wants_it(template: str, begun: bool) -> None:
    system, later = {"role": "system", "content": "Be kind."}, {"role": "system", "content": "It is noon."}
    user, assistant = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    ours = ChatTemplate(template, {})
    said = "Be kind.\n\nIt is noon." if begun else "It is noon."
    expected = f"[system]{said}[user]Hi[assistant]Ho[user]Hi"
    messages = [*([system] if begun else []), user, assistant, later, user]
    assert ours.render(messages, 1000).replace("\n[", "[") == expected
    assert ours.render_open([*messages, assistant], 1000).endswith("Ho")
    assert messages[-2] is later, "what was given is as it was"


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama-3"])
def test_the_system_may_speak_later_where_the_template_lets_it(template: str) -> None:
    messages = [USER, ASSISTANT, SYSTEM, USER]
    theirs = reference().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(template, SPECIAL).render(messages, 10_000) == theirs
