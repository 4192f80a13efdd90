"""Chat templates: a conversation to the text of a prompt, as transformers' apply_chat_template renders it.

A template is a program that came with the model. It runs in jinja2's sandbox (no attribute of Python's internals, no
change of what it is given), with a budget of steps: loop iterations, calls, filters, and the size of what they make.
The budget ends endless loops and recursion at the same place every time, and no single operation may make something
huge (template_guards.py).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from tokenizer_proc.conversation import system_in_front
from tokenizer_proc.template_guards import (
    CONCAT,
    Guard,
    check_binop,
    check_call,
    check_size,
    concatenated,
    shown,
    steps,
)

MAX_STEPS = 2_000_000  # of one rendering: a few seconds at most; a loop iteration is one step
CALL_STEPS = 10  # a call takes about as long as ten iterations
MAX_ITEMS = 2**20  # of what a filter makes one by one
_MARK = "\ue000\ue001\ue002"  # for private use: no conversation holds it
_TRIAL_CHARS = 2**20  # of a prompt that tries the template out
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT = {"role": "tool", "content": "", "tool_call_id": "call00000", "name": "f"}
_ONE_CALL = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT)
_TWO_CALLS = (_ONE_CALL[0], {**_ONE_CALL[1], "tool_calls": [_CALL, _CALL]}, _RESULT, _RESULT)
_GLOBALS = ("raise_exception", "strftime_now", "dict", "namespace", "range", "cycler", "joiner")
_BUDGET = "step budget"  # not an identifier: no template can name it


class ChatTemplateError(ValueError):
    """The template refuses the conversation, is wrong, or runs too long."""


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError when it cannot be compiled.

    `variables` are those that it uses, but for special tokens; with `one_call` it takes no more calls in a message.
    Messages have their content as text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - set(special_tokens) - set(_GLOBALS)
            self._template = environment.from_string(Guard().visit(tree))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._in_parts = self._system_first = False
        # Those of models that also see want a message's text as one of its parts, and show nothing of it otherwise.
        if "type" in source:
            self._in_parts = not self._shows(_said("user")) and self._shows({"role": "user", "content": _parts(_MARK)})
        # Many refuse what the system says behind others, or leave it out: agents say things there.
        if "system" in source and not self._shows(
            _said("system", ""), _said("user", ""), _said("system"), _said("user", "")
        ):
            self._system_first = self._shows(_said("system"), _said("user", ""))

        self.one_call = "tool_calls" in source and self._refuses(*_TWO_CALLS) and not self._refuses(*_ONE_CALL)

    def _refuses(self, *messages: dict[str, Any]) -> bool:
        try:
            self.render(list(messages), _TRIAL_CHARS)
        except ChatTemplateError:
            return True
        return False

    def _shows(self, *messages: dict[str, Any]) -> bool:
        try:
            return _MARK in self.render(list(messages), _TRIAL_CHARS)
        except ChatTemplateError:
            return False

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.variables

    def render(
        self,
        messages: list[dict[str, Any]],
        max_chars: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the assistant speaks, or without `add_generation_prompt` to the end of the last
        message. `arguments` are further variables. May be run by several threads at once.

        Rendering stops soon after `max_chars`: a longer result says that the whole would be longer. Raises
        ChatTemplateError with the template's own words where it has some. Where the template takes a system message in
        front alone, all of them are put there as one.
        """
        if self._system_first:
            messages = system_in_front(messages)
        variables = {
            **self._special_tokens,
            "documents": None,
            **(arguments or {}),
            "messages": [{**m, "content": _parts(m["content"])} for m in messages] if self._in_parts else messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: _Budget(MAX_STEPS),
        }
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                length += len(part)
                if length > max_chars:
                    break
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template: {error}") from None
        except Exception as error:  # a template can raise whatever Python can: TypeError, RecursionError, MemoryError
            raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from None
        return "".join(parts)

    def render_open(self, messages: list[dict[str, Any]], max_chars: int, **more: Any) -> str:
        """The prompt up to the end of the last message's content, which the answer goes on with."""
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _MARK}]
        text = self.render(marked, max_chars, add_generation_prompt=False, **more)
        at = text.rfind(_MARK)
        if at < 0:
            if len(text) > max_chars:
                return text
            raise ChatTemplateError("chat template: it does not show the last message as it is, to be continued")
        return text[:at]


def _said(role: str, content: str = _MARK) -> dict[str, Any]:
    return {"role": role, "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    """A message's content as OpenAI's list of parts."""
    return [{"type": "text", "text": text}]


class _Budget:
    def __init__(self, steps: int):
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"it runs too long (limit {MAX_STEPS} steps)")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=shown
        )
        self.filters["tojson"] = _tojson
        self.filters[CONCAT] = concatenated
        for name in list(self.filters):
            self.filters[name] = _guarded(name, self.filters[name])
        self.filters["counted"] = _counted
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _new_dict  # the type itself would offer its methods
        self.globals["namespace"] = _Namespace

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        size = check_call(name, getattr(function, "__self__", None), args, kwargs)
        context[_BUDGET].spend(CALL_STEPS + steps(size))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        context[_BUDGET].spend(steps(check_binop(operator, left, right)))
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is simply shown."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A namespace without names that Python itself would read."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without a parameter `self`, which a template may set
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names must not start with an underscore")


def _guarded(name: str, function: Any) -> Any:
    """A filter that is checked and paid for. Filters that want jinja2's context, environment or evaluation context as
    their first argument still get it."""
    wants = _PassArg.from_obj(function)

    @jinja2.pass_context
    def guarded(context: Context, subject: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(subject, Iterator):
            subject = list(islice(subject, MAX_ITEMS))
        budget = context.get(_BUDGET)
        size = check_call(name, subject, args, kwargs)
        if budget is None:  # while it is compiled, with constants only
            raise SecurityError("filters run when a conversation is rendered")
        budget.spend(CALL_STEPS + steps(size))
        first = {
            _PassArg.context: context,
            _PassArg.eval_context: context.eval_ctx,
            _PassArg.environment: context.environment,
        }
        result = function(*([first[wants]] if wants is not None else []), subject, *args, **kwargs)
        if isinstance(result, str | list | tuple):
            budget.spend(steps(check_size(len(result), name)))
        return result

    return guarded


@jinja2.pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    """What every loop iterates over: the same, with a step spent for each item."""
    budget = context[_BUDGET]
    for item in iterable:
        budget.spend()
        yield item


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
