"""The bodies of SGLang's native /generate and of the tokenizer's endpoints."""

from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from common.messages import MAX_CHAT_MESSAGES
from common.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS
from gateway_proc.schemas.base import ApiModel, Items, within, within_generate
from gateway_proc.schemas.chat import MAX_TOOLS, Message, Tool
from gateway_proc.schemas.completions import Several, TokenId
from gateway_proc.schemas.others import ROUTING
from gateway_proc.schemas.sampling import CacheSalt, RequestId, Seed, StopString

MAX_DETOKENIZE = 2**20


class NativeParams(ApiModel):
    """SGLang's sampling_params."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = 128
    min_new_tokens: Annotated[int | None, within("min_tokens")] = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float | None, within("min_p")] = None
    repetition_penalty: Annotated[float | None, within("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, within("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, within("frequency_penalty")] = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, within("logit_bias")] = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[Items[int] | None, within("stop_token_ids")] = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int | None, within_generate("n")] = None
    sampling_seed: Seed | None = Field(default=None, validation_alias=AliasChoices("sampling_seed", "seed"))
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    UNSUPPORTED: ClassVar = {
        "beam_width": (1,),
        "structural_tag": (),
        "spaces_between_special_tokens": (True, False),
        "stop_regex": (),
        "custom_params": (),
        "stream_interval": (1,),
    }


class NativeRequest(ApiModel):
    """SGLang's GenerateReqInput, as far as text goes."""

    text: str | Annotated[Items[str], Several] | None = None
    input_ids: (
        Annotated[Items[TokenId], Field(min_length=1)]
        | Annotated[Items[Annotated[Items[TokenId], Field(min_length=1)]], Several]
        | None
    ) = None
    sampling_params: NativeParams | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    rid: RequestId | None = None
    priority: Annotated[int | None, within_generate("priority")] = None
    cache_salt: CacheSalt | None = None
    model: str | None = None

    UNSUPPORTED: ClassVar = {
        "input_embeds": (),
        "image_data": ([],),
        "audio_data": ([],),
        "video_data": ([],),
        "lora_path": (),
        "lora_id": (),
        "token_ids_logprob": (),
        "return_hidden_states": (False,),
        "custom_logit_processor": (),
        "session_params": (),
        "background": (False,),
        "return_sampling_mask": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_flat_raw_top_logprobs_b64": (False,),
        "return_routed_experts": (False,),
        "return_indexer_topk": (False,),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_prompt_token_ids": (False,),
        "modalities": (["text"], []),
        "mm_hashes": (),
        "require_reasoning": (False,),
        "max_thinking_tokens": (),
        "extra_key": (),
        "custom_labels": (),
        "no_logs": (False,),
        **ROUTING,
    }


class TokenizeRequest(ApiModel):
    """A text or a chat; vLLM's fields, and SGLang's `prompt` as a list is refused by its type."""

    model: str | None = None
    prompt: str | None = Field(default=None, validation_alias=AliasChoices("prompt", "text"))
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    UNSUPPORTED: ClassVar = {"chat_template": (), "mm_processor_kwargs": ()}


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: Annotated[Items[TokenId], Field(max_length=MAX_DETOKENIZE)]
    skip_special_tokens: bool | None = None
