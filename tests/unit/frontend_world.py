"""A Frontend without sockets for tests: only the places where messages leave are stand-ins."""

import asyncio
import threading
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from common.codec import Message, decode, encode, message_types
from common.messages import (
    AddRequest,
    Finish,
    Generate,
    Info,
    TextBatch,
    ints,
)
from common.sampling_params import SamplingParams
from tests.helpers_tokenizers import byte_level
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.clients import Clients, Sent
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.grammar_check import GrammarCheck
from tokenizer_proc.ledger import Ledger
from tokenizer_proc.limits import Limits
from tokenizer_proc.prompt import PromptEncoder
from tokenizer_proc.stories import Stories

INFO = Info(
    0, "/models/tiny", ("tiny",), "LlamaForCausalLM", "float32", "cpu", "9", 1, 32, 31, 4096, 16, 1000, ints(0),
    "{{ messages }}", 5,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, seed=1)


@cache
def tokenizer() -> Tokenizer:
    return byte_level()


class Slow(PromptEncoder):
    """Waits, once told to, as a long prompt would."""

    gate: threading.Event | None = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.encoded: list[Generate] = []

    def encode(self, msg: Generate) -> Any:
        self.encoded.append(msg)
        if self.gate is not None:
            assert self.gate.wait(10)
        return super().encode(msg)


class World:
    """A Frontend with everything that it sends, by destination."""

    def __init__(self, template: str | None = "{{ messages[0].content }}", max_live: int = 4):
        limits = Limits(context_len=32, pool_tokens=4096, vocab_size=1000, max_live=max_live, max_choices=4)
        self.now = 99
        self.scheduler: list[Message] = []
        self.detokenizer: list[Message] = []
        self.answers: dict[bytes, list[Any]] = {}
        self.state: dict[bytes, Sent] = {}
        self.pool = ThreadPoolExecutor(1)
        self.encoder = Slow(tokenizer(), ChatTemplate(template, {}) if template else None, limits)
        self.stories = Stories("m", lambda: self.now)
        self.frontend = Frontend(
            limits=limits,
            encoder=self.encoder,
            grammars=GrammarCheck(tokenizer(), ints(0), self.pool),
            eos_token_ids=ints(0),
            ledger=Ledger(lambda: 77, self.stories.ended),
            clients=Clients(self.send),
            send_scheduler=self.scheduler.append,
            send_detokenizer=self.detokenizer.append,
            clock=lambda: self.now,
            pool=self.pool,
            info=INFO,
            stories=self.stories,
        )

    def send(self, owner: bytes, frame: bytes) -> Sent:
        sent = self.state.get(owner, Sent.YES)
        if sent is Sent.YES:
            self.answers.setdefault(owner, []).append(decode(frame, set(message_types())))
        return sent

    def receive(self, msg: Message, owner: bytes = b"a") -> None:
        self.frontend.on_client(owner, encode(msg))

    async def settle(self) -> None:
        """Until every request that came is with the scheduler or refused."""
        while self.frontend.preparing:
            await asyncio.sleep(0.001)

    @property
    def added(self) -> list[AddRequest]:
        return [m for m in self.scheduler if isinstance(m, AddRequest)]

    def live_rid(self) -> int:
        return self.added[-1].rid

    async def choices(self, n: int, owner: bytes = b"a", **more: Any) -> list[int]:
        """Bring a request with n choices to the scheduler; returns their ids in the cluster, and forgets their way."""
        self.receive(request(n=n, **more), owner)
        await self.settle()
        rids = [m.rid for m in self.added]
        self.scheduler.clear()
        self.detokenizer.clear()
        return rids


def request(rid: int = 5, params: SamplingParams = GREEDY, stream: bool = True, **more: Any) -> Generate:
    given = {"text": None, "token_ids": None, "chat": None} | more
    if not {"text", "token_ids", "chat"} & set(more):
        given["token_ids"] = ints(1, 2, 3)
    return Generate(rid=rid, params=params, stream=stream, **given)


def text_batch(rid: int, text: str, finish: Finish = Finish.NONE, tokens: tuple[int, ...] = (9,)) -> TextBatch:
    return TextBatch(
        ints(rid), ints(0), ints(len(tokens)), ints(*tokens), (text,), bytes([finish]), ints(0), ints(2),
        array("q", [1, 2]),
    )  # fmt: skip


def rows_of(answers: list[Any]) -> list[tuple[int, int, str, int]]:
    """Request, choice, text and finish code of every row of TextBatches."""
    return [row for m in answers for row in zip(m.rids, m.choices, m.texts, m.finish, strict=True)]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))
