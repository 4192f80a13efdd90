"""Drive a real cluster with the simulator's workloads."""

import time

from common.connection import Connection, Row
from common.messages import Finish
from common.sampling_params import SamplingParams
from scheduler_proc.simulation import Record
from scheduler_proc.workload import Traffic, Vocabulary, Workload

PATIENCE_S = 10.0


def greedy(tokens: int) -> SamplingParams:
    """Exactly so many tokens, whatever the model says."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)


def replay(connection: Connection, workload: Workload, vocabulary: Vocabulary) -> list[Record]:
    """Send a workload's requests when they are due, and record what comes back on the client's clock.

    Raises ValueError for what a client cannot ask of a cluster: answers that end by themselves, salts, priorities.
    """
    for session in workload.sessions:
        if session.salt or session.priority or any(t.output_tokens != t.max_tokens for t in session.turns):
            raise ValueError("a cluster cannot be told when answers end, nor salts or priorities")
    traffic = Traffic(workload, vocabulary)
    records: dict[int, Record] = {}
    numbers: dict[int, int] = {}  # the connection's request ids
    start = time.monotonic_ns()
    while not traffic.done:
        for submission in traffic.due(time.monotonic_ns() - start):
            now = time.monotonic_ns() - start
            records[submission.number] = Record(submission.number, len(submission.prompt), now)
            numbers[connection.submit(submission.prompt, greedy(submission.max_tokens))] = submission.number
        next_due = traffic.next_due
        wait = PATIENCE_S if next_due is None else (next_due + start - time.monotonic_ns()) / 1e9
        for row in connection.poll(max(0.0, min(wait, PATIENCE_S))):
            record = records[numbers[row.rid]]
            if not isinstance(row, Row):
                record.problem = row.problem
                traffic.ended(record.number, None, time.monotonic_ns() - start)
                continue
            for token in row.token_ids:
                record.token(token, row.received_ns - start, row.times, start)
            record.cached = row.cached_tokens
            if row.finish is not Finish.NONE:
                record.finished = True
                traffic.ended(record.number, record.answer, row.received_ns - start)
    return list(records.values())
