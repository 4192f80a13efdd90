"""How calls look whose parameters stand in tags. Models of Qwen3-Coder, GLM and MiniCPM5 write them so, the last
without `<tool_call>` around them, and Seed-OSS, MiniMax M2 and DeepSeek V3.2 in blocks of their own:

    <function=NAME>             NAME                                    <function name="NAME">
    <parameter=KEY>             <arg_key>KEY</arg_key>                  <param name="KEY">a value</param>
    a value                     <arg_value>a value</arg_value>          <param name="KEY"><![CDATA[any value]]></param>
    </parameter>                                                        </function>
    </function>

    <seed:tool_call>       <minimax:tool_call>          <｜DSML｜function_calls>
    <function=NAME>        <invoke name="NAME">         <｜DSML｜invoke name="NAME">
    <parameter=KEY>        <parameter name="KEY">       <｜DSML｜parameter name="KEY" string="true">
    a value                a value                      a value
    </parameter>           </parameter>                 </｜DSML｜parameter>
    </function>            </invoke>                    </｜DSML｜invoke>
    </seed:tool_call>      </minimax:tool_call>         </｜DSML｜function_calls>

Hunyuan 3 writes GLM's form with `:opensource` in each tag, and `<tool_sep:opensource>` behind the name.

A value is a text, so what it is in JSON depends on the schema of the parameter.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

MAX_TAG = 300  # characters of tags with a name in them


@dataclass(frozen=True, slots=True)
class TagForm:
    """`name` and `key` find a name in its tags, which have not come yet where `name_end` and `key_end` have not. A
    value may begin with `begin`, which is no part of it, and ends with one of the `ends`; where that was left out, with
    what begins `instead`. A call ends with `call_end`."""

    name: re.Pattern[str]
    name_end: str
    key: re.Pattern[str]
    key_end: str
    key_begin: str
    begin: str
    ends: tuple[str, ...]
    instead: tuple[str, ...]
    call_end: str


_QWEN = TagForm(
    name=re.compile(r"<function=([^\s<>]+)>"), name_end=">",
    key=re.compile(r"<parameter=(?P<key>[^\n<>]+)>"), key_end=">", key_begin="<parameter=",
    begin="\n", ends=("\n</parameter>", "</parameter>"), instead=("\n<parameter=", "\n</function>", "\n</tool_call>"),
    call_end="</function>",
)  # fmt: skip
_GLM = TagForm(
    name=re.compile(r"([^\s<>]+)\s*(?=<arg_key>|</tool_call>)"), name_end=">",
    key=re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>"), key_end="<arg_value>", key_begin="<arg_key>",
    begin="", ends=("</arg_value>",), instead=("\n</tool_call>",),
    call_end="</tool_call>",
)  # fmt: skip
MINICPM = TagForm(
    name=re.compile(r"<function\s+name=[\"']([^\s<>\"']+)[\"']>"), name_end=">",
    key=re.compile(r"<param\s+name=[\"'](?P<key>[^\n<>\"']+)[\"']>"), key_end=">", key_begin="<param",
    begin="<![CDATA[", ends=("</param>",), instead=("<param name=", "</function>"),
    call_end="</function>",
)  # fmt: skip
MINICPM_CDATA = replace(MINICPM, ends=("]]></param>",), instead=())  # of a value that begins so
_SEED = replace(
    _QWEN, begin="", ends=("</parameter>",), instead=("\n<parameter=", "\n</function>", "\n</seed:tool_call>")
)
_MINIMAX = TagForm(
    name=re.compile(r"<invoke\s+name=[\"']?([^\s<>\"']+)[\"']?\s*>"), name_end=">",
    key=re.compile(r"<parameter\s+name=[\"']?(?P<key>[^\n<>\"']+)[\"']?>"), key_end=">", key_begin="<parameter",
    begin="", ends=("</parameter>",), instead=("\n<parameter name=", "\n</invoke>", "\n</minimax:tool_call>"),
    call_end="</invoke>",
)  # fmt: skip
_DEEPSEEK = TagForm(
    name=re.compile(r"<｜DSML｜invoke\s+name=\"([^\s<>\"]+)\"\s*>"), name_end=">",
    key=re.compile(r"<｜DSML｜parameter\s+name=\"(?P<key>[^\n<>\"]+)\"(?:\s+string=\"(?P<string>true|false)\")?\s*>"),
    key_end=">", key_begin="<｜DSML｜parameter",
    begin="", ends=("</｜DSML｜parameter>",), instead=("\n<｜DSML｜parameter", "\n</｜DSML｜invoke>"),
    call_end="</｜DSML｜invoke>",
)  # fmt: skip
_HUNYUAN3 = TagForm(
    name=re.compile(r"<tool_call:opensource>([^\s<>]+)\s*<tool_sep:opensource>"), name_end="<tool_sep:opensource>",
    key=re.compile(r"<arg_key:opensource>(?P<key>[^<>]+)</arg_key:opensource>\s*<arg_value:opensource>"),
    key_end="<arg_value:opensource>", key_begin="<arg_key:opensource>",
    begin="", ends=("</arg_value:opensource>",), instead=("\n</tool_call:opensource>",),
    call_end="</tool_call:opensource>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """What calls stand in: between one of the tags that open it and one that closes it, each beginning with `function`
    (which GLM has not). `form` tells from how a call begins in which form it is."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    function: str
    form: Callable[[str], TagForm]


def _hermes_form(begun: str) -> TagForm:
    if begun and not begun.startswith("<"):
        return _GLM
    return MINICPM if begun.startswith("<function") and begun[len("<function") :][:1].isspace() else _QWEN


HERMES = Block(("<tool_call>",), ("</tool_call>",), "<function", _hermes_form)
SEED = Block(("<seed:tool_call>",), ("</seed:tool_call>",), "<function", lambda begun: _SEED)
MINIMAX = Block(("<minimax:tool_call>",), ("</minimax:tool_call>",), "<invoke", lambda begun: _MINIMAX)
DSML = Block(  # as V3.2 names it, and V4
    ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    "<｜DSML｜invoke", lambda begun: _DEEPSEEK,
)  # fmt: skip
HUNYUAN3 = Block(
    ("<tool_calls:opensource>",), ("</tool_calls:opensource>",), "<tool_call:opensource>", lambda begun: _HUNYUAN3
)
