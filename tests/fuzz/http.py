"""A real cluster's HTTP under schemathesis: `python -m tests.fuzz.http --minutes 10`.

Requests come from a description of the API: our own (/openapi.json), or OpenAI's published one, cut down to our paths
(openai_api.json, made by cut_openai.py). Findings are answers that the description does not allow, and failures of the
server; the cluster must be idle and have lost nothing at the end. The exit code is 1 when something was found.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from bench.clusters import ROOT, started
from bench.leaving import until_freed
from bench.pressure import healthy

HERE = Path(__file__).resolve().parent
# short answers, so that much is asked; few requests wait, so that 429 is seen too
FLAGS = ("--port", "0", "--context-len", "128", "--max-waiting", "20")


@dataclass(frozen=True, slots=True)
class Api:
    """`location` of the description ({url} is the cluster's), the base of its paths, what is checked, and how many
    examples of each operation take the tests up to half a minute."""

    location: str
    base: str
    checks: tuple[str, ...]
    examples: int
    phases: tuple[str, ...] = ("examples", "coverage", "fuzzing")


APIS = {
    "own": Api(
        "{url}/openapi.json",
        "{url}",
        (
            "no_failure", "status_code_conformance", "content_type_conformance",
            "response_headers_conformance", "response_schema_conformance", "negative_data_rejection",
            "missing_required_header", "unsupported_method", "allow_header_conformance",
            # not positive_data_acceptance: what holds between fields (min_tokens <= max_tokens, a schema that compiles,
            # a model that is served) cannot be said in a JSON schema, so some of what it allows is rightly refused
            # not ignored_auth, use_after_free, ensure_resource_availability, object_level_authorization: this cluster
            # has no keys, and the API makes no resources
        ),
        20,
    ),
    "openai": Api(
        str(HERE / "openai_api.json"),
        "{url}/v1",
        # not status_code_conformance: OpenAI's description has no errors in it. Not negative_data_rejection: some
        # fields mean nothing here and are ignored, whatever is in them. Not positive_data_acceptance: audio, images and
        # stored answers are refused
        ("no_failure", "content_type_conformance", "response_schema_conformance"),
        100,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked: a number of examples of each operation, which says the same every time with the same `seed`,
    or as many as go into so many seconds."""

    seed: int
    examples: int | None = None
    seconds: int | None = None

    def flags(self) -> list[str]:
        if self.seconds is not None:
            flags = ["--max-time", str(self.seconds), "--max-examples", str(20 * self.seconds)]
        else:
            flags = ["--max-examples", str(self.examples)]
        # not more workers: Python 3.11 itself fails when two threads parse source, as hypothesis does to describe a
        # strategy ("SystemError: AST constructor recursion depth mismatch")
        return [*flags, "--workers", "1", "--seed", str(self.seed), "--generation-database", "none"]


def fuzz(url: str, api: Api, extent: Extent, home: Path) -> tuple[bool, str]:
    """Whether the API withstands it, and what schemathesis said, which works in the directory `home`."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml")]
    command += [
        "run",
        api.location.format(url=url),
        "--url",
        api.base.format(url=url),
        "--checks",
        ",".join(api.checks),
    ]
    command += ["--phases", ",".join(api.phases), "--request-timeout", "60", "--continue-on-failure"]
    command += ["--warnings", "off", "--suppress-health-check", "all", *extent.flags()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # where it finds our check
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def run(names: Sequence[str], extent: Extent) -> bool:
    """Fuzz a fresh cluster with each description; whether nothing was found. Says what was."""
    sound = True
    with started("--model", str(ROOT / "demo_model"), *FLAGS) as info, tempfile.TemporaryDirectory() as home:
        url = info["addresses"]["http"]
        for name in names:
            began = time.monotonic()
            clean, said = fuzz(url, APIS[name], extent, Path(home))
            took = f"{time.monotonic() - began:.0f} s, seed {extent.seed}"
            click.echo(f"{name}: {'nothing found' if clean else 'FOUND'} in {took}")
            click.echo(said[-1500:] if clean else said)
            sound = sound and clean
        until_freed(url, 60)
        if problems := healthy(info):
            click.echo(f"afterwards: {problems}")
        return sound and not problems


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=1.0, help="For all descriptions together.")
@click.option("--examples", type=int, help="So many of each operation instead: with a seed, the same every time.")
@click.option("--api", "only", type=click.Choice(list(APIS)), help="Only this one.")
@click.option("--seed", type=int, help="Without one, another one each time.")
def main(minutes: float, examples: int | None, only: str | None, seed: int | None) -> None:
    """Fuzz a real cluster over HTTP with schemathesis."""
    names = [only] if only else list(APIS)
    seconds = None if examples else max(1, int(60 * minutes / len(names)))
    chosen = secrets.randbelow(2**32) if seed is None else seed
    if not run(names, Extent(chosen, examples, seconds)):
        sys.exit(1)


if __name__ == "__main__":
    main()
