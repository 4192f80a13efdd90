"""Small runs of the simulator, for its tests."""

from scheduler_proc.cost_model import LinearCost, Overheads
from scheduler_proc.simulator import configure, simulate
from scheduler_proc.workload import Lengths, Session, Text, Turn, Vocabulary, Workload

VOCABULARY = Vocabulary(seed=3)
# whole nanoseconds, so that nothing is rounded
COST = LinearCost(1e-3, 10e-6, 20e-6, 300e-6, 50e-9, 2e-9, 3e-9, 1e-6, 2e-6, 4e-6)
SMALL = {"max_running": 8, "max_batch_tokens": 512, "chunk_tokens": 64, "kv_tokens": 4096, "page_size": 16}


def fixed(n):
    return Lengths("fixed", n)


def one_request(prompt, output, limit=None):
    return Workload((Session((Turn((Text(0, prompt),), output, limit or output),)),))


def run(workload, cost=COST, overheads=Overheads(), moving=0.0, **values):  # noqa: B008
    setup = configure(SMALL | values, workload.longest, cost, overheads, moving)
    return simulate(setup, workload, VOCABULARY, check_every=1)


TRACE = """
{"arrival_s": 0.5, "prompt_tokens": 50, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40}
{"arrival_s": 0, "prompt_tokens": 60, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40, "session": 1}
{"arrival_s": 0.1, "prompt_tokens": 90, "output_tokens": 5, "session": 1, "max_tokens": 9}
{"arrival_s": 9, "prompt_tokens": 50, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40, "salt": "t"}
"""
