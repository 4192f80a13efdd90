"""The whole wire schema: every message between two processes, in the order of a request's way.

    client ── Generate, Abort, GetStats ──► tokenizer        tokenizer ── AddRequest, Abort, GetStats ──► scheduler
    client ── Tokenize, Detokenize, GetInfo ──► tokenizer ── Tokens, Text, Info or RequestError ──► client
                                                             tokenizer ── OpenStream ──► detokenizer
    scheduler ── StepPlan ──► every worker rank              worker rank 0 ── StepResult ──► scheduler
    scheduler ── TokenBatch, RequestError, Stats ──► detokenizer
    detokenizer ── TextBatch, RequestError, Stats ──► tokenizer ── the same, and Beat ──► client
    every process ── Ready, Fatal, Pulse, Joined, Drained, Resync ──► launcher ── Go ──► every process

Request ids (`rid`) are int32. A client chooses its own, unique among its live requests on one connection; the
tokenizer replaces it by one per choice (of the `n` answers that were asked for) that is unique in the cluster. Every
choice ends with exactly one terminal row, a batch row whose finish code is not NONE, or with all others of its request
by a RequestError. Times are CLOCK_MONOTONIC nanoseconds, comparable between the processes of one machine.
"""

from common.messages.client import (
    Abort,
    ChatMessage,
    Detokenize,
    Generate,
    GetInfo,
    GetStats,
    Info,
    Text,
    Tokenize,
    Tokens,
)
from common.messages.control import (
    Drained,
    Fatal,
    Go,
    Joined,
    Progress,
    Pulse,
    Ready,
    Resync,
)
from common.messages.request import (
    AddRequest,
    Beat,
    OpenStream,
    RequestError,
    Stats,
    Stopped,
    TextBatch,
    Timing,
    TokenBatch,
)
from common.messages.step import (
    EnterGrammar,
    History,
    Scoring,
    StepPlan,
    StepResult,
)
from common.messages.types import (
    MAX_BATCH_TOKENS,
    MAX_CHAT_MESSAGES,
    MAX_CHOICES,
    MAX_DRAFT_TOKENS,
    MAX_MS,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_END,
    MAX_RID,
    MAX_SLOTS,
    MAX_TEMPLATE_ARGS_CHARS,
    MAX_TEMPLATE_CHARS,
    MAX_TOKEN_BYTES,
    MAX_TOOLS_CHARS,
    CacheSalt,
    Counts,
    ErrorCode,
    Finish,
    Milliseconds,
    Number,
    Priority,
    Rid,
    Rids,
    Times,
    TokenIds,
    ints,
)

__all__ = [
    "MAX_BATCH_TOKENS",
    "MAX_CHAT_MESSAGES",
    "MAX_CHOICES",
    "MAX_DRAFT_TOKENS",
    "MAX_MS",
    "MAX_PROMPT_CHARS",
    "MAX_PROMPT_END",
    "MAX_RID",
    "MAX_SLOTS",
    "MAX_TEMPLATE_ARGS_CHARS",
    "MAX_TEMPLATE_CHARS",
    "MAX_TOKEN_BYTES",
    "MAX_TOOLS_CHARS",
    "Abort",
    "AddRequest",
    "Beat",
    "CacheSalt",
    "ChatMessage",
    "Counts",
    "Detokenize",
    "Drained",
    "EnterGrammar",
    "ErrorCode",
    "Fatal",
    "Finish",
    "Generate",
    "GetInfo",
    "GetStats",
    "Go",
    "History",
    "Info",
    "Joined",
    "Milliseconds",
    "Number",
    "OpenStream",
    "Priority",
    "Progress",
    "Pulse",
    "Ready",
    "RequestError",
    "Resync",
    "Rid",
    "Rids",
    "Scoring",
    "Stats",
    "StepPlan",
    "StepResult",
    "Stopped",
    "Text",
    "TextBatch",
    "Times",
    "Timing",
    "TokenBatch",
    "TokenIds",
    "Tokenize",
    "Tokens",
    "ints",
]
