"""A connection to a cluster on this machine, whose answers to chats are read: reasoning comes apart from the text."""

from typing import Any

from common.chat_answers import AnswerReader, ChatFormat, is_read
from common.connection import Connection, Row
from common.fields import FieldError
from common.messages import MAX_RID, ErrorCode, RequestError
from common.prompts import Prompt
from common.sampling_params import SamplingParams


class LocalLink(Connection):
    """See Connection. The first chat asks the cluster for its chat template, which may raise ConnectionLost."""

    def __init__(self, address: str):
        super().__init__(address)
        self._readers: dict[int, AnswerReader] = {}

    def submit(self, prompt: Prompt, params: SamplingParams, *, n: int = 1, **options: Any) -> int:
        if not is_read(prompt, params):
            return super().submit(prompt, params, n=n, **options)
        form = ChatFormat.of_model(self.info(), **options).under(params)
        try:
            asked = form.asked(params)
        except FieldError as error:  # as if the cluster had refused it
            rid = next(self._numbers) & MAX_RID
            self._rows.append(RequestError(rid, ErrorCode.INVALID, str(error), error.field))
            return rid
        rid = super().submit(prompt, asked, n=n, **options)
        self._readers[rid] = form.reader(n)
        return rid

    def poll(self, timeout_s: float) -> list[Row | RequestError]:
        return [self._read(row) for row in super().poll(timeout_s)]

    def _read(self, row: Row | RequestError) -> Row | RequestError:
        reader = self._readers.get(row.rid)
        if reader is None:
            return row
        read = reader.read(row) if isinstance(row, Row) else row
        if reader.ended or not isinstance(row, Row):
            del self._readers[row.rid]
        return read
