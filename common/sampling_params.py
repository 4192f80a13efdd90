"""What a user may ask of sampling, with the allowed ranges beside each field."""

from array import array
from dataclasses import dataclass, field
from typing import Annotated

from common.codec import Struct
from common.fields import Bool, Float, Int, IntArray, IntMap, Ints, ListOf, Maybe, OneOf, Str

MAX_TOKENS = 2**24
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_TOKEN_ID = 2**31 - 2
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 2**14
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 512
MAX_BAD_WORD_TOKENS = 64
MAX_LOGPROBS = 20  # alternatives of a token that a user may ask for
MAX_DRAW_LOGPROBS = 2**9  # alternatives that beam search may ask for
MAX_ENDS = 1024  # tokens that can end a request: the model's and the user's
MAX_GRAMMAR_CHARS = 2**18
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "ebnf")

LogitBias = Annotated[dict[int, float], IntMap(Ints(MAX_LOGIT_BIAS, 0, MAX_TOKEN_ID), Float(-100.0, 100.0))]
RepetitionPenalty = Annotated[float, Float(0.0, 10.0, open_low=True)]
TokenPenalty = Annotated[float, Float(-2.0, 2.0)]
_BAD_WORD = Ints(MAX_BAD_WORD_TOKENS, 0, MAX_TOKEN_ID, least=1)


def _no_ids() -> IntArray:
    return array("i")


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is done to a request's logits before a token is drawn from them, greedily or not, in the order of fields up
    to the penalties.

    `logit_bias` is added. While the sequence is shorter than `min_len` tokens, prompt included, the tokens `ends` are
    excluded, and always the last token of each of `bad_words` that the output ends with but for that token, and all
    but the tokens `allowed`, if there are some. Where that leaves none of them, the first two do not hold.
    `repetition_penalty` divides a positive logit of each token that prompt or output contain and multiplies
    a negative one (Keskar et al., CTRL, 2019). `frequency_penalty` is subtracted once for each time that the output
    contains the token, `presence_penalty` once if it does. (The order is vLLM's and, but for penalties that it does
    not have, that of transformers.)
    """

    logit_bias: LogitBias = field(default_factory=dict)
    min_len: Annotated[int, Int(0, 2**30)] = 0
    ends: Annotated[IntArray, Ints(MAX_ENDS, 0, MAX_TOKEN_ID)] = field(default_factory=_no_ids)
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: TokenPenalty = 0.0
    presence_penalty: TokenPenalty = 0.0
    allowed: Annotated[IntArray, Ints(MAX_ALLOWED_TOKENS, 0, MAX_TOKEN_ID)] = field(default_factory=_no_ids)
    bad_words: Annotated[tuple[IntArray, ...], ListOf(_BAD_WORD, 2 * MAX_BAD_WORDS)] = ()

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on the tokens so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def named(self) -> int:
        """How many tokens it names."""
        return len(self.logit_bias) + len(self.ends) + len(self.allowed) + sum(map(len, self.bad_words))

    @property
    def needs_history(self) -> bool:
        """Whether any of it depends on the tokens so far."""
        return self.counts_tokens or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one token is drawn from its logits: all that a worker needs to know.

    `temperature` 0 is greedy and ignores the filters. They apply in the order temperature, top_k, top_p, min_p
    (that of transformers and SGLang; vLLM V1 has min_p before top_k); `top_k` 0, `top_p` 1 and `min_p` 0 switch a
    filter off. `seed` with the position of the token fixes the random number, so equal requests draw equal tokens in
    any batch. `edits` are done first. `logprobs` and `prompt_logprobs` are as in SamplingParams.
    """

    temperature: Annotated[float, Float(0.0, 100.0)] = 1.0
    top_k: Annotated[int, Int(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Float(0.0, 1.0, open_low=True)] = 1.0
    min_p: Annotated[float, Float(0.0, 1.0)] = 0.0
    seed: Annotated[int, Int(0, 2**63 - 1)] = 0
    edits: Annotated[LogitEdits | None, Maybe(Struct(LogitEdits))] = None
    logprobs: Annotated[int | None, Maybe(Int(0, MAX_DRAW_LOGPROBS))] = None
    prompt_logprobs: Annotated[int | None, Maybe(Int(0, MAX_LOGPROBS))] = None

    @property
    def needs_history(self) -> bool:
        """Whether the worker must know all tokens of the request."""
        return self.edits is not None and self.edits.needs_history


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match as a whole, by `kind`:

    `json_object`  any JSON object; `text` is empty
    `json_schema`  JSON that the schema in `text` (JSON) accepts
    `regex`        the regular expression in `text`, in the syntax of Rust's regex crate
    `choice`       one of the strings in `text`, a JSON list
    `lark`         the grammar in `text`, in llguidance's variant of Lark's syntax
    `ebnf`         the grammar in `text`, in llama.cpp's GBNF; the tokenizer passes it on as lark

    With a `closing`, such as `</think>`, the first of it ends free text that comes before all that, and white space.
    With an `opening` too, that text begins with it, and may be left out together with both. A `heading` comes right
    before the answer, with or without that text. `<|name|>` in these three is the special token of that name.
    """

    kind: Annotated[str, OneOf(GRAMMAR_KINDS)]
    text: Annotated[str, Str(MAX_GRAMMAR_CHARS)] = ""
    opening: Annotated[str, Str(64)] = ""
    closing: Annotated[str, Str(64)] = ""
    heading: Annotated[str, Str(64)] = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling part of a request as the user gives it.

    `max_tokens` None means as many as context window and KV cache allow. `seed` None draws a fresh one. `stop` strings
    end the text before them; `stop_token_ids` end it like the model's own end-of-sequence tokens, which `ignore_eos`
    switches off. With `include_stop_str_in_output` what ended the answer is shown, too: the stop string, or the text of
    the token (none for a special token, unless `skip_special_tokens` is false).

    `repetition_penalty`, `presence_penalty`, `frequency_penalty` and `logit_bias` (from token ids) are those of
    LogitEdits; the first counts prompt and output, the next two the output. Before `min_tokens` tokens, neither an
    end-of-sequence token (with `ignore_eos` neither) nor one of `stop_token_ids` is drawn, and stop strings that end
    there do not count.

    Of all tokens only `allowed_token_ids` are drawn, where they are given: an end-of-sequence token must be among them
    to be one. `bad_words` never come in the output (though their tokens may end the prompt): each is tokenized as it is
    and with a space before it, as it begins a text and as it stands inside one, and the token that would complete it
    is excluded.

    `logprobs` asks for the log probability of every output token and of that many most likely alternatives (0: only
    its own; None: nothing), `prompt_logprobs` for the same of every prompt token but the first. They are those of the
    model's own distribution in float32, before temperature, penalties and masks. A request with `prompt_logprobs`
    takes nothing from the prefix cache, because every prompt token must be computed; `prompt_logprobs_start` leaves out
    the tokens before that one, which may then come from there.

    `use_beam_search` finds the `n` (of Generate) sequences that transformers' beam search finds with `num_beams` and
    `num_return_sequences` n: `length_penalty` is the power of the length that a sequence's log probability is divided
    by; with `early_stopping` the search ends as soon as n sequences have ended. Their rows come at the end, best first.
    It takes the model's own distribution (`temperature` 1 or 0), so nothing that changes or draws from it goes with it.

    `grammar` allows only tokens that keep the answer in it, and ends the answer when it is complete, whatever the
    others say.
    """

    temperature: Annotated[float, Float(0.0, 100.0)] = 1.0
    top_k: Annotated[int, Int(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Float(0.0, 1.0, open_low=True)] = 1.0
    min_p: Annotated[float, Float(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, Maybe(Int(0, 2**63 - 1))] = None
    max_tokens: Annotated[int | None, Maybe(Int(1, MAX_TOKENS))] = None
    stop: Annotated[tuple[str, ...], ListOf(Str(MAX_STOP_CHARS, 1), MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[IntArray, Ints(MAX_STOP_TOKEN_IDS, 0, MAX_TOKEN_ID)] = field(default_factory=_no_ids)
    ignore_eos: Annotated[bool, Bool()] = False
    skip_special_tokens: Annotated[bool, Bool()] = True
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: TokenPenalty = 0.0
    frequency_penalty: TokenPenalty = 0.0
    logit_bias: LogitBias = field(default_factory=dict)
    min_tokens: Annotated[int, Int(0, MAX_TOKENS)] = 0
    logprobs: Annotated[int | None, Maybe(Int(0, MAX_LOGPROBS))] = None
    prompt_logprobs: Annotated[int | None, Maybe(Int(0, MAX_LOGPROBS))] = None
    use_beam_search: Annotated[bool, Bool()] = False
    length_penalty: Annotated[float, Float(-10.0, 10.0)] = 1.0
    early_stopping: Annotated[bool, Bool()] = False
    grammar: Annotated[Grammar | None, Maybe(Struct(Grammar))] = None
    include_stop_str_in_output: Annotated[bool, Bool()] = False
    allowed_token_ids: Annotated[IntArray | None, Maybe(Ints(MAX_ALLOWED_TOKENS, 0, MAX_TOKEN_ID, least=1))] = None
    bad_words: Annotated[tuple[str, ...], ListOf(Str(MAX_BAD_WORD_CHARS, 1), MAX_BAD_WORDS)] = ()
    prompt_logprobs_start: Annotated[int, Int(0, MAX_TOKENS)] = 0

    def unscored(self, prompt_len: int) -> int:
        """How many tokens from the prompt's first one predict nothing that is asked for; `prompt_logprobs` asks."""
        return min(max(0, self.prompt_logprobs_start - 1), prompt_len - 1)

    def draw(
        self,
        seed: int,
        prompt_len: int = 0,
        ends: IntArray | None = None,
        bad_words: tuple[IntArray, ...] = (),
    ) -> DrawParams:
        """The worker's part, with the seed settled. `ends` are the tokens that `min_tokens` excludes at first,
        `bad_words` those of the field of this name as tokens."""
        edits = LogitEdits(
            self.logit_bias,
            prompt_len + self.min_tokens if self.min_tokens else 0,
            ends if ends is not None and self.min_tokens else _no_ids(),
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            _no_ids() if self.allowed_token_ids is None else self.allowed_token_ids,
            bad_words,
        )
        changes = bool(edits.logit_bias or edits.min_len or edits.counts_tokens or edits.allowed or bad_words)
        return DrawParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            seed,
            edits if changes else None,
            self.logprobs,
            self.prompt_logprobs,
        )


DRAW_PARAMS = Struct(DrawParams)
GRAMMAR = Struct(Grammar)
SAMPLING_PARAMS = Struct(SamplingParams)
