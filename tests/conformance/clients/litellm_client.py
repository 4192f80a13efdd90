"""litellm, which many gateways and agents are built on."""

import asyncio
import os
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices from GitHub

import litellm
from checks import Suite, Target, expect

litellm.telemetry = False
litellm.suppress_debug_info = True
suite = Suite(f"litellm {version('litellm')}")
QUESTION = [{"role": "user", "content": "What does len do?"}]


def options(target: Target, provider: str = "openai") -> dict[str, Any]:
    return {"model": f"{provider}/{target.model}", "api_base": target.url, "api_key": target.key, "num_retries": 0}


@suite.check("completion, as provider openai and hosted_vllm")
def completion(target: Target) -> None:
    for provider in ("openai", "hosted_vllm"):
        answer: Any = litellm.completion(
            **options(target, provider), messages=QUESTION, max_tokens=8, temperature=0, n=2, stop=["\n\n"]
        )
        expect(len(answer.choices) == 2 and isinstance(answer.choices[0].message.content, str), answer)
        expect(answer.usage.completion_tokens > 0, answer.usage)


@suite.check("streams, put together as the whole answer, with usage")
def stream(target: Target) -> None:
    request: dict[str, Any] = {**options(target), "messages": QUESTION, "max_tokens": 16, "seed": 4}
    whole: Any = litellm.completion(**request)
    chunks = list(litellm.completion(**request, stream=True, stream_options={"include_usage": True}))
    built: Any = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    expect(built.choices[0].message.content == whole.choices[0].message.content, built)
    expect(built.usage.total_tokens == whole.usage.total_tokens, (built.usage, whole.usage))


@suite.check("log probabilities and text completions")
def texts(target: Target) -> None:
    answer: Any = litellm.completion(**options(target), messages=QUESTION, max_tokens=3, logprobs=True, top_logprobs=2)
    expect(len(answer.choices[0].logprobs.content[0].top_logprobs) == 2, answer)
    text: Any = litellm.text_completion(**options(target, "text-completion-openai"), prompt="The with", max_tokens=5)
    expect(text.choices[0].text, text)


@suite.check("acompletion: 8 side by side")
def concurrent(target: Target) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**options(target), messages=QUESTION, max_tokens=6, temperature=0) for _ in range(8))
        )

    expect(len({answer.choices[0].message.content for answer in asyncio.run(ask())}) == 1, "greedy answers differ")


@suite.check("errors become litellm's exceptions")
def errors(target: Target) -> None:
    long = [{"role": "user", "content": "x" * 9000}]
    for kind, fields in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.ContextWindowExceededError, {"messages": long}),
        (litellm.NotFoundError, {"model": "openai/none"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
    ):
        try:
            litellm.completion(**({**options(target), "messages": QUESTION, "max_tokens": 2} | fields))
        except kind:
            continue
        raise AssertionError(f"accepted: {str(fields)[:80]}")


if __name__ == "__main__":
    suite.main()
