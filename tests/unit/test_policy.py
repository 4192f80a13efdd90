"""Policies: who goes first, and that nobody waits for ever."""

import pytest

from common.config import POLICIES
from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.policy import MAX_PREFILLS, make_policy
from scheduler_proc.request import Request
from scheduler_proc.step_time import StepShape, StepTimeModel
from tests.rig import Rig

SECOND = 10**9


def served_order(policy, arrivals, **config):
    """The order of first tokens at a server of one slot, one step a second, when (second, prompt, options) arrive."""
    rig = Rig(policy=policy, max_running=1, pages=500, page_size=1, **config)
    pending = sorted(enumerate(arrivals), key=lambda a: a[1][0])
    while pending or rig.scheduler.has_work:
        while pending and pending[0][1][0] * SECOND <= rig.now:
            rid, (_, prompt, more) = pending.pop(0)
            rig.add(rid, prompt, 1, **more)
        rig.step()
        rig.now += SECOND
    return list(rig.out)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "round-robin", "priority"])
def test_no_policy_lets_a_stream_of_favoured_arrivals_starve_anyone(policy):
    """The request that the policy likes least, against favoured ones that arrive as fast as they are served."""
    flood = [(t, [1, 2, 3, t + 10], {"priority": 3}) for t in range(200)]
    victim = (5, [900 + k for k in range(6)], {"priority": 0})
    ahead = served_order(policy, [*flood, victim], ageing_s=10.0).index(200)
    # who arrives later than the ageing allows cannot overtake: three steps of priority are 30 s, one request a second
    assert ahead <= 5 + 30 + 2


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_without_ageing_it_would_starve(policy):
    flood = [(t, [1, 2, 3, t + 10], {"priority": 3}) for t in range(200)]
    victim = (5, [900 + k for k in range(6)], {"priority": 0})
    assert served_order(policy, [*flood, victim], ageing_s=10000.0).index(200) > 100


def test_longest_prefix_goes_first():
    rig = Rig(policy="lpm", max_running=1)
    rig.add(0, range(40), 2)
    rig.run()
    rig.add(1, [99, 98, 97], 2)
    rig.add(2, [*range(10), 50], 2)
    rig.add(3, [*range(30), 50], 2)
    rig.run()
    assert list(rig.out) == [0, 3, 2, 1]


def test_round_robin_lets_a_short_prompt_pass_a_long_one():
    firsts = {}
    for policy in ("fcfs", "round-robin"):
        rig = Rig(policy=policy, pages=500, context=1000, max_batch_tokens=16, chunk_tokens=16)
        rig.add(1, range(400), 2)
        rig.add(2, range(500, 510), 2)
        rig.run()
        firsts[policy] = list(rig.out)
    assert firsts == {"fcfs": [1, 2], "round-robin": [2, 1]}


def test_an_inter_token_latency_target_sizes_the_chunks():
    rig = Rig(chunk_tokens=64, max_batch_tokens=512, max_running=4, pages=1000, context=2000, itl_target_ms=10.0)
    for tokens in range(1, 200):  # 1 ms and 0.1 ms for each token
        rig.scheduler.step_time.learn(StepShape(tokens, 0), 0.001 + 0.0001 * tokens)
    rig.add(1, [1, 2, 3], 50)
    plan = rig.scheduler.plan(rig.now)
    result = rig.worker.execute(plan)
    del result.times[:]  # the paper worker's times are not to be learned
    rig.scheduler.commit(result, rig.now)
    rig.add(2, range(400), 2)
    plan = rig.scheduler.plan(rig.now)
    assert 85 <= len(plan.chunk_tokens) <= 90, "10 ms allow 90 tokens, one of which decodes"


def test_the_step_time_model_finds_its_three_terms():
    model = StepTimeModel()
    assert model.tokens_within(0.01, 0) is None, "nothing is known yet"
    for i in range(300):
        shape = StepShape(1 + i * 37 % 200, i * 7919 % 100_000)
        model.learn(shape, 0.002 + 2e-5 * shape.tokens + 3e-8 * shape.context)
    assert model.predict(StepShape(100, 50_000)) == pytest.approx(0.002 + 0.002 + 0.0015, rel=0.01)
    assert model.tokens_within(0.0055, 50_000) == pytest.approx(100, abs=2)
    assert model.tokens_within(0.0001, 50_000) == 0


def test_a_held_up_step_hardly_changes_the_step_time_model():
    model = StepTimeModel()
    for i in range(300):
        model.learn(StepShape(64 + i % 200, 64_000, plain=False), 0.01 + 5e-5 * (64 + i % 200))
    before = model.tokens_for(1.5, StepShape(64, 64_000))
    model.learn(StepShape(200, 64_000, plain=False), 6.0)
    assert model.tokens_for(1.5, StepShape(64, 64_000)) == pytest.approx(before, rel=0.1)
    for i in range(1500):  # but a machine that has become slower for good is learned
        model.learn(StepShape(64 + i % 200, 64_000, plain=False), 0.1 + 5e-4 * (64 + i % 200))
    assert model.predict(StepShape(100, 64_000)) == pytest.approx(0.15, rel=0.1)


def test_a_step_that_is_long_because_it_is_large_is_learned_as_it_is():
    model = StepTimeModel()
    for i in range(50):
        model.learn(StepShape(1 + i % 8, 0, plain=False), 0.001 + 1e-4 * (1 + i % 8))
    model.learn(StepShape(1000, 0, plain=False), 0.101)
    assert model.predict(StepShape(1000, 0)) == pytest.approx(0.101, rel=0.01)


@pytest.mark.parametrize("plain", [True, False])
def test_how_many_steps_must_be_known(plain):
    model = StepTimeModel()
    for count in range(12):
        assert (model.tokens_within(1.0, 0) is None) == (count < 8)
        assert (model.seconds_of_prompts(100) is None) == (plain or count < 3)
        assert (model.tokens_for(1.5, StepShape(8, 0)) is None) == (plain or count < 8)
        assert (model.tokens_beside_fixed(0.1) is None) == (plain or count < 8)
        model.learn(StepShape(10 + count, 0, plain=plain), 0.01 + 0.001 * count)


def test_where_tokens_cost_nothing_no_number_of_them_is_known():
    """Nor is anything ever thought to take less than no time."""
    model = StepTimeModel()
    for i in range(50):
        model.learn(StepShape(100 + i, 10_000 * i, plain=False), 0.1 - 0.001 * i)
        assert min(model.coefficients()) >= 0
    for i in range(50):
        model.learn(StepShape(100 + i, 0, plain=False), 0.1 - 0.001 * i)
    assert model.coefficients()[1] == 0
    steep = StepTimeModel()
    for i in range(50):
        steep.learn(StepShape(100 + i, 0), 0.001 * i)
    assert steep.coefficients()[0] == 0
    assert (
        model.tokens_within(1.0, 0) is model.tokens_for(1.5, StepShape(8, 0)) is model.tokens_beside_fixed(0.1) is None
    )


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "round-robin", "priority"])
def test_who_is_handed_in_again_keeps_its_place(policy):
    """As each step of a beam search is: behind the queue, each of its tokens would wait as long as a request."""
    rig = Rig(policy=policy, max_running=1)
    rig.now = 100 * SECOND
    rig.add(0, [1, 2], 3)
    rig.step()
    for rid in (1, 2):
        rig.add(rid, [rid], 1)
    rig.add(3, [3], 1, waited_ms=50_000)
    rig.run()
    assert list(rig.out) == [0, 3, 1, 2]


def test_round_robin_gives_everyone_a_turn_whatever_the_order_of_admission():
    turns = make_policy("round-robin", KVManager(10, 4), 10.0)
    prefilling = [Request(seq, ints(1), 1, 1, frozenset(), DrawParams(), seq=seq) for seq in (5, 3, 4)]
    firsts = [turns.chunk_order(prefilling)[0].seq for _ in range(6)]
    assert sorted(firsts) == [3, 3, 4, 4, 5, 5]


def test_a_request_of_high_priority_starts_beside_a_long_prompt():
    rig = Rig(policy="priority", pages=3000, context=10_000)
    rig.add(1, [1, 2], 1000)
    rig.step()
    rig.add(2, range(5000), 2, priority=-10)
    rig.step()
    rig.add(3, range(300, 308), 2, priority=1000)
    steps = 0
    while 3 not in rig.out:
        rig.step()
        steps += 1
    assert steps <= 2 and 2 not in rig.out


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_nobody_waits_for_a_prefix_whose_maker_gives_way_to_less_urgent_prompts(steps_in_flight):
    rig = Rig(policy="priority", pages=3000, context=10_000, max_running=64, steps_in_flight=steps_in_flight)
    rig.add(1, range(5000), 2, priority=-10)
    rig.step()
    rig.add(2, [*range(1000), 7], 2, priority=900)
    for rid in range(10, 50):
        rig.add(rid, [rid, *range(100)], 1, priority=500)
        rig.step()
    others = [rid for rid in rig.out if rid >= 10]
    assert 2 in rig.out and len(others) < 20


def test_the_queue_is_put_in_order_only_when_somebody_could_start(monkeypatch):
    """Under longest-prefix-match that compares 64 prompts with the tree, which a prompt at work changes each step."""
    rig = Rig(policy="lpm", pages=3000, context=10_000)
    compared = []
    monkeypatch.setattr(rig.scheduler.kv, "cached", lambda request: compared.append(request.rid) or 0)
    rig.add(1, range(2000), 2)
    rig.step()
    for rid in range(10, 20):
        rig.add(rid, [rid, *range(2000)], 1)
    compared.clear()
    for _ in range(20):
        rig.step()
    assert not compared and 1 not in rig.out


def request(seq, since=0, priority=0, tokens=(1,)):
    return Request(
        seq, ints(*tokens), len(tokens), 1, frozenset(), DrawParams(), seq=seq, since=since, priority=priority
    )


def test_who_starts_beside_prompts_at_work():
    kv = KVManager(10, 4)
    for name in ("fcfs", "lpm"):
        assert not make_policy(name, kv, 10.0).starts_beside(request(9), [request(1)])
    turns = make_policy("round-robin", kv, 10.0)
    urgent = make_policy("priority", kv, 10.0)
    for count in (1, MAX_PREFILLS - 1):
        at_work = [request(seq) for seq in range(count)]
        assert turns.starts_beside(request(9), at_work) and urgent.starts_beside(request(9, priority=1), at_work)
    at_work.append(request(8))
    assert not turns.starts_beside(request(9), at_work) and not urgent.starts_beside(request(9, priority=1), at_work)
    assert not urgent.starts_beside(request(9, priority=1), [request(1), request(2, priority=2)]), "before all of them"
    assert not urgent.starts_beside(request(9), [request(1)]), "who came first goes first"


def test_who_gets_chunks_no_later():
    kv = KVManager(10, 4)
    at_work = low, high, middle = [request(1), request(2, priority=2), request(3, priority=1)]
    for name in ("fcfs", "lpm", "round-robin"):
        assert make_policy(name, kv, 10.0).not_behind(request(9, priority=5), at_work) == at_work
    urgent = make_policy("priority", kv, 10.0)
    assert urgent.not_behind(request(9, priority=5), at_work) == [high], "the first one, whoever it is"
    assert urgent.not_behind(request(9, priority=1), at_work) == [high, middle]
    assert urgent.not_behind(request(9, priority=-1), at_work) == [high, middle, low]


@pytest.mark.parametrize("name", POLICIES)
def test_who_does_not_wait_cannot_be_taken_out(name):
    policy = make_policy(name, KVManager(10, 4), 10.0)
    one, other = request(1), request(2)
    policy.add(one)
    for stranger in (other, request(1)):
        with pytest.raises(KeyError):
            policy.remove(stranger)
    policy.add(other)
    policy.remove(one)
    assert list(policy.order(0)) == [other] and len(policy) == 1
    policy.remove(other)
    assert list(policy.order(0)) == [] and len(policy) == 0


def test_prefixes_are_compared_again_when_the_tree_has_changed(monkeypatch):
    kv = KVManager(20, 1)
    policy = make_policy("lpm", kv, 10.0)
    first, second = request(1, SECOND, tokens=(5, 6, 7)), request(2, SECOND, tokens=(1, 2, 3))
    for one in (first, second):
        policy.add(one)
    compared = []
    cached = kv.cached
    monkeypatch.setattr(kv, "cached", lambda one: compared.append(one) or cached(one))
    assert list(policy.order(0)) == [first, second]
    kv.tree.insert(second.tokens[:2].tobytes(), kv.pool.allocate(2))
    assert list(policy.order(0)) == list(policy.order(0)) == [second, first]
    assert compared == [first, second] * 2, "once for each version"
    assert list(policy.order(11 * SECOND - 1)) == [second, first]
    assert list(policy.order(11 * SECOND)) == [first, second], "who has waited for so long goes first"
    for one in (first, second):
        policy.remove(one)
    again = request(1, tokens=(1, 2, 3))
    policy.add(again)
    list(policy.order(0))
    assert compared[4:] == [again], "what was known of a number belongs to who had it"
