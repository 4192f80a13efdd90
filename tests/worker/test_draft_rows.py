"""The real model runner on rows with guesses: any guesses, right or wrong, give the tokens of one step per token."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages import EnterGrammar, History, ints
from common.sampling_params import DrawParams, Grammar, LogitEdits
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import make_prompts
from tests.helpers_plans import GREEDY, PlanWriter
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_model_runner import NUM_PAGES, make_runner, make_writer, run
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import PlanError
from worker_proc.model_runner import ModelRunner
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

COUNT = 24
DRAWS = [
    GREEDY,
    DrawParams(0.9, 0, 0.95, seed=1),
    DrawParams(1.3, 30, seed=2, logprobs=2),
    DrawParams(0.0, edits=LogitEdits(logit_bias={5: 3.0}, min_len=60, ends=ints(7, 8))),
    DrawParams(0.7, seed=4, logprobs=0),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=needs_compiler)])
def model(request: pytest.FixtureRequest, checkpoint: Path) -> LanguageModel:
    """bfloat16 runs in the native decoder, whose bits depend neither on the batch nor on chunks."""
    native = load_library(cpu_features().levels()[0]) if request.param == "bfloat16" else None
    dtype = getattr(torch, request.param)
    attention = ReferenceAttention()
    return load_model(checkpoint, dtype=dtype, device="cpu", tp=TensorParallel(), attention=attention, native=native)


def guess(rng: random.Random, answer: list[int], known: int) -> list[int]:
    """Up to six tokens that follow `known` ones: the right ones up to some point."""
    count = max(0, min(rng.randrange(7), len(answer) - known - 1))
    right = rng.randint(0, count)
    wrong = [(token + 1) % VOCAB_SIZE for token in answer[known + right : known + count]]
    return answer[known : known + right] + wrong


def run_with_guesses(
    runner: ModelRunner,
    writer: PlanWriter,
    prompts: dict[int, list[int]],
    draws: dict[int, DrawParams],
    answers: dict[int, list[int]],
    seed: int,
) -> tuple[dict[int, list[int]], dict[int, list[float]], int]:
    """Like `run`, but in each step each slot decodes, or verifies guesses at its answer, from its prompt's end on."""
    rng = random.Random(seed)
    outputs: dict[int, list[int]] = {slot: [] for slot in prompts}
    scores: dict[int, list[float]] = {slot: [] for slot in prompts}
    enter, steps = draws, 0
    while True:
        chunks, drafts, decode = [], {}, []
        for slot, prompt in prompts.items():
            got = outputs[slot]
            if len(got) >= COUNT:
                continue
            known = prompt if not got else [got[-1]]
            guesses = guess(rng, answers[slot], len(got))
            if guesses or not got:
                chunks.append((slot, known + guesses, True))
                drafts[slot] = len(guesses)
            else:
                decode.append(slot)
        if not chunks and not decode:
            return outputs, scores, steps
        output = runner.execute(
            writer.plan(enter=enter, chunks=tuple(chunks), decode=tuple(sorted(decode)), drafts=drafts)
        )
        enter, steps = {}, steps + 1
        tokens, accepted = list(output.tokens), list(output.accepted)
        found = output.logprobs.by_row() if output.logprobs is not None else {}
        number = 0
        for slot in [*(slot for slot, _, _ in chunks), *sorted(decode)]:
            right = accepted.pop(0) if drafts.get(slot) else 0
            writer.trim(slot, drafts.get(slot, 0) - right)
            for _ in range(right + 1):
                outputs[slot].append(tokens.pop(0))
                if draws[slot].logprobs is not None:
                    assert found[number].token_ids[0] == outputs[slot][-1]
                    scores[slot] += found[number].logprobs
                else:
                    assert number not in found
                number += 1
        assert not tokens and not accepted


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_guesses_give_the_same_tokens(model: LanguageModel, page_size: int) -> None:
    prompts = dict(zip((7, 0, 11, 3, 4), make_prompts(VOCAB_SIZE), strict=True))
    draws = dict(zip(prompts, DRAWS, strict=True))
    expected = run(make_runner(model, page_size), make_writer(page_size), prompts, draws, COUNT)
    plain = None
    for seed in range(4):
        runner, writer = make_runner(model, page_size), make_writer(page_size)
        empty = {slot: [] for slot in prompts} if seed == 0 else None  # nothing to guess from: no guesses
        outputs, scores, steps = run_with_guesses(runner, writer, prompts, draws, empty or expected, seed)
        assert outputs == expected
        if plain is None:
            plain = scores
            assert steps == COUNT
        else:
            assert steps < COUNT
            for slot in prompts:
                assert scores[slot] == pytest.approx(plain[slot], abs=1e-4)


@needs_compiler
def test_the_bits_of_log_probabilities_do_not_depend_on_guesses(checkpoint: Path) -> None:
    """Verification is exact in bfloat16, too, because a token's logits have the same bits in a chunk and alone."""
    native = load_library(cpu_features().levels()[0])
    model = load_model(
        checkpoint, dtype=torch.bfloat16, device="cpu", tp=TensorParallel(), attention=ReferenceAttention(),
        native=native,
    )  # fmt: skip
    prompts = dict(enumerate(make_prompts(VOCAB_SIZE)))
    draws = {slot: DrawParams(0.8 * (slot % 2), seed=slot, logprobs=3) for slot in prompts}
    answers = run(make_runner(model), make_writer(), prompts, draws, COUNT)
    empty: dict[int, list[int]] = {slot: [] for slot in prompts}
    plain = run_with_guesses(make_runner(model), make_writer(), prompts, draws, empty, 0)
    guessed = run_with_guesses(make_runner(model), make_writer(), prompts, draws, answers, 1)
    assert plain[:2] == guessed[:2] and guessed[2] < plain[2]


@pytest.mark.parametrize("what", ["penalties", "grammar"])
def test_guesses_of_slots_that_follow_single_tokens_are_refused(model: LanguageModel, what: str) -> None:
    runner, writer = make_runner(model), PlanWriter(NUM_PAGES, 8)
    draw = DrawParams(0.0, edits=LogitEdits(repetition_penalty=1.2)) if what == "penalties" else GREEDY
    plan = writer.plan(enter={2: draw}, chunks=((2, [1, 2, 3], True),), drafts={2: 1})
    if what == "penalties":
        plan = replace(plan, histories=(History(2, 3, ints(1, 2, 3)),))
    else:
        plan = replace(plan, enter_grammars=(EnterGrammar(2, Grammar("regex", "a"), False, ints()),))
    with pytest.raises(PlanError, match="chunk_drafts: slot 2 has a grammar, penalties or bad words"):
        runner.execute(plan)
