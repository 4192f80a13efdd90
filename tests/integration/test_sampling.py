"""Log probabilities, penalties and their neighbours on a real cluster, against transformers and against solo runs."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.messages import Finish, RequestError, ints
from common.sampling_params import Grammar, SamplingParams
from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.integration.cluster import running

FLOAT32 = ("--dtype", "float32", "--device", "cpu")
PROMPT = [(7 * i + i * i) % (VOCAB_SIZE - 10) + 5 for i in range(70)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


@pytest.fixture(scope="module")
def cluster(llama):
    """For tests that can do with any cluster of one rank."""
    with running(llama, *FLOAT32, "--page-size", "4") as cluster:
        yield cluster


def params(**values):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 10, "ignore_eos": True} | values))


class Got:
    """All rows of one choice, put together."""

    def __init__(self):
        self.token_ids, self.text, self.logprobs, self.prompt_logprobs, self.end = [], "", [], None, None
        self.cached = 0

    def add(self, row):
        assert self.end is None
        assert row.prompt_logprobs is None or not self.token_ids, "only in the first row"
        assert row.logprobs is None or len(row.logprobs) == len(row.token_ids)
        self.token_ids += row.token_ids
        self.text += row.text
        self.logprobs += row.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or row.prompt_logprobs
        self.cached = row.cached_tokens
        if row.finish is not Finish.NONE:
            self.end = (row.finish, row.stop_reason)


def ask_all(connection, requests):
    """`requests` are (prompt, params, options); the answers are lists of Got, one per choice, or a RequestError."""
    got = {}
    for prompt, wanted, options in requests:
        rid = connection.submit(prompt, wanted, **options)
        got[rid] = [Got() for _ in range(options.get("n", 1))]
    while connection.live:
        for row in connection.poll(30):
            if isinstance(row, RequestError):
                got[row.rid] = row
            else:
                got[row.rid][row.choice].add(row)
    return list(got.values())


def ask(connection, prompt, wanted, **options):
    answer = ask_all(connection, [(prompt, wanted, options)])[0]
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer


def expected_logprobs(path, tokens):
    """float32 `[len, vocab]`: what transformers predicts after each token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def check_entries(entries, expected, tokens, top):
    for entry, row, token in zip(entries, expected, tokens, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        best = row.topk(top)
        assert [t.logprob for t in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        for alternative in entry.top:
            assert alternative.logprob == pytest.approx(float(row[alternative.token_id]), abs=1e-4)


def test_logprobs_are_those_of_transformers(llama, connection):
    check_logprobs(llama, connection)


def test_logprobs_of_two_ranks_are_those_of_transformers(llama):
    with running(llama, *FLOAT32, "--tp", "2", "--page-size", "4") as cluster, cluster.connect() as connection:
        check_logprobs(llama, connection)


def check_logprobs(llama, connection):
    for stream in (True, False):
        wanted = params(temperature=0.9, seed=3, logprobs=5, prompt_logprobs=2, repetition_penalty=1.3)
        got = ask(connection, PROMPT, wanted, stream=stream)
        expected = expected_logprobs(llama, PROMPT + got.token_ids)
        check_entries(got.logprobs, expected[len(PROMPT) - 1 : -1], got.token_ids, 5)
        assert got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == len(PROMPT)
        check_entries(got.prompt_logprobs[1:], expected[: len(PROMPT) - 1], PROMPT[1:], 2)
        assert got.cached == 0, "every prompt token had to be computed"
    plain = ask(connection, PROMPT, params())
    assert plain.cached == len(PROMPT) - 1, "a request with prompt_logprobs publishes"
    assert plain.logprobs == [] and plain.prompt_logprobs is None
    zero = ask(connection, PROMPT, params(logprobs=0))
    assert all(entry.top == () and entry.rank == 1 for entry in zero.logprobs)
    assert b"".join(entry.token for entry in zero.logprobs).decode(errors="replace") == zero.text


def test_prompt_logprobs_in_chunks_beside_others_and_of_one_token(llama):
    flags = ("--chunk-tokens", "16", "--max-batch-tokens", "32", "--max-running", "8")
    with running(llama, *FLOAT32, *flags) as cluster, cluster.connect() as connection:
        wanted = params(prompt_logprobs=1)
        answers = ask_all(connection, [(PROMPT, wanted, {"n": 2}), (PROMPT, params(), {}), ([9], wanted, {})])
        expected = expected_logprobs(llama, PROMPT)
        for choice in answers[0]:
            check_entries(choice.prompt_logprobs[1:], expected[:-1], PROMPT[1:], 1)
        assert answers[2][0].prompt_logprobs == (None,)
        assert answers[0][0].token_ids == answers[1][0].token_ids


def test_allowed_tokens_and_bad_words_are_those_of_a_search_by_hand(llama, connection):
    """Greedy, from transformers' logits: words of one token and of several, with and without a space, of the output."""
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    plain = ask(connection, PROMPT, params(max_tokens=24))
    single = (tokenizer.decode([token]) for token in plain.token_ids)
    words = (next(text for text in single if text.isascii() and text.isalnum()), plain.text[2:4], plain.text[5:8])
    forms = []
    for word in words:
        alone, inside = (tokenizer.encode(start + word.lstrip(), add_special_tokens=False).ids for start in ("", " "))
        forms += [alone, inside] if len(inside) == len(alone) and inside[0] != alone[0] else [alone]
    assert {len(form) > 1 for form in forms} == {True, False}
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager")
    few = list(range(20, 60))
    for allowed in (None, few):
        wanted = params(max_tokens=24, bad_words=words, allowed_token_ids=None if allowed is None else ints(*allowed))
        output: list[int] = []
        with torch.inference_mode():
            for _ in range(24):
                row = model(torch.tensor([PROMPT + output])).logits[0, -1].float()
                for *beginning, last in forms:
                    if output[len(output) - len(beginning) :] == beginning:
                        row[last] = -torch.inf
                best = row if allowed is None else row[allowed]
                output.append(int(best.argmax()) if allowed is None else allowed[int(best.argmax())])
        got = ask(connection, PROMPT, wanted)
        assert got.token_ids == output != plain.token_ids
    for grammar, found in ((Grammar("choice", '["5", "x"]'), "5"), (Grammar("choice", '["xyz"]'), "xyz")):
        digits = ints(*tokenizer.encode("0123456789", add_special_tokens=False).ids)
        got = ask(connection, PROMPT, params(ignore_eos=False, allowed_token_ids=digits, grammar=grammar))
        assert got.text == found, "the grammar has the last word"
    for field, values in (
        ("allowed_token_ids", {"allowed_token_ids": ints(VOCAB_SIZE)}),
        ("bad_words[1]", {"bad_words": ("a", " ")}),
        ("bad_words", {"bad_words": ("a",), "use_beam_search": True}),
    ):
        answer = ask(connection, PROMPT, SamplingParams(**values))
        assert isinstance(answer, RequestError) and answer.field.startswith(f"params.{field}"), answer


def test_a_prompt_is_scored_once_for_all_choices_and_from_where_it_is_asked_for(llama, connection):
    """Choices but the first compute what is left of the last page; tokens before `prompt_logprobs_start` are cached."""
    prompt = PROMPT[::-1]
    for stream in (True, False):
        before = connection.stats()["scheduler.step_tokens/sum"]
        wanted = params(prompt_logprobs=2, temperature=0.9, seed=5, max_tokens=3)
        answers = ask(connection, prompt, wanted, n=4, stream=stream)
        computed = (connection.stats()["scheduler.step_tokens/sum"] - before) / 1e6
        assert computed <= len(prompt) + 4 * (4 + 2), "a prompt, and of each choice a page and what it generated"
        expected = expected_logprobs(llama, prompt)
        for choice in answers:
            check_entries(choice.prompt_logprobs[1:], expected[:-1], prompt[1:], 2)
        assert answers[0].cached == 0 and all(choice.cached >= len(prompt) - 4 for choice in answers[1:])
        alone = [ask(connection, prompt, params(temperature=0.9, seed=5 + i, max_tokens=3)) for i in range(4)]
        assert [choice.token_ids for choice in answers] == [one.token_ids for one in alone]
    for start in (1, 2, 40, len(prompt) - 1):
        got = ask(connection, prompt, params(prompt_logprobs=2, prompt_logprobs_start=start))
        check_entries(got.prompt_logprobs[1:], expected[start - 1 : -1], prompt[start:], 2)
        assert got.cached == start - 1
    assert ask(connection, prompt, params(prompt_logprobs=0, prompt_logprobs_start=999)).prompt_logprobs is None


def test_penalties_under_pressure_are_those_of_a_solo_run(llama, connection):
    wanted = [
        params(max_tokens=40, repetition_penalty=1.2),
        params(max_tokens=40, frequency_penalty=0.7),
        params(max_tokens=40, temperature=0.8, seed=5, presence_penalty=0.9, repetition_penalty=1.1),
        params(max_tokens=40, logit_bias={7: 6.0, 9: -50.0}, frequency_penalty=1.0, logprobs=1),
        params(max_tokens=40, min_tokens=40, stop_token_ids=ints(7), logit_bias={7: 30.0}, logprobs=0),
        params(max_tokens=40),
        params(max_tokens=40, allowed_token_ids=ints(*range(50, 60)), bad_words=("e", "we", "the")),
        params(max_tokens=40, temperature=1.5, seed=9, allowed_token_ids=ints(5, 6), bad_words=('"##', "#")),
    ]
    prompts = [PROMPT[i : i + 20] for i in range(len(wanted))]
    alone = [ask(connection, prompt, p) for prompt, p in zip(prompts, wanted, strict=True)]
    tiny = ("--page-size", "4", "--kv-tokens", "160", "--admission", "ratio")
    with running(llama, *FLOAT32, *tiny) as small, small.connect() as there:
        crowd = ask_all(there, [(prompt, p, {"n": 1}) for prompt, p in zip(prompts, wanted, strict=True)] * 3)
        assert there.stats()["scheduler.preempted"] > 0
    for i, (got,) in enumerate(crowd):
        assert got.token_ids == alone[i % 8].token_ids
        assert [e.token_id for e in got.logprobs] == [e.token_id for e in alone[i % 8].logprobs]
    assert len({tuple(a.token_ids) for a in alone}) == len(alone)
    assert 7 not in alone[4].token_ids[:40] and alone[4].end == (Finish.LENGTH, None)
    assert 9 not in alone[3].token_ids


def test_what_ended_an_answer(connection):
    free = ask(connection, PROMPT, params(max_tokens=24, repetition_penalty=1.5))
    stop = free.token_ids[6]
    assert stop not in free.token_ids[:6]
    by_id = ask(connection, PROMPT, params(repetition_penalty=1.5, stop_token_ids=ints(stop), logprobs=1))
    assert by_id.end == (Finish.STOP, stop) and by_id.token_ids == free.token_ids[:7]
    assert [entry.token_id for entry in by_id.logprobs] == by_id.token_ids
    later = ask(connection, PROMPT, params(repetition_penalty=1.5, stop_token_ids=ints(stop), min_tokens=8))
    assert stop not in later.token_ids[:8] and len(later.token_ids) > 8
    assert ask(connection, PROMPT, params()).end == (Finish.LENGTH, None)
    string = free.text[2:6]
    stopped = ask(connection, PROMPT, params(max_tokens=24, repetition_penalty=1.5, stop=(string,), logprobs=0))
    assert stopped.end == (Finish.STOP, string)
    assert (
        [entry.token_id for entry in stopped.logprobs] == stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    )
    assert len(stopped.token_ids) < 24
    mine = ask(connection, PROMPT, SamplingParams(temperature=0.0, max_tokens=50, logit_bias={2: 100.0}))
    assert mine.end[1] is None


def test_bad_combinations_are_refused_by_name(connection):
    for field, wanted in (
        ("min_tokens", params(min_tokens=11)),
        ("logit_bias[0]", params(logit_bias={VOCAB_SIZE: 1.0})),
        ("logprobs", params(logprobs=21)),
        ("repetition_penalty", params(repetition_penalty=0.0)),
        ("frequency_penalty", params(frequency_penalty=2.5)),
    ):
        error = ask(connection, PROMPT, wanted)
        assert isinstance(error, RequestError) and error.field == f"params.{field}", error
