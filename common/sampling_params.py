"""What a user may ask of sampling, with the allowed ranges beside each field."""

from array import array
from dataclasses import dataclass, field
from typing import Annotated

from common.codec import Struct
from common.fields import Bool, Float, Int, IntArray, Ints, ListOf, Maybe, OneOf, Str

MAX_TOKENS = 2**24
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_TOKEN_ID = 2**31 - 2
MAX_GRAMMAR_CHARS = 2**18
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "choice", "lark")


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one token is drawn from its logits: all that a worker needs to know.

    `temperature` 0 is greedy and ignores the rest. The filters apply in the order temperature, top_k, top_p, min_p
    (the order of transformers and vLLM); `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `seed` with the
    position of the token fixes the random number, so equal requests draw equal tokens in any batch.
    """

    temperature: Annotated[float, Float(0.0, 100.0)] = 1.0
    top_k: Annotated[int, Int(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Float(0.0, 1.0, open_low=True)] = 1.0
    min_p: Annotated[float, Float(0.0, 1.0)] = 0.0
    seed: Annotated[int, Int(0, 2**63 - 1)] = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match as a whole, by `kind`:

    `json_object`  any JSON object; `text` is empty
    `json_schema`  JSON that the schema in `text` (JSON) accepts
    `regex`        the regular expression in `text`, in the syntax of Rust's regex crate
    `choice`       one of the strings in `text`, a JSON list
    `lark`         the grammar in `text`, in llguidance's variant of Lark's syntax

    With a `closing`, such as `</think>`, the first of it ends free text that comes before all that, and white space.
    With an `opening` too, that text begins with it, and may be left out together with both.
    """

    kind: Annotated[str, OneOf(GRAMMAR_KINDS)]
    text: Annotated[str, Str(MAX_GRAMMAR_CHARS)] = ""
    opening: Annotated[str, Str(64)] = ""
    closing: Annotated[str, Str(64)] = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling part of a request as the user gives it.

    `max_tokens` None means as many as context window and KV cache allow. `seed` None draws a fresh one. `stop` strings
    end the text before them and are never shown; `stop_token_ids` end it like the model's own end-of-sequence tokens,
    which `ignore_eos` switches off. `grammar` allows only tokens that keep the answer in it; the answer ends when it
    is complete, whatever the others say.
    """

    temperature: Annotated[float, Float(0.0, 100.0)] = 1.0
    top_k: Annotated[int, Int(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Float(0.0, 1.0, open_low=True)] = 1.0
    min_p: Annotated[float, Float(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, Maybe(Int(0, 2**63 - 1))] = None
    max_tokens: Annotated[int | None, Maybe(Int(1, MAX_TOKENS))] = None
    stop: Annotated[tuple[str, ...], ListOf(Str(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[IntArray, Ints(MAX_STOP_TOKEN_IDS, 0, MAX_TOKEN_ID)] = field(
        default_factory=lambda: array("i")
    )
    ignore_eos: Annotated[bool, Bool()] = False
    skip_special_tokens: Annotated[bool, Bool()] = True
    grammar: Annotated[Grammar | None, Maybe(Struct(Grammar))] = None

    def draw(self, seed: int) -> DrawParams:
        """The worker's part, with the seed settled."""
        return DrawParams(self.temperature, self.top_k, self.top_p, self.min_p, seed)


DRAW_PARAMS = Struct(DrawParams)
GRAMMAR = Struct(Grammar)
SAMPLING_PARAMS = Struct(SamplingParams)
