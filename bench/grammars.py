"""Compares the grammar libraries llguidance and xgrammar: which schemas they get right, how fast, and what hurts them.

    python -m bench.grammars [--tokenizer DIR/tokenizer.json] [--json OUT]

xgrammar is no dependency of this project: without it (`pip install xgrammar`) only llguidance is measured.

The vocabulary has 151,936 entries: the tokens of the given tokenizer, then pairs of them. A schema is exact when every
text that should be accepted is and none that should be rejected; times are of one thread, medians of the valid texts.
Hostile grammars run in a process of their own, with a limit on time and memory.
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np

from bench.grammar_schemas import CASES, HOSTILE, Case
from common.sampling_params import Grammar

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 151_936
HOSTILE_S = 20.0
HOSTILE_BYTES = 6 * 2**30
STEPS = 100  # tokens drawn under a hostile grammar


class Matcher(Protocol):
    """One answer under a grammar."""

    def mask(self) -> None: ...

    def consume(self, token: int) -> bool: ...

    def complete(self) -> bool: ...

    def allowed(self) -> list[int]: ...


class Library(Protocol):
    def compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        """A maker of matchers. Raises ValueError when the library refuses the grammar."""


def vocabulary(tokenizer: Path) -> list[bytes]:
    """The bytes of every token; 0 is the end of a sequence, as in the tokenizers of this project."""
    from llguidance import LLTokenizer

    base = LLTokenizer(tokenizer.read_text(), eos_token=0)
    tokens = [base.decode_bytes([i]) for i in range(base.vocab_size)]
    rng, seen, last = random.Random(0), set(tokens), len(tokens) - 1
    while len(tokens) < VOCABULARY:
        pair = tokens[rng.randint(1, last)] + tokens[rng.randint(1, last)]
        if pair not in seen and len(pair) < 32:
            seen.add(pair)
            tokens.append(pair)
    return tokens[:VOCABULARY]


class Llguidance:
    """The library with the limits and forms that the server uses."""

    class Vocabulary:
        eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)

        def __init__(self, tokens: list[bytes]) -> None:
            self.tokens = tokens
            self.ids = {token: i for i, token in enumerate(tokens)}

        def __call__(self, text: bytes) -> list[int]:
            """The longest token at each place."""
            found, at = [], 0
            while at < len(text):
                end = next(end for end in range(min(len(text), at + 32), at, -1) if text[at:end] in self.ids)
                found.append(self.ids[text[at:end]])
                at = end
            return found

    class _Matcher:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.bits = bytearray(VOCABULARY // 8)

        def mask(self) -> None:
            self.bits = self.inner.compute_bitmask()

        def consume(self, token: int) -> bool:
            return bool(self.inner.consume_token(token))

        def complete(self) -> bool:
            return bool(self.inner.is_accepting())

        def allowed(self) -> list[int]:
            return [] if self.inner.is_error() else _set_bits(self.bits)

    def __init__(self, tokens: list[bytes]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.tokenizer = LLTokenizer(TokenizerWrapper(self.Vocabulary(tokens)), n_vocab=VOCABULARY, eos_token=0)

    def compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        from llguidance import LLMatcher, LLParserLimits

        from common.grammars import LIMITS, to_llguidance

        compiled = LLMatcher(self.tokenizer, to_llguidance(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
        if compiled.is_error():
            raise ValueError(compiled.get_error().split("\n")[0])
        return lambda: self._Matcher(compiled.deep_copy())


class Xgrammar:
    class _Matcher:
        def __init__(self, inner: Any, bits: Any) -> None:
            self.inner, self.bits = inner, bits

        def mask(self) -> None:
            self.inner.fill_next_token_bitmask(self.bits)

        def consume(self, token: int) -> bool:
            return bool(self.inner.accept_token(token))

        def complete(self) -> bool:
            return bool(self.inner.accept_token(0))

        def allowed(self) -> list[int]:
            return _set_bits(self.bits.numpy().tobytes())

    def __init__(self, tokens: list[bytes]) -> None:
        import xgrammar  # type: ignore[import-not-found,unused-ignore]

        self.library = xgrammar
        info = xgrammar.TokenizerInfo(
            tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=VOCABULARY, stop_token_ids=[0]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        try:
            if grammar.kind == "json_schema":
                compiled = self.compiler.compile_json_schema(grammar.text, strict_mode=False)
            else:
                compiled = self.compiler.compile_regex(grammar.text)
        except Exception as error:  # the library raises several kinds
            raise ValueError(str(error).split("\n")[0]) from None
        bits = self.library.allocate_token_bitmask(1, VOCABULARY)
        return lambda: self._Matcher(self.library.GrammarMatcher(compiled), bits)


LIBRARIES: dict[str, Callable[[list[bytes]], Library]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def accepts(make: Callable[[], Matcher], tokens: list[int], times: list[float]) -> bool:
    matcher = make()
    for token in tokens:
        started = time.perf_counter()
        matcher.mask()
        times.append(time.perf_counter() - started)
        if not matcher.consume(token):
            return False
    return matcher.complete()


def judge(library: Library, case: Case, encode: Callable[[str], list[int]]) -> dict[str, Any]:
    """Whether a library gets a schema right, and how long it takes (seconds)."""
    grammar = Grammar("json_schema", json.dumps(case.schema))
    started = time.perf_counter()
    try:
        make = library.compile(grammar)
    except ValueError as error:
        return {"verdict": "refused", "problem": str(error)[:200]}
    compiled_s = time.perf_counter() - started
    times: list[float] = []
    valid = all(accepts(make, encode(json.dumps(text, ensure_ascii=False)), times) for text in case.valid)
    kept = list(times)
    invalid = any(accepts(make, encode(json.dumps(text, ensure_ascii=False)), times) for text in case.invalid)
    verdict = "exact" if valid and not invalid else "too loose" if valid else "too strict"
    return {"verdict": verdict, "compile_s": compiled_s, "mask_s": kept}


def hurt(library: Library, grammar: Grammar) -> dict[str, Any]:
    """Compile a hostile grammar and draw from it. Times in seconds, memory in bytes."""
    before = _resident()
    started = time.perf_counter()
    try:
        make = library.compile(grammar)
    except ValueError as error:
        took = time.perf_counter() - started
        return {"outcome": f"refused: {error}"[:120], "compile_s": took, "memory": _resident() - before}
    compile_s = time.perf_counter() - started
    rng, worst, outcome, steps = random.Random(1), 0.0, "drawn", 0
    matcher = make()
    for _ in range(STEPS):
        started = time.perf_counter()
        matcher.mask()
        worst = max(worst, time.perf_counter() - started)
        tokens = [token for token in matcher.allowed() if token]
        if not tokens or not matcher.consume(rng.choice(tokens)):
            outcome = "ended" if matcher.complete() else "stopped by a limit"
            break
        steps += 1
    memory = _resident() - before
    return {"outcome": outcome, "compile_s": compile_s, "worst_mask_s": worst, "steps": steps, "memory": memory}


def _set_bits(octets: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(octets, dtype=np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits) if token < VOCABULARY]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@click.command()
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), default=ROOT / "demo_model/tokenizer.json")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Also write all numbers here.")
@click.option("--only", type=(click.Choice(list(LIBRARIES)), click.Choice(list(HOSTILE))), hidden=True)
def main(tokenizer: Path, out: Path | None, only: tuple[str, str] | None) -> None:
    """Compare the grammar libraries on schemas, speed and hostile grammars."""
    tokens = vocabulary(tokenizer)
    if only is not None:
        library = LIBRARIES[only[0]](tokens)
        resource.setrlimit(resource.RLIMIT_AS, (HOSTILE_BYTES, HOSTILE_BYTES))
        print(json.dumps(hurt(library, HOSTILE[only[1]])))
        return
    encode = Llguidance.Vocabulary(tokens)
    results: dict[str, Any] = {}
    for name, make in LIBRARIES.items():
        started = time.perf_counter()
        try:
            library = make(tokens)
        except ImportError:
            print(f"{name} is not installed")
            continue
        results[name] = {"load_s": time.perf_counter() - started, "cases": {}, "hostile": {}}
        for case in CASES:
            results[name]["cases"][case.name] = judge(library, case, lambda text: encode(text.encode()))
        for hostile in HOSTILE:
            results[name]["hostile"][hostile] = _hurt_alone(name, hostile, tokenizer)
    _show(results)
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


def _hurt_alone(library: str, hostile: str, tokenizer: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.grammars", "--tokenizer", str(tokenizer), "--only", library, hostile]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HOSTILE_S + 5, check=False)
    except subprocess.TimeoutExpired:
        return {"outcome": f"no end within {HOSTILE_S:g} s"}
    if done.returncode:
        words = f"process died with {done.returncode} after {time.perf_counter() - started:.0f} s"
        return {"outcome": f"{words}: {(done.stderr.splitlines() or [''])[-1]}"[:120]}
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def _show(results: dict[str, Any]) -> None:
    print("| schema | " + " | ".join(results) + " |\n|---|" + "---|" * len(results))
    for case in CASES:
        cells = [_verdict(results[name]["cases"][case.name]) for name in results]
        print(f"| {case.name} | " + " | ".join(cells) + " |")
    print("\n| | " + " | ".join(results) + " |\n|---|" + "---:|" * len(results))
    summaries = {name: _summary(values) for name, values in results.items()}
    for row in next(iter(summaries.values())):
        print(f"| {row} | " + " | ".join(summary[row] for summary in summaries.values()) + " |")
    print("\n| hostile grammar | " + " | ".join(results) + " |\n|---|" + "---|" * len(results))
    for hostile in HOSTILE:
        print(f"| {hostile} | " + " | ".join(_pain(results[name]["hostile"][hostile]) for name in results) + " |")


def _verdict(result: dict[str, Any]) -> str:
    if result["verdict"] == "refused":
        return f"refused: {result['problem'][:60]}"
    return f"{result['verdict']}, {1e3 * result['compile_s']:.1f} ms"


def _summary(values: dict[str, Any]) -> dict[str, str]:
    cases = values["cases"].values()
    count = {v: sum(c["verdict"] == v for c in cases) for v in ("exact", "refused", "too loose", "too strict")}
    compiled = [1e3 * c["compile_s"] for c in cases if "compile_s" in c]
    masks = sorted(1e6 * s for c in cases for s in c.get("mask_s", ()))
    return {
        **{verdict: str(number) for verdict, number in count.items()},
        "vocabulary loaded, s": f"{values['load_s']:.2f}",
        "compile, median ms": f"{statistics.median(compiled):.2f}",
        "compile, worst ms": f"{max(compiled):.1f}",
        "mask, median µs": f"{statistics.median(masks):.0f}",
        "mask, p99 µs": f"{masks[int(0.99 * len(masks))]:.0f}",
        "mask, worst µs": f"{masks[-1]:.0f}",
    }


def _pain(result: dict[str, Any]) -> str:
    parts = [str(result["outcome"])]
    if "compile_s" in result:
        parts.append(f"compile {1e3 * result['compile_s']:.0f} ms")
    if "worst_mask_s" in result:
        parts.append(f"worst mask {1e3 * result['worst_mask_s']:.1f} ms in {result['steps']} steps")
    if "memory" in result:
        parts.append(f"{result['memory'] / 2**20:.0f} MB")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
