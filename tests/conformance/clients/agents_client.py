"""OpenAI's Agents SDK, on the Responses API and on chats."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from checks import Suite, Target, expect
from openai import AsyncOpenAI
from pydantic import BaseModel

suite = Suite(f"openai-agents {version('openai-agents')}")
APIS = {"responses": OpenAIResponsesModel, "chats": OpenAIChatCompletionsModel}
QUIET = RunConfig(tracing_disabled=True)


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]
    large: bool


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """How it is there."""
    return f"{city}: 21 °C"


def settings(**options: Any) -> ModelSettings:
    return ModelSettings(temperature=0, parallel_tool_calls=False, extra_body={"seed": 5}, **options)


def play(target: Target, run: Callable[[Any], Awaitable[None]]) -> None:
    """With a model of either API. Each gets a client of its own, as an event loop ends with each run."""

    async def with_client(api: str) -> None:
        async with AsyncOpenAI(base_url=target.url, api_key=target.key, max_retries=0) as client:
            await run(APIS[api](model=target.model, openai_client=client))

    for api in APIS:
        try:
            asyncio.run(with_client(api))
        except Exception as error:
            raise AssertionError(f"{api}: {type(error).__name__}: {error}") from error


def called(items: list[Any]) -> None:
    """A call, its result, and no more, as the agent stops there."""
    kinds = [item.type for item in items]
    expect(kinds == ["tool_call_item", "tool_call_output_item"], kinds)
    expect(items[0].raw_item.name == "weather" and items[1].output.endswith(": 21 °C"), items)


@suite.check("a tool that must be called is run, whole and streamed")
def tools(target: Target) -> None:
    async def run(model: Any) -> None:
        for choice in ("required", "weather"):
            agent = Agent(
                "Reporter", instructions="Be brief.", model=model, tools=[weather],
                model_settings=settings(tool_choice=choice), tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            called((await Runner.run(agent, "How is it in Oslo?", run_config=QUIET)).new_items)
            streamed = Runner.run_streamed(agent, "How is it in Oslo?", run_config=QUIET)
            kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
            expect("response.function_call_arguments.delta" in kinds and "response.completed" in kinds, kinds)
            called(streamed.new_items)

    play(target, run)


@suite.check("calls and results go back, and other agents take over")
def handoff(target: Target) -> None:
    async def run(model: Any) -> None:
        last = Agent("Last", model=model, output_type=Place, model_settings=settings())
        first = Agent("First", model=model, handoffs=[last], model_settings=settings(tool_choice="required"))
        result = await Runner.run(first, "Where is it?", run_config=QUIET)
        expect(result.last_agent is last and isinstance(result.final_output, Place), result)

    play(target, run)


@suite.check("an output of a type, whole and streamed")
def output(target: Target) -> None:
    async def run(model: Any) -> None:
        agent = Agent("Guide", model=model, output_type=Place, model_settings=settings())
        streamed = Runner.run_streamed(agent, "Where?", run_config=QUIET)
        async for _ in streamed.stream_events():
            pass
        for answer in (streamed, await Runner.run(agent, "Where?", run_config=QUIET)):
            expect(isinstance(answer.final_output, Place), answer)

    play(target, run)


if __name__ == "__main__":
    suite.main()
