"""The fields that chat completions and completions share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from common.sampling_params import MAX_BAD_WORD_CHARS, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS
from common.story import SANE_ID
from gateway_proc.schemas.base import ApiModel, Items, within, within_generate
from gateway_proc.schemas.others import OTHERS

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
RequestId = Annotated[str, Field(pattern=f"^(?:{SANE_ID})$")]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    UNSUPPORTED: ClassVar = {"include_obfuscation": (False,)}


class JsonSchemaFormat(ApiModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(ApiModel):
    """vLLM's name for what an answer must match; exactly one of the fields."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    UNSUPPORTED: ClassVar = {
        "structural_tag": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False, True),
        "whitespace_pattern": (),
    }


class SamplingFields(ApiModel):
    """Sampling, structured output, streaming and scheduling fields of one request."""

    model: str | None = None
    n: Annotated[int | None, within_generate("n")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    request_id: RequestId | None = Field(default=None, validation_alias=AliasChoices("request_id", "rid"))

    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float | None, within("min_p")] = None
    seed: Seed | None = None
    repetition_penalty: Annotated[float | None, within("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, within("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, within("frequency_penalty")] = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, within("logit_bias")] = None
    allowed_token_ids: Annotated[Items[int] | None, within("allowed_token_ids")] = None
    bad_words: Annotated[Items[BadWord] | None, within("bad_words")] = None
    min_tokens: Annotated[int | None, within("min_tokens")] = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[Items[int] | None, within("stop_token_ids")] = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for it
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, within("length_penalty")] = None
    early_stopping: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    truncate_prompt_tokens: Annotated[int | None, within_generate("truncate_prompt_tokens")] = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int | None, within_generate("priority")] = None
    cache_salt: CacheSalt | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, validation_alias=AliasChoices("deadline_ms", "timeout_ms")
    )

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Items[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None

    def truncation(self, most: int = -1) -> dict[str, Any]:
        """How the prompt is cut, with the names of Generate and Tokenize; `most` stands for -1."""
        if self.truncate_prompt_tokens is None:
            return {}
        kept = most if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
        return {"truncate_prompt_tokens": kept, "truncation_side": self.truncation_side or ""}

    UNSUPPORTED: ClassVar = {
        **OTHERS,
        "spaces_between_special_tokens": (True, False),
        "logprob_token_ids": (),
        "guided_whitespace_pattern": (),
        "structural_tag": (),
        "logits_processors": ([],),
        "custom_logit_processor": (),
        "custom_params": (),
        "lora_path": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": (),
        "repetition_detection": (),
        "thinking_token_budget": (-1,),
        "stream_interval": (1,),
        "prompt_embeds": (),
        "session_params": (),
    }
