"""The demo model's corpus is pure and its chat format is the one its committed tokenizer renders."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from bench.demo_corpus import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    MAX_ANSWER_CHARS,
    SPECIAL_TOKENS,
    Entry,
    _docstrings,
    build_corpus,
    c_entries,
    chat_documents,
    is_held_out,
    questions,
    render_chat,
    shorten,
    split_sections,
)

CHECKPOINT = Path(__file__).parents[2] / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_sections_are_cut_at_headings_and_lose_nothing() -> None:
    text = "Intro line.\n\nThe first\n*********\n\nBody 1.\n\nSecond\n------\n\nBody 2."
    sections = list(split_sections(text))
    assert [title for title, _ in sections] == ["", "The first", "Second"]
    assert "\n\n".join(section for _, section in sections) == text


def test_text_without_headings_is_one_untitled_section() -> None:
    assert list(split_sections("Only a paragraph.")) == [("", "Only a paragraph.")]


def test_docstrings_carry_qualified_names_in_source_order() -> None:
    tree = ast.parse('"""M."""\nclass C:\n  """C."""\n  def f(self):\n    """F."""\nif 1:\n  def g():\n    """G."""\n')
    assert [(e.name, e.kind, e.text) for e in _docstrings(tree, "m")] == [
        ("m", "module", "M."), ("m.C", "class", "C."), ("m.C.f", "function", "F."), ("m.g", "function", "G."),
    ]  # fmt: skip


def test_c_modules_are_named_as_users_know_them() -> None:
    names = {entry.name for entry in c_entries([("builtins", ""), ("_bisect", "bisect")])}
    assert {"len", "str.upper", "bisect.bisect_left"} <= names


@pytest.mark.parametrize(
    ("entry", "first"),
    [
        (Entry('The "with" statement', "topic", ""), "Explain the `with` statement."),
        (Entry("len", "function", ""), "What does `len` do?"),
        (Entry("int", "class", ""), "What is `int`?"),
    ],
)
def test_questions_read_like_a_person_asks(entry: Entry, first: str) -> None:
    assert questions(entry)[0] == first


def test_nobody_asks_about_private_names() -> None:
    assert questions(Entry("json._default", "function", "")) == ()
    assert questions(Entry("", "topic", "")) == ()


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 60))
def test_shorten_gives_a_prefix_within_the_limit(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert text.startswith(short)
    assert len(short) <= limit or short == text[:limit]


def test_split_ignores_case_and_white_space() -> None:
    texts = [f"Return item number {i}." for i in range(2000)]
    assert all(is_held_out(t) == is_held_out(t.upper().replace(" ", "\n  ")) for t in texts)
    assert 0.03 < sum(map(is_held_out, texts)) / len(texts) < 0.07


def test_conversations_end_every_turn_and_the_document() -> None:
    entries = [Entry(f"m.f{i}", "function", f"Do thing {i}.\n\n" + "word " * 500) for i in range(16)]
    for document in chat_documents(entries):
        assert document.endswith("<|im_end|>\n" + END_OF_TEXT)
        assert document.count("<|im_start|>") == document.count("<|im_end|>") >= 2
        assert len(document) < MAX_ANSWER_CHARS + 200


@pytest.mark.soak
def test_the_corpus_is_the_same_twice_and_split_without_overlap() -> None:
    corpus = build_corpus()
    assert corpus == build_corpus()
    assert not set(corpus.train) & set(corpus.held_out)
    assert sum(map(len, corpus.train)) > 3_000_000
    assert all(document.endswith(END_OF_TEXT) for document in corpus.train + corpus.held_out + corpus.held_out_chat)


def test_the_template_renders_the_training_format() -> None:
    turns = [("system", "Be brief."), ("user", "What is `int`?"), ("assistant", "A class.")]
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert template.render(messages=messages) == render_chat(turns)
    assert template.render(messages=messages, add_generation_prompt=True).endswith("<|im_start|>assistant\n")
    committed = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert committed["chat_template"] == CHAT_TEMPLATE


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    ids = tokenizer.encode(render_chat([("user", "Hello")])).ids
    assert ids[0] == 1
    assert 2 in ids


@given(text=st.text(max_size=200))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
