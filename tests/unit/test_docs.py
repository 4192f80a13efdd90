"""Links and commands in the documentation lead somewhere."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file for pattern in ("*.md", "docs/*.md", "demo_model/*.md") for file in ROOT.glob(pattern))
_CODE = re.compile(r"^```.*?^```|^    .*?$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|sh|md))`")
_MODULE = re.compile(r"python (?:-m )?((?:bench|tests|worker_proc|client_cli)[\w./]*)")


def prose(file: Path) -> str:
    return _CODE.sub("", file.read_text())


def anchors(file: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for blanks, a number for the second of
    a name."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(file), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}-{number}"
        found.add(unique)
    return found


def test_a_heading_becomes_the_anchor_that_github_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("# `launch.py`, and more: [why](x.md)\n\n```\n# no heading\n```\n## Again\n## Again\n")
    assert anchors(file) == {"launchpy-and-more-why", "again", "again-1"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    for link in _LINK.findall(prose(file)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_named_scripts_exist(file: Path) -> None:
    for name in _MODULE.findall(file.read_text()):
        module = name.removesuffix(".py").rstrip(".").replace("/", ".")
        assert find_spec(module) is not None, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_named_files_exist(file: Path) -> None:
    """By their path in the project, or the last parts of it; but for paths of HTTP and files of Python."""
    for name in _FILE.findall(file.read_text()):
        assert name.startswith(("/", "pydoc_data/")) or any(known.endswith("/" + name) for known in known_files()), name


@cache
def known_files() -> list[str]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    return [path.as_posix() for path in files]
