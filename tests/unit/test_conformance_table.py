"""The table "Field by field" of docs/http_api.md: complete, and what the gateway does."""

from dataclasses import replace
from pathlib import Path

from tests.conformance.fields import PROBES, SGLANG, VLLM, Line, lines, requests, verdict
from tests.unit.frontend_world import INFO
from tests.unit.gateway_world import World, answering, play, words

UNPROBED = {"model"}  # tests ask for it by its name all the time


def test_every_field_is_in_the_table_once() -> None:
    labels = [line.label for line in lines()]
    assert len(labels) == len(set(labels))
    assert set(labels) == set(PROBES) | UNPROBED
    assert {line.name for line in lines()} >= VLLM | SGLANG


def test_the_other_columns_say_who_has_a_field() -> None:
    for line in lines():
        assert (line.vllm != "–") == (line.name in VLLM), line
        assert (line.sglang != "–") == (line.name in SGLANG) or line.label == "echo (chats)", line


def test_the_gateway_does_what_the_table_says(short_dir: Path) -> None:
    wrong: list[tuple[Line, str]] = []

    async def test(world: World) -> None:
        for line in lines():
            for path, body in requests(line.label) if line.label in PROBES else ():
                response = await world.post(path, body)
                answer = response.json() if response.status_code != 200 else None
                found = verdict(line.name, response.status_code, response.headers, answer)
                if found != line.ours.replace("template", "yes"):
                    wrong.append((line, found))

    template = "{{ messages }}{{ a }}{{ reasoning_effort }}"
    info = replace(INFO, chat_template=template)
    play(short_dir, answering(words("Hel", "lo"), info), test)
    assert not wrong
