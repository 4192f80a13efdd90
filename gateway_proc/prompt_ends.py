"""How a chat template ends its prompts: behind an opened or a closed tag of reasoning, or neither. The template is a
program, so it is run, by the tokenizer and on a short conversation, and its text is not interpreted."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from common.async_connection import AsyncConnection
from common.fields import FieldError
from common.messages import ChatMessage, ErrorCode, Info
from common.parsers import tags_of
from common.stream import RequestFailed
from gateway_proc.errors import told_by_cluster

MAX_KNOWN = 64
_CHAT = (ChatMessage("user", "Hello"),)
_TOKENS = 32  # more than any tag has


class PromptEnds:
    """Remembers the answers: each set of arguments is asked about once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def of(self, connection: AsyncConnection, info: Info, arguments: Mapping[str, Any]) -> str:
        """The end of a prompt made with these arguments of the template; empty where it knows no reasoning, or refuses
        the arguments. Raises ApiError."""
        if tags_of(info.chat_template) is None:
            return ""
        if not arguments:
            return info.prompt_end
        key = info.chat_template, json.dumps(arguments, ensure_ascii=False)
        end = self._known.get(key)
        if end is None:
            with told_by_cluster({}):
                end = self._known[key] = await _ask(connection, key[1])
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return end


async def _ask(connection: AsyncConnection, arguments: str) -> str:
    try:
        tokens = await connection.tokenize(_CHAT, add_special_tokens=False, template_args=arguments)
        return await connection.detokenize(tokens.token_ids[-_TOKENS:])
    except FieldError:  # too long to be sent
        return ""
    except RequestFailed as failure:
        if failure.error.code != ErrorCode.INVALID:
            raise
        return ""  # the request itself will be refused in better words
