"""The table "Field by field" of docs/http_api.md against a running gateway: a request for each field that asks it for
something, and what became of it. The names in vLLM's and SGLang's own request models are here too, so that the table
can leave none out."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.server import Server, report

DOCUMENT = Path(__file__).parents[2] / "docs" / "http_api.md"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = {"chat": (CHAT,), "completions": (COMPLETIONS,), "both": (CHAT, COMPLETIONS)}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@dataclass(frozen=True, slots=True)
class Probe:
    """A value that asks for something, where it may be sent, and what must go with it."""

    value: Any
    where: str = "both"
    also: Mapping[str, Any] = field(default_factory=dict)


# By the names in the table, with what is in parentheses after them.
PROBES: dict[str, Probe] = {
    "messages": Probe(MESSAGES, "chat"),
    "prompt": Probe([[1, 2], [3]], "completions"),
    "stream": Probe(True),
    "stream_options": Probe({"include_usage": True, "continuous_usage_stats": True}, also={"stream": True}),
    "n": Probe(2),
    "best_of": Probe(2, "completions"),
    "max_tokens": Probe(3),
    "max_completion_tokens": Probe(3, "chat"),
    "min_tokens": Probe(1),
    "temperature": Probe(0.5),
    "top_p": Probe(0.5),
    "top_k": Probe(5),
    "min_p": Probe(0.1),
    "seed": Probe(7),
    "repetition_penalty": Probe(1.1),
    "presence_penalty": Probe(0.1),
    "frequency_penalty": Probe(0.1),
    "logit_bias": Probe({"5": 1}),
    "stop": Probe(["x"]),
    "stop_token_ids": Probe([5]),
    "stop_regex": Probe("x+"),
    "ignore_eos": Probe(True),
    "include_stop_str_in_output": Probe(True),
    "no_stop_trim": Probe(True),
    "skip_special_tokens": Probe(False),
    "spaces_between_special_tokens": Probe(False),
    "echo (completions)": Probe(True, "completions"),
    "echo (chats)": Probe(True, "chat"),
    "suffix": Probe("x", "completions"),
    "logprobs (chats)": Probe(True, "chat"),
    "logprobs (completions)": Probe(2, "completions"),
    "top_logprobs": Probe(2, "chat", {"logprobs": True}),
    "prompt_logprobs": Probe(1),
    "logprob_token_ids": Probe([5]),
    "return_tokens_as_token_ids": Probe(True, also={"logprobs": True}),
    "return_token_ids": Probe(True),
    "return_prompt_token_ids": Probe(True, "chat"),
    "allowed_token_ids": Probe([5]),
    "bad_words": Probe(["x"]),
    "truncate_prompt_tokens": Probe(5),
    "truncation_side": Probe("left"),
    "add_special_tokens (completions)": Probe(False, "completions"),
    "add_special_tokens (chats)": Probe(True, "chat"),
    "use_beam_search": Probe(True, also={"n": 2}),
    "length_penalty": Probe(0.5, also={"use_beam_search": True, "n": 2}),
    "early_stopping": Probe(True, also={"use_beam_search": True, "n": 2}),
    "priority": Probe(1),
    "cache_salt": Probe("s"),
    "extra_key": Probe("k"),
    "deadline_ms": Probe(60000),
    "timeout_ms": Probe(60000),
    "user": Probe("u"),
    "request_id": Probe("id-1"),
    "rid": Probe("id-1"),
    "session_id": Probe("s"),
    "session_params": Probe({"id": "s"}),
    "response_format": Probe(FORMAT),
    "response_format (structural_tag)": Probe(TAG),
    "structured_outputs": Probe({"choice": ["a", "b"]}),
    "guided_json": Probe(SCHEMA),
    "guided_regex": Probe("a|b"),
    "guided_choice": Probe(["a", "b"]),
    "guided_grammar": Probe('start: "a"'),
    "guided_decoding_backend": Probe("outlines", also={"guided_regex": "a|b"}),
    "guided_whitespace_pattern": Probe("[ ]?", also={"guided_json": SCHEMA}),
    "regex": Probe("a|b"),
    "choice": Probe(["a", "b"]),
    "grammar": Probe('start: "a"'),
    "ebnf": Probe('root ::= "a"'),
    "json_schema": Probe('{"type": "boolean"}', "completions"),
    "tools": Probe([TOOL], "chat"),
    "tool_choice": Probe("required", "chat", {"tools": [TOOL]}),
    "parallel_tool_calls": Probe(False, "chat", {"tools": [TOOL]}),
    "functions": Probe([{"name": "f"}], "chat"),
    "function_call": Probe({"name": "f"}, "chat"),
    "chat_template_kwargs": Probe({"a": 1}, "chat"),
    "reasoning_effort": Probe("low", "chat"),
    "reasoning": Probe({"effort": "low"}, "chat"),
    "thinking": Probe({"type": "enabled"}, "chat"),
    "thinking_token_budget": Probe(5),
    "chat_template": Probe("x", "chat"),
    "documents": Probe([{"text": "x"}], "chat"),
    "add_generation_prompt": Probe(False, "chat"),
    "continue_final_message": Probe(
        True, "chat", {"messages": [*MESSAGES, {"role": "assistant", "content": "A"}], "add_generation_prompt": False}
    ),
    "include_reasoning": Probe(False, "chat"),
    "separate_reasoning": Probe(False, "chat"),
    "stream_reasoning": Probe(False, "chat"),
    "input_ids": Probe([1], "chat"),
    "prompt_embeds": Probe("x", "completions"),
    "lora_path": Probe("x"),
    "custom_logit_processor": Probe("x"),
    "custom_params": Probe({"a": 1}),
    "logits_processors": Probe(["x"]),
    "vllm_xargs": Probe({"a": 1}),
    "repetition_detection": Probe({"max_pattern_size": 3}),
    "stream_interval": Probe(2),
    "watermarking": Probe(True),
    "watermark": Probe({"a": 1}),
    "return_hidden_states": Probe(True),
    "return_routed_experts": Probe(True),
    "routed_experts_start_len": Probe(1),
    "routed_experts_prompt_start": Probe(1),
    "return_cached_tokens_details": Probe(True),
    "return_spec_tokens_details": Probe(True),
    "return_meta_info": Probe(True, "chat"),
    "return_input_ids_in_sglext": Probe(True, "chat"),
    "return_output_ids_in_sglext": Probe(True, "chat"),
    "return_sampling_mask": Probe(True, "chat"),
    "sampling_logprobs_mode": Probe("x", "chat"),
    "return_flat_raw_output_top_logprobs": Probe(True, "chat"),
    "return_flat_raw_top_logprobs_b64": Probe(True, "chat"),
    "return_token_offsets": Probe(True),
    "return_prompt_text": Probe(True, "chat"),
    "return_mm_kwargs": Probe(True),
    "mm_payload": Probe({"a": 1}),
    "media_io_kwargs": Probe({"image": {}}, "chat"),
    "mm_processor_kwargs": Probe({"a": 1}),
    "images_config": Probe({"a": 1}),
    "video_config": Probe({"a": 1}, "chat"),
    "max_dynamic_patch": Probe(1, "chat"),
    "min_dynamic_patch": Probe(1, "chat"),
    "use_audio_in_video": Probe(True, "chat"),
    "task": Probe("title", "chat"),
    "kv_transfer_params": Probe({"a": 1}),
    "ec_transfer_params": Probe({"a": 1}),
    "bootstrap_host": Probe("x"),
    "bootstrap_port": Probe(1),
    "bootstrap_room": Probe(1),
    "routed_dp_rank": Probe(1),
    "disagg_prefill_dp_rank": Probe(1),
    "data_parallel_rank": Probe(1),
    "custom_labels": Probe({"a": "b"}, "completions"),
    "modalities": Probe(["text", "audio"], "chat"),
    "audio": Probe({"voice": "v", "format": "wav"}, "chat"),
    "prediction": Probe({"type": "content", "content": "x"}, "chat"),
    "web_search_options": Probe({}, "chat"),
    "verbosity": Probe("low", "chat"),
    "store": Probe(True, "chat"),
    "service_tier": Probe("flex", "chat"),
    "metadata": Probe({"a": "b"}, "chat"),
    "safety_identifier": Probe("x", "chat"),
    "prompt_cache_key": Probe("x", "chat"),
}

# The fields of ChatCompletionRequest and CompletionRequest in vLLM 0.32.0.
_VLLM_NAMES = """
messages model prompt frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options suffix temperature top_p tools tool_choice
reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens
documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
return_prompt_text mm_payload return_mm_kwargs prompt_embeds cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection stream_interval
"""
VLLM = set(_VLLM_NAMES.split())

# The same of SGLang 0.5.23, with `reasoning`, which it reads before the model of the request does.
_SGLANG_NAMES = """
messages model prompt best_of echo frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
presence_penalty response_format seed stop stream stream_options suffix temperature top_p user tools tool_choice
parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_spec_tokens_details return_prompt_token_ids return_token_ids return_meta_info return_input_ids_in_sglext
return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs
return_flat_raw_top_logprobs_b64 reasoning_effort reasoning thinking task top_k min_p min_tokens json_schema regex ebnf
repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens
lora_path session_id session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
min_dynamic_patch use_audio_in_video images_config video_config mm_processor_kwargs custom_logit_processor custom_params
watermark input_ids rid extra_key cache_salt priority data_parallel_rank bootstrap_host bootstrap_port bootstrap_room
routed_dp_rank disagg_prefill_dp_rank custom_labels
"""
SGLANG = set(_SGLANG_NAMES.split())


@dataclass(frozen=True, slots=True)
class Line:
    """One field of a row of the table."""

    label: str  # a key of PROBES, or "model"
    ours: str  # yes, refused, ignored or template
    vllm: str  # "–" where it has no such field
    sglang: str

    @property
    def name(self) -> str:
        return self.label.partition(" ")[0]


def lines() -> Iterator[Line]:
    """The table, field by field."""
    text = DOCUMENT.read_text()
    section = text[text.index("## Field by field") :].split("\n## ")[0]
    for row in section.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        if row.startswith("| `"):
            for found in re.finditer(r"`(\w+)`( \([^)]*\))?", cells[0]):
                yield Line(found[1] + (found[2] or ""), *cells[1:4])


def requests(label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies that ask for what a field does."""
    probe = PROBES[label]
    for path in PATHS[probe.where]:
        body: dict[str, Any] = {"max_tokens": 2}
        body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "Return a"}
        also = dict(probe.also)
        if path == COMPLETIONS and also.get("logprobs") is True:
            also["logprobs"] = 1
        yield path, body | also | {label.partition(" ")[0]: probe.value}


def verdict(name: str, status: int, headers: Mapping[str, str], answer: Mapping[str, Any] | None) -> str:
    """What a gateway did with a field: yes, refused (by name), ignored (and named), or what else happened."""
    if status == 200:
        ignored = headers.get("x-rhizome-ignored-fields", "").split(", ")
        return "ignored" if name in ignored else "yes"
    error = (answer or {}).get("error", {})
    by_name = status == 400 and (error.get("param") or "").partition(".")[0] == name
    return "refused" if by_name else f"{status}: {error.get('message', '')}"


def check(server: Server) -> bool:
    """The whole table against a cluster."""
    wrong, asked = [], 0
    for line in lines():
        for path, body in requests(line.label) if line.label in PROBES else ():
            asked += 1
            found = verdict(line.name, *_ask(server, path, body))
            if found != line.ours and not (line.ours == "template" and found in ("yes", "refused")):
                wrong.append(f"{line.label} at {path}: {found}, not {line.ours}")
    title = "every field does, or is refused, as the table in docs/http_api.md says"
    return report(not wrong and asked > 0, "fields", title, "; ".join(wrong) or f"({asked} requests)")


def _ask(server: Server, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], dict[str, Any] | None]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {server.key}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return response.status, response.headers, None
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)
