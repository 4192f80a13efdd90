"""Questions of clients that only the tokenizer process can answer: tokens of a text, text of tokens, what is served."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from common.codec import FrameError, Message
from common.messages import Detokenize, ErrorCode, GetInfo, Info, Tokenize
from tokenizer_proc.ledger import Owner
from tokenizer_proc.limits import RETRY_AFTER_S, Refused
from tokenizer_proc.prompt import PromptEncoder, chars_of

log = logging.getLogger(__name__)

MAX_OPEN = 256  # questions in work
MAX_OPEN_CHARS = 2**24  # of all of them together, where there are several

Question = Tokenize | Detokenize | GetInfo


class Questions:
    """Answers each question through `send(owner, message)`; what takes time is done in `pool`."""

    def __init__(self, encoder: PromptEncoder, info: Info, pool: Executor, send: Callable[[Owner, Message], None]):
        self._encoder = encoder
        self._info = info
        self._pool = pool
        self._send = send
        self._open: set[asyncio.Task[None]] = set()
        self._chars = 0

    def __len__(self) -> int:
        """Questions in work."""
        return len(self._open)

    def ask(self, owner: Owner, question: Question) -> None:
        """Answer now or soon, with RequestError where it is refused."""
        if isinstance(question, GetInfo):
            self._send(owner, replace(self._info, rid=question.rid))
            return
        size = len(question.token_ids) if isinstance(question, Detokenize) else chars_of(question)
        if len(self._open) >= MAX_OPEN or (self._open and self._chars + size > MAX_OPEN_CHARS):
            problem = "too many questions about tokens are in work; try again later"
            refusal = Refused(ErrorCode.OVERLOADED, problem, "", MAX_OPEN, RETRY_AFTER_S)
            self._send(owner, refusal.answer(question.rid))
            return
        self._chars += size
        task = asyncio.get_running_loop().create_task(self._answer(owner, question, size))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, owner: Owner, question: Tokenize | Detokenize, size: int) -> None:
        try:
            self._send(owner, await asyncio.get_running_loop().run_in_executor(self._pool, self._work, question))
        except Refused as refusal:
            self._send(owner, refusal.answer(question.rid))
        except FrameError as error:  # larger than a frame may be
            refused = Refused(ErrorCode.TOO_LONG, f"the answer cannot be sent: {error}")
            self._send(owner, refused.answer(question.rid))
        except Exception:
            log.exception("question %d of a client failed", question.rid)
            failed = Refused(ErrorCode.INTERNAL, "an internal error in the tokenizer; its log says more")
            self._send(owner, failed.answer(question.rid))
        finally:
            self._chars -= size

    def _work(self, question: Tokenize | Detokenize) -> Message:
        if isinstance(question, Tokenize):
            return self._encoder.tokenize(question)
        return self._encoder.detokenize(question)
