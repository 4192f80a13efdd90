"""LangChain's client for OpenAI."""

import asyncio
from importlib.metadata import version
from typing import Any

from checks import Suite, Target, expect
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

suite = Suite(f"langchain-openai {version('langchain-openai')}")
HISTORY = [SystemMessage("Answer briefly."), HumanMessage("What is len?"), AIMessage("A count."), HumanMessage("Sum?")]


class Flags(BaseModel):
    """Two switches."""

    stable: bool
    beta: bool


def chat(target: Target, **options: Any) -> ChatOpenAI:
    options = {"max_completion_tokens": 16, "temperature": 0, "max_retries": 0} | options
    return ChatOpenAI(model=target.model, base_url=target.url, api_key=SecretStr(target.key), **options)


@suite.check("invoke, with usage and finish reason")
def invoke(target: Target) -> None:
    answer = chat(target).invoke(HISTORY)
    expect(isinstance(answer.content, str) and answer.usage_metadata, answer)
    expect(answer.response_metadata["finish_reason"] in ("stop", "length"), answer.response_metadata)


@suite.check("stream, with usage")
def stream(target: Target) -> None:
    llm = chat(target, stream_usage=True)
    chunks = list(llm.stream(HISTORY))
    total = sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata)
    answer = llm.invoke(HISTORY)
    expect("".join(str(chunk.content) for chunk in chunks) == answer.content, chunks)
    expect(answer.usage_metadata and total == answer.usage_metadata["total_tokens"], (total, answer.usage_metadata))


@suite.check("batch and abatch")
def batch(target: Target) -> None:
    llm = chat(target)
    questions = ["What is len?", "What is sum?", "What is map?"]
    one = [answer.content for answer in llm.batch(questions)]  # type: ignore[arg-type]
    other = [answer.content for answer in asyncio.run(llm.abatch(questions))]  # type: ignore[arg-type]
    expect(one == other and len(one) == 3, (one, other))


@suite.check("OpenAI: text completions, several prompts at once")
def texts(target: Target) -> None:
    llm = OpenAI(model=target.model, base_url=target.url, api_key=SecretStr(target.key), max_tokens=6, temperature=0)
    found = llm.generate(["The with", "Return a"])
    expect(len(found.generations) == 2 and all(g[0].text for g in found.generations), found)
    expect("".join(llm.stream("The with")) == found.generations[0][0].text, found)


@suite.check("with_structured_output: json_schema and function_calling")
def structured(target: Target) -> None:
    for method in ("json_schema", "function_calling"):
        answer = chat(target, max_completion_tokens=200).with_structured_output(Flags, method=method).invoke("Which?")  # type: ignore[arg-type]
        expect(isinstance(answer, Flags), (method, answer))


@suite.check("bind_tools, forced")
def tools(target: Target) -> None:
    answer = chat(target, max_completion_tokens=200).bind_tools([Flags], tool_choice="Flags").invoke("Which?")
    expect(answer.tool_calls and answer.tool_calls[0]["name"] == "Flags", answer)
    Flags.model_validate(answer.tool_calls[0]["args"])


if __name__ == "__main__":
    suite.main()
