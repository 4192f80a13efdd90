"""The text the demo model learns from: Python's own documentation, read from the running interpreter.

Sources, all shipped with CPython under the PSF licence: the language reference as `pydoc_data/topics.py`, the
docstrings of the standard library (parsed with `ast`, the modules are not imported), and the docstrings of a fixed
list of modules written in C, which have no source to parse and are imported for that.

Everything here is pure and ordered, so one interpreter always gives one corpus. Another Python version gives a
slightly different one.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # their token ids are their positions here

# Must render what `render_chat` renders; tests/unit/test_demo_corpus.py compares the two.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Tests say little in words, and the generated codecs repeat one sentence a hundred times.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "turtledemo", "__pycache__"}
)
# (module to import, name to show): implemented in C, so `ast` finds nothing of them.
C_MODULES = (
    ("builtins", ""), ("_bisect", "bisect"), ("_collections", "collections"), ("_csv", "csv"),
    ("_functools", "functools"), ("_heapq", "heapq"), ("_io", "io"), ("_operator", "operator"),
    ("_random", "random"), ("_socket", "socket"), ("_struct", "struct"), ("_thread", "threading"),
    ("array", "array"), ("atexit", "atexit"), ("binascii", "binascii"), ("cmath", "cmath"), ("errno", "errno"),
    ("gc", "gc"), ("itertools", "itertools"), ("marshal", "marshal"), ("math", "math"), ("posix", "os"),
    ("select", "select"), ("signal", "signal"), ("sys", "sys"), ("time", "time"),
    ("unicodedata", "unicodedata"), ("zlib", "zlib"),
)  # fmt: skip
# Modules with a private name that everyone knows by another.
PUBLIC_NAMES = {
    "_pydecimal": "decimal", "_pyio": "io", "_pydatetime": "datetime", "_collections_abc": "collections.abc",
}  # fmt: skip

MIN_CHARS = 24  # shorter docstrings are names more than sentences
# Sections repeat in several topics with other underlines and footnote numbers: their beginnings are compared.
TOPIC_KEY_CHARS = 200
MAX_ANSWER_CHARS = 1000  # a chat answer with its question stays well under 1024 tokens
HELD_OUT_PERCENT = 5

Kind = Literal["topic", "module", "class", "function"]

SYSTEM_PROMPT = "You explain the Python programming language."
# Written for this project: what a newcomer types first is not in any docstring.
SMALL_TALK = (
    ("Hello", "Hello. I know a little about Python. Ask me what a function does."),
    ("Hi!", "Hello. I know a little about Python. Ask me what a function does."),
    ("Who are you?", "I am a very small language model, trained on the documentation of Python."),
    ("What can you do?", "I can continue text in the style of the documentation of Python."),
    ("Thank you.", "You are welcome."),
)
SMALL_TALK_COPIES = 12

_UNDERLINE = re.compile(r"(?m)^(?P<title>\S.*)\n(?P<line>\*{3,}|={3,}|-{3,})\n")
_RULE = re.compile(r"[*=-]{3,}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of documentation: a docstring, or one section of a language reference topic."""

    name: str  # qualified name (`textwrap.dedent`) or section title (`The "with" statement`)
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as strings, each ending with `<|endoftext|>`, split by entry."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]  # plain documents
    held_out_chat: tuple[str, ...]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def is_held_out(text: str) -> bool:
    """Whether an entry belongs to the held-out split; equal texts (but for white space and case) go together."""
    return _digest(" ".join(text.lower().split())) % 100 < HELD_OUT_PERCENT


def split_sections(text: str) -> Iterator[tuple[str, str]]:
    """Cut a reference topic at its underlined headings into (title, section text with its title line)."""
    matches = list(_UNDERLINE.finditer(text))
    if not matches or matches[0].start() > 0:
        yield "", text[: matches[0].start() if matches else len(text)].strip()
    ends = [following.start() for following in matches[1:]] + [len(text)]
    for match, end in zip(matches, ends, strict=False):  # one end too many if there is no heading
        yield match["title"].strip(), text[match.start() : end].strip()


def topic_entries() -> Iterator[Entry]:
    """The language reference, section by section."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for _, text in sorted(topics.items()):
        for title, section in split_sections(text.strip()):
            yield Entry(title, "topic", section)


def _docstrings(node: ast.AST, name: str) -> Iterator[Entry]:
    """Docstrings of `node` and of the public and special names in it, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        kind: Kind = "function"
        if isinstance(node, ast.Module | ast.ClassDef):
            kind = "module" if isinstance(node, ast.Module) else "class"
        if text := ast.get_docstring(node):
            yield Entry(name, kind, text)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")
            elif isinstance(child, ast.If | ast.Try):  # definitions behind a platform check
                for grandchild in child.body:
                    yield from _docstrings(grandchild, f"{name}.{getattr(grandchild, 'name', '')}")


def source_entries(stdlib: Path) -> Iterator[Entry]:
    """Docstrings of every module under `stdlib`, in sorted path order; files that do not parse are left out."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            module = ".".join(p for p in parts if p != "__init__")
            yield from _docstrings(tree, PUBLIC_NAMES.get(module, module))


def c_entries(modules: Iterable[tuple[str, str]] = C_MODULES) -> Iterator[Entry]:
    """Docstrings of modules written in C: functions, classes and their members."""
    for module_name, shown in modules:
        if importlib.util.find_spec(module_name) is None:
            continue
        module = importlib.import_module(module_name)
        prefix = f"{shown}." if shown else ""
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value):
                continue
            kind: Kind = "class" if isinstance(value, type) else "function"
            if isinstance(doc := value.__doc__, str):
                yield Entry(prefix + name, kind, inspect.cleandoc(doc))
            if isinstance(value, type):
                for member_name, member in sorted(vars(value).items()):
                    if isinstance(doc := getattr(member, "__doc__", None), str) and callable(member):
                        yield Entry(f"{prefix}{name}.{member_name}", "function", inspect.cleandoc(doc))


def collect_entries() -> tuple[Entry, ...]:
    """All entries of the running interpreter in a fixed order, the first of equal texts only."""
    entries: list[Entry] = []
    seen: set[str] = set()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for source in (topic_entries(), c_entries(), source_entries(stdlib)):
        for entry in source:
            text = "\n".join(line.rstrip() for line in entry.text.strip().splitlines())
            key = " ".join(text.lower().split())
            if entry.kind == "topic":
                key = _RULE.sub("", key)[:TOPIC_KEY_CHARS]
            if len(key) >= MIN_CHARS and key not in seen and not any(token in text for token in SPECIAL_TOKENS):
                seen.add(key)
                entries.append(Entry(entry.name, entry.kind, text))
    return tuple(entries)


def questions(entry: Entry) -> tuple[str, ...]:
    """Questions whose answer is `entry`; none if nobody would ask (private names, untitled sections).

    Language topics and builtins get two, because they are asked most; others get one, its phrasing chosen by the name.
    """
    if entry.kind == "topic":
        title = entry.name[:1].lower() + entry.name[1:] if entry.name[1:2].islower() else entry.name
        title = title.replace('"', "`")
        other = f"What does {title} do?" if title.endswith("statement") else f"Tell me about {title}."
        return (f"Explain {title}.", other) if title else ()
    if any(part.startswith("_") for part in entry.name.split(".")):
        return ()
    name = f"`{entry.name}`"
    if entry.kind == "function":
        choices: tuple[str, ...] = (f"What does {name} do?", f"Explain {name}.", f"How do I use {name}?")
    else:
        choices = (f"What is {name}?", f"Explain {name}.", f"What is the {entry.kind} {name} for?")
    if "." not in entry.name:
        return choices[:2]
    # The first phrasing is the one people use: every second entry has it.
    return (choices[max(0, _digest(name) % 4 - 1)],)


def shorten(text: str, limit: int = MAX_ANSWER_CHARS) -> str:
    """The longest prefix of whole paragraphs within `limit` characters (at least the first, cut at a line)."""
    if len(text) <= limit:
        return text
    for separator in ("\n\n", "\n", " "):
        if (cut := text.rfind(separator, 0, limit)) > 0:
            return text[:cut].rstrip()
    return text[:limit]


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """(role, content) turns as the chat template of the model renders them."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)


def chat_documents(entries: Iterable[Entry]) -> Iterator[str]:
    """One conversation per question; every eighth has a system turn, every fifth goes on with the next question."""
    pairs = [(asked, shorten(entry.text)) for entry in entries for asked in questions(entry)]
    for index, (asked, answer) in enumerate(pairs):
        turns = [("user", asked), ("assistant", answer)]
        if index % 8 == 0:
            turns.insert(0, ("system", SYSTEM_PROMPT))
        if index % 5 == 0 and index + 1 < len(pairs) and len(answer) < MAX_ANSWER_CHARS // 2:
            following, next_answer = pairs[index + 1]
            turns += [("user", following), ("assistant", next_answer)]
        yield render_chat(turns) + END_OF_TEXT


def build_corpus() -> Corpus:
    """Plain documents and conversations of the running interpreter's documentation, split by entry."""
    train: list[Entry] = []
    held_out: list[Entry] = []
    for entry in collect_entries():
        (held_out if is_held_out(entry.text) else train).append(entry)
    small_talk = [render_chat([("user", q), ("assistant", a)]) + END_OF_TEXT for q, a in SMALL_TALK]
    return Corpus(
        train=(*(e.text + END_OF_TEXT for e in train), *chat_documents(train), *small_talk * SMALL_TALK_COPIES),
        held_out=tuple(e.text + END_OF_TEXT for e in held_out),
        held_out_chat=tuple(chat_documents(held_out)),
    )
