"""What the rounds ask for: requests whose outputs are determined, of all kinds that recovery must carry over."""

import json
from dataclasses import dataclass
from typing import Any

from common.messages import ints
from common.sampling_params import Grammar, SamplingParams

CONTEXT = 32_768  # of the checkpoint: `endless` requests cannot end by themselves within a round
KNOWN_TOKENS = 160  # of an endless request, whose further tokens are not compared
_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "é🙂"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["id", "size", "tags"],
    "additionalProperties": False,
}
_REGEX = r"(19|20)\d\d-(0[1-9]|1[0-2])-\d\d( [a-f]{12}){2}"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt (token ids) and what is asked of it. `http` are the fields of `/v1/completions` that ask for the same,
    or None where that API cannot."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    endless: bool = False
    http: dict[str, Any] | None = None

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The request as JSON for HTTP. `return_token_ids` makes outputs comparable token by token."""
        assert self.http is not None
        params = self.params
        fields = {
            "prompt": list(self.prompt),
            "n": self.n,
            "temperature": params.temperature,
            "seed": params.seed,
            "max_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            "stream": stream,
        }
        return {name: value for name, value in fields.items() if value is not None} | self.http


def _draw(seed: int, tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": seed, "max_tokens": tokens, "ignore_eos": True, **more})


def _greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **more})


_LONG = tuple(5 + i * i % 290 for i in range(180))  # in many chunks, and a prefix to share
_ALL = (
    Request("greedy", (5, 6, 7, 8), _greedy(48), http={}),
    Request("drawn", (5, 6, 7, 9), _draw(1, 64), http={}),
    Request("three", (11, 12, 13), _draw(2, 40), n=3, http={}),
    Request(
        "penalties",
        (21, 22, 23),
        _draw(3, 48, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        http={"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ),
    Request("logprobs", (31, 32), _draw(4, 32, logprobs=2), http={"logprobs": 2, "return_tokens_as_token_ids": True}),
    Request("prompt-logprobs", _LONG[:40], _greedy(24, prompt_logprobs=1)),
    Request("stops", (41, 42, 43), _draw(5, 64, min_tokens=24, stop_token_ids=ints(*range(40, 70)))),
    Request(
        "stop-strings",
        (46, 47),
        _draw(11, 64, min_tokens=16, stop=("a", "e ", "t")),
        http={"min_tokens": 16, "stop": ["a", "e ", "t"]},
    ),
    Request("beams", (48, 49), SamplingParams(use_beam_search=True, max_tokens=12, ignore_eos=True), n=3),
    Request("long", _LONG, _greedy(32), http={}),
    Request("longer", (*_LONG, 9, 9), _draw(6, 32), http={}),
    Request("regex", (51, 52), _draw(7, 64, grammar=Grammar("regex", _REGEX)), http={"guided_regex": _REGEX}),
    Request(
        "schema",
        (61, 62, 63),
        _draw(8, 120, grammar=Grammar("json_schema", json.dumps(_SCHEMA)), ignore_eos=False),
        http={"guided_json": _SCHEMA},
    ),
    Request("tiny", (71, 72), _draw(9, 8), http={}),
    Request("endless", (81, 82, 83), _draw(10, CONTEXT - 100), endless=True, http={}),
    Request("endless-greedy", (91, 92), _greedy(CONTEXT - 100), endless=True, http={}),
)
CATALOG = {request.name: request for request in _ALL}
ENDLESS = tuple(r.name for r in _ALL if r.endless)
ENDING = tuple(r.name for r in _ALL if not r.endless)
