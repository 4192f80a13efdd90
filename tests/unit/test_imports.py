"""The layout's import rules, read from every file's syntax tree, and checked on what Python really loads."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = sorted(path.name for path in ROOT.glob("*_proc") if path.is_dir())
OURS = {"common", "launcher", "bench", "tests", "launch", "client", "client_cli", "rhizome", *PROCESSES}
HEAVY = ("torch", "transformers")
SKIPPED = (".venv", "build")
FILES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.py")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LIGHT = {"client_cli", "common", "gateway_proc", "launcher", "rhizome", "scheduler_proc", "tokenizer_proc"}
LIGHT |= {"launch.py", "client.py"}
LIGHT_MODULES = sorted(
    ".".join(path.with_suffix("").parts)
    for path in FILES
    if path.parts[0] in LIGHT and path.name not in {"__init__.py", "__main__.py"}
)


class Imports(NamedTuple):
    anywhere: set[str]  # top-level names, also inside functions and type-checking blocks
    loaded: set[str]  # full names outside of functions, and perhaps such as are no modules


def statements(body: list[ast.stmt], *, inside: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements, and whether they are inside of functions. Expressions, which hold no imports, are not entered:
    they are nine tenths of a tree."""
    for node in body:
        yield node, inside
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, part, []), inside=within)


@cache
def imports(source: str) -> Imports:
    """What a file imports."""
    found = Imports(set(), set())
    for node, inside in statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            found.anywhere.update(name.split(".")[0] for name in names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
            found.anywhere.add("." if node.level else (node.module or "").split(".")[0])
        else:
            continue
        if not inside:
            found.loaded.update(names)
    return found


def violations(path: Path, source: str) -> set[str]:
    """What a file of the project imports against the rules of the layout."""
    top = path.parts[0]
    names = imports(source).anywhere
    wrong = names & {"."}  # relative imports would hide where something comes from
    if top == "common":
        wrong |= names & (OURS - {"common"})
    elif top in PROCESSES:
        wrong |= names & (OURS - {"common", top})
    elif top in ("client.py", "client_cli"):
        wrong |= names & (OURS - {"common", "client_cli"})
    elif top == "rhizome":
        wrong |= names & (OURS - {"common", "rhizome"})
    elif top == "launcher":
        wrong |= names & (OURS - {"common", "launcher"})
    elif top == "launch.py":
        wrong |= names & {"tests", "bench", "client"}
    if top not in ("worker_proc", "tests", "bench"):
        wrong |= names & {"torch"}
    if top not in ("tokenizer_proc", "worker_proc", "tests", "bench"):
        wrong |= names & {"transformers"}
    if path.parts[:2] == ("tests", "unit"):
        wrong |= names & {"torch", "worker_proc"}  # every process of the tests would load them, whatever it runs
    return wrong


def test_the_packages_are_there() -> None:
    assert {"scheduler_proc", "tokenizer_proc", "worker_proc"} <= set(PROCESSES)
    assert {"common.codec", "client", "launch"} <= set(LIGHT_MODULES)


def test_every_package_is_installed() -> None:
    """An editable install finds packages that pyproject.toml does not name, a plain one does not."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {".".join(path.parent.parts) for path in FILES if path.name == "__init__.py"}
    assert set(setuptools["packages"]) == {name for name in there if name.split(".")[0] not in ("bench", "tests")}
    assert set(setuptools["py-modules"]) == {path.stem for path in FILES if len(path.parts) == 1}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_import_rules(path: Path) -> None:
    assert violations(path, (ROOT / path).read_text()) == set()


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("common/x.py", "import scheduler_proc.request", {"scheduler_proc"}),
        ("common/x.py", "import torch", {"torch"}),
        ("scheduler_proc/x.py", "def f():\n    from worker_proc import main", {"worker_proc"}),
        ("scheduler_proc/x.py", "import torch.nn", {"torch"}),
        ("scheduler_proc/x.py", "from . import request", {"."}),
        ("worker_proc/models/x.py", "import torch\nfrom common import codec\nfrom worker_proc import kv_cache", set()),
        ("worker_proc/x.py", "import launch", {"launch"}),
        ("client.py", "if TYPE_CHECKING:\n    from tokenizer_proc import ledger", {"tokenizer_proc"}),
        ("client_cli/x.py", "import rhizome, common, client_cli.runs, scheduler_proc", {"rhizome", "scheduler_proc"}),
        ("rhizome/x.py", "import common, client_cli, launch", {"client_cli", "launch"}),
        ("launch.py", "import worker_proc.main, transformers", {"transformers"}),
        ("tests/x.py", "import torch, transformers, launch", set()),
        ("tests/unit/x.py", "import torch, transformers, launch", {"torch"}),
    ],
)
def test_the_rules_find_a_violation(path: str, source: str, wrong: set[str]) -> None:
    assert violations(Path(path), source) == wrong


def test_unit_tests_load_nothing_heavy_through_others() -> None:
    """Neither directly nor through helpers and tools: a process that has torch takes a second and a half longer."""
    files = {".".join(path.with_suffix("").parts): path for path in FILES}
    ways = {name: [name] for name, path in files.items() if path.parts[:2] == ("tests", "unit")}
    waiting = [*ways]
    while waiting:
        name = waiting.pop()
        for module in imports((ROOT / files[name]).read_text()).loaded:
            assert module.split(".")[0] not in HEAVY, " -> ".join([*ways[name], module])
            if module in files and module not in ways:
                ways[module] = [*ways[name], module]
                waiting.append(module)
    assert "common.codec" in ways


def run_python(code: str, *args: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, timeout=120, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


IMPORT_ALL = """
import importlib, json, sys
names, heavy, found = json.loads(sys.argv[1]), json.loads(sys.argv[2]), []
for name in names:
    importlib.import_module(name)
    found += [f"{name} loads {module}" for module in heavy if module in sys.modules]
    if found:
        break
print(json.dumps(found))
"""


def test_light_processes_do_not_load_torch() -> None:
    """All in one process: what all of them together do not load, none of them does."""
    assert json.loads(run_python(IMPORT_ALL, json.dumps(LIGHT_MODULES), json.dumps(HEAVY))) == []


def test_a_client_on_the_same_machine_loads_no_asyncio() -> None:
    """Which takes 20 ms, an eighth of what a command takes."""
    assert run_python("import sys, client_cli.local_link, client_cli.runs; print('asyncio' in sys.modules)") == "False"


SHOW_HELP = """
import json, runpy, sys
path = sys.argv[1]
sys.argv = [path, "--help"]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as ended:
    assert not ended.code
print()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    ("path", "absent"),
    [
        ("client.py", {*HEAVY, "zmq", "msgpack", "asyncio", "tqdm", "rich", "aiohttp"}),
        ("launch.py", {*HEAVY, "pydantic", "fastapi", "uvicorn"}),
    ],
)
def test_help_loads_little(path: str, absent: set[str]) -> None:
    """`--help` answers at once because it loads next to nothing; the clock is not asked, it depends on the machine."""
    loaded = set(json.loads(run_python(SHOW_HELP, path)))
    assert "click" in loaded
    assert loaded & absent == set()
