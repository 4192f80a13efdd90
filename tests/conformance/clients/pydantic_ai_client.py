"""Pydantic AI on chats and on the Responses API."""

import asyncio
from importlib.metadata import version
from typing import Any, Literal

from checks import Suite, Target, expect
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

suite = Suite(f"pydantic-ai {version('pydantic-ai-slim')}")
MODELS = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Place(BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]
    large: bool


def models(target: Target) -> list[Any]:
    provider = OpenAIProvider(base_url=target.url, api_key=target.key)
    return [model(target.model, provider=provider) for model in MODELS.values()]


def answers(agent: Agent[None, Any], asked: str, **settings: Any) -> tuple[Any, Any]:
    """The same question whole and streamed."""

    async def both() -> tuple[Any, Any]:
        whole = await agent.run(asked, model_settings=settings)
        async with agent.run_stream(asked, model_settings=settings) as stream:
            return whole, await stream.get_output()

    return asyncio.run(both())


@suite.check("a text, whole and streamed")
def text(target: Target) -> None:
    for i in range(len(MODELS)):
        agent = Agent(models(target)[i], instructions="Be brief.")
        whole, streamed = answers(agent, "What is len?", max_tokens=8, temperature=0)
        expect(whole.output and whole.output == streamed, (whole, streamed))
        expect(whole.usage.output_tokens == 8, whole.usage)


@suite.check("an output of a type, by a schema and by a tool, whole and streamed")
def typed(target: Target) -> None:
    for way in (NativeOutput, ToolOutput):
        for i in range(len(MODELS)):
            whole, streamed = answers(Agent(models(target)[i], output_type=way(Place)), "Where?", seed=5)
            expect(isinstance(whole.output, Place) and isinstance(streamed, Place), (whole, streamed))


@suite.check("tools of the agent beside the one that ends it")
def tools(target: Target) -> None:
    for i in range(len(MODELS)):
        agent = Agent(models(target)[i], output_type=ToolOutput(Place), retries=3)

        @agent.tool_plain
        def hour(zone: Literal["UTC", "CET"]) -> dict[str, Any]:
            return {"zone": zone, "hour": 12}

        result = asyncio.run(agent.run("Where, and when?", model_settings={"seed": 5}))
        expect(isinstance(result.output, Place), result)


if __name__ == "__main__":
    suite.main()
