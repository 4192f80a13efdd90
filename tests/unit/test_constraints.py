"""The exact versions of constraints.txt go with each other and with the ranges of pyproject.toml."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in LINES) if pin}


def contradictions(requirements: list[str]) -> list[str]:
    """Those that no pinned version meets, of what counts here."""
    wanted = [Requirement(text) for text in requirements]
    counts = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    pinned = [(one, PINS[name]) for one in counts if (name := canonicalize_name(one.name)) in PINS]
    return [f"{one}, not {pin}" for one, pin in pinned if not one.specifier.contains(pin)]


def test_pinned_packages_go_with_each_other() -> None:
    """As far as they are here: PyTorch's build for CPUs asks for less than PyPI's."""
    wrong, seen = {}, 0
    for name, pin in PINS.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        if Version(package.version).public == pin:
            seen += 1
            if lines := contradictions(package.requires or []):
                wrong[name] = lines
    assert not wrong
    if not seen:
        pytest.skip("other versions than the pinned ones are installed")


def test_the_ranges_hold_the_pinned_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert contradictions(project["dependencies"] + extras) == []
