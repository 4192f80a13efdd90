"""Everything that turns bytes from outside into something, under atheris: `python -m tests.fuzz.wire --minutes 10`.

Coverage guides the inputs, which begin with real frames, bodies and texts. Each target (targets.py) runs in a process
of its own; an input that breaks it is kept in the directory that is named, and the exit code is 1.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import click

from bench.bad_bodies import NEEDED, bodies
from common.codec import encode
from common.messages import Abort, AddRequest, Generate, GetStats, TextBatch, ints
from common.sampling_params import DrawParams, LogitEdits, SamplingParams
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>', "<think>why</think>because",
    "<tool_call><function=f><parameter=s>\nx\n</parameter></function></tool_call>", "<arg_key>s</arg_key><arg_value>",
    '<function name="f"><param name="s"><![CDATA[x]]></param></function>', '<|tool_call|>[{"name": "f"}]',
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]', '<|python_tag|>{"name": "f", "parameters": {"x": 1}}',
    '<|channel>thought\nx<channel|><|tool_call>call:f{s:<|"|>x<|"|>,o:{l:[1,true]}}<tool_call|>',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    "[f(a='it\\'s', b=[None, {'c': (1, True)}])]", "<|tool_call_start|>[f()]<|tool_call_end|>",
    '<minimax:tool_call><invoke name="f"><parameter name="s">x</parameter></invoke></minimax:tool_call>',
    '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="false">1</｜DSML｜parameter>',
    '<|START_THINKING|>x<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>',
    "<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>",
    "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource></tool_call:opensource></tool_calls:opensource>",
    '<answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls></answer>', "[THINK]x[/THINK]",
)  # fmt: skip


def seeds(target: str) -> list[bytes]:
    """Inputs to begin with."""
    match target:
        case "frame" | "link":
            draw = DrawParams(edits=LogitEdits(logit_bias={5: 1.0}))
            return [
                encode(msg)
                for msg in (
                    Abort(1), GetStats(2), AddRequest(3, ints(1, 2), 5, ints(0), draw),
                    Generate(4, "x", None, None, SamplingParams(stop=("a",))),
                    TextBatch(ints(1), ints(0), ints(1), ints(7), ("x",), b"\0", ints(1), ints(0), array("q")),
                )
            ]  # fmt: skip
        case "body":
            return [bytes([i]) + json.dumps(NEEDED.get(path, {})).encode() for i, path in enumerate(bodies())]
        case "answer":
            return [bytes([i, 2]) + text.encode() for i in range(96) for text in TEXTS]
    return [b"data: {}\n\n", b"event: x\r\ndata: a\r\ndata: b\r\n\r\n: c\n", b"\xef\xbb\xbfid: 1\ndata\n\n"]


def fuzz(target: str, home: Path, seed: int, *, runs: int | None = None, seconds: int | None = None) -> bool:
    """Whether a target withstands so many inputs, which are the same every time, or so many seconds."""
    corpus = home / target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(target)):
        (corpus / f"seed{number}").write_bytes(data)
    extent = f"-runs={runs}" if runs else f"-max_total_time={seconds}"
    options = [extent, f"-seed={seed}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    options += [f"-artifact_prefix={home}/{target}-", "-verbosity=0", "-print_final_stats=1", str(corpus)]
    command = [sys.executable, "-m", "tests.fuzz.wire_target", target, *options]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}  # or the order of sets would guide the inputs too
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    made = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    took = f"{time.monotonic() - began:.0f} s, seed {seed}"
    click.echo(f"{target}: {made[0] if made else '?'} inputs in {took}, ", nl=False)
    end = "nothing found" if done.returncode == 0 else f"FOUND, exit code {done.returncode}\n{done.stderr[-4000:]}"
    click.echo(end)
    return done.returncode == 0


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=1.0, help="For all targets together.")
@click.option("--target", "only", type=click.Choice(list(TARGETS)), help="Only this one.")
@click.option("--keep", type=click.Path(path_type=Path), help="Where inputs are kept, those that break something too.")
@click.option("--seed", type=click.IntRange(1, 2**31 - 1), help="Without one, another one each time.")
def main(minutes: float, only: str | None, keep: Path | None, seed: int | None) -> None:
    """Fuzz the wire and the parsers with atheris."""
    home = keep or Path(tempfile.mkdtemp(prefix="rhizome-fuzz-"))
    targets = [only] if only else list(TARGETS)
    seconds = max(1, int(60 * minutes / len(targets)))
    chosen = seed or 1 + secrets.randbelow(2**31 - 1)
    sound = [fuzz(target, home, chosen, seconds=seconds) for target in targets]
    if not all(sound):
        click.echo(f"inputs are in {home}")
        sys.exit(1)


if __name__ == "__main__":
    main()
