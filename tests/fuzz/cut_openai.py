"""Cuts OpenAI's published OpenAPI description down to the paths that we serve, without its prose and examples.

    python -m tests.fuzz.cut_openai openapi.json > tests/fuzz/openai_api.json

The input is `openapi.json` of https://github.com/openai/openai-openapi, which is under the MIT licence; its notice is
kept in the output. /responses is left out: nine tenths of its schema are tools that our endpoint refuses.
"""

import json
import sys
from pathlib import Path
from typing import Any

PATHS = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
}
PROSE = ("description", "summary", "title", "example", "examples", "externalDocs", "tags", "deprecated")
NOTICE = (
    "Cut down from openapi.json of https://github.com/openai/openai-openapi by tests/fuzz/cut_openai.py. "
    "The MIT License. Copyright (c) OpenAI (https://openai.com). Permission is hereby granted, free of charge, to any "
    "person obtaining a copy of this software and associated documentation files (the \"Software\"), to deal in the "
    "Software without restriction, including without limitation the rights to use, copy, modify, merge, publish, "
    "distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is "
    "furnished to do so, subject to the following conditions: The above copyright notice and this permission notice "
    "shall be included in all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED \"AS IS\", "
    "WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, "
    "FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE "
    "LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING "
    "FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."
)  # fmt: skip


def bare(node: Any, *, names: bool = False) -> Any:
    """Without prose. Under `properties` (`names`) every key is a field's name and stays."""
    if isinstance(node, list):
        return [bare(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {k: v for k, v in node.items() if names or not (k in PROSE or k.startswith("x-"))}
    return {k: bare(v, names=k == "properties" and not names) for k, v in kept.items()}


def needed(document: dict[str, Any], node: Any, found: dict[tuple[str, str], Any]) -> None:
    """Every component that a part of the document refers to."""
    if isinstance(node, list):
        for item in node:
            needed(document, item, found)
    elif isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            kind, name = reference.split("/")[2:4]
            if (kind, name) not in found:
                found[kind, name] = bare(document["components"][kind][name])
                needed(document, found[kind, name], found)
        for value in node.values():
            needed(document, value, found)


def cut(document: dict[str, Any]) -> dict[str, Any]:
    paths = {path: {method: bare(document["paths"][path][method]) for method in PATHS[path]} for path in PATHS}
    for operations in paths.values():
        for operation in operations.values():
            ok = operation["responses"]["200"]
            ok["description"] = "The answer"
    # a completion can be streamed, as its field `stream` says, and its answers do not
    paths["/completions"]["post"]["responses"]["200"]["content"].setdefault("text/event-stream", {})
    found: dict[tuple[str, str], Any] = {}
    needed(document, paths, found)
    components: dict[str, dict[str, Any]] = {}
    for (kind, name), value in sorted(found.items()):
        components.setdefault(kind, {})[name] = value
    info = {"title": "OpenAI API, cut down", "version": document["info"]["version"], "description": NOTICE}
    return {"openapi": document["openapi"], "info": info, "paths": paths, "components": components}


if __name__ == "__main__":
    json.dump(cut(json.loads(Path(sys.argv[1]).read_text())), sys.stdout, indent=1, sort_keys=True)
    print()
