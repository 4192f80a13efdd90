"""Fields that vLLM or SGLang have and this server does not: refused by name, with the values that ask for nothing."""

from collections.abc import Mapping
from typing import Any

# A request's way through several servers, which there are not.
ROUTING: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "routed_dp_rank",
     "disagg_prefill_dp_rank", "data_parallel_rank"),
    (),
)  # fmt: skip
_MULTIMODAL = ("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "images_config", "video_config",
               "max_dynamic_patch", "min_dynamic_patch")  # fmt: skip
_SWITCHES = (
    "return_hidden_states", "return_routed_experts", "return_cached_tokens_details", "return_spec_tokens_details",
    "return_prompt_token_ids", "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
    "return_sampling_mask", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64",
    "return_token_offsets", "return_prompt_text", "return_mm_kwargs", "watermarking", "use_audio_in_video",
)  # fmt: skip

OTHERS: Mapping[str, tuple[Any, ...]] = {
    **ROUTING,
    **dict.fromkeys(_MULTIMODAL, ()),
    **dict.fromkeys(_SWITCHES, (False,)),
    "custom_labels": (),
    "extra_key": (),
    "input_ids": (),
    "ngram_corpus_id": (),
    "reasoning": (),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "sampling_logprobs_mode": (),
    "stop_regex": ([],),
    "task": (),
    "thinking": (),
    "watermark": (),
}
