"""A recording of a real cluster replays to identical plans."""

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.connection import Row
from common.messages import Finish
from common.sampling_params import SamplingParams
from scheduler_proc import replay
from scheduler_proc.recording import Recording
from scheduler_proc.timeline import Arrived, Committed, Timeline
from tests.integration.cluster import ROOT, running


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_cluster_is_recorded_and_replayed(tmp_path: Path, steps_in_flight: int) -> None:
    path = tmp_path / "run.rec"
    flags = ["--record", str(path), "--kv-tokens", "320", "--steps-in-flight", str(steps_in_flight), "--threads", "1"]
    with running(ROOT / "demo_model", *flags) as cluster, cluster.connect() as connection:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
        live = {connection.submit([5, 6, 7] * 9 + [rid], params) for rid in range(12)}
        output = 0
        while live:
            for row in connection.poll(10):
                assert isinstance(row, Row)
                output += len(row.token_ids)
                if row.finish is not Finish.NONE:
                    live.remove(row.rid)
    assert output == 12 * 12
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entries = [e.what for e in Timeline(Recording.open(path))]
    assert sum(isinstance(e, Arrived) for e in entries) == 12
    steps = [e for e in entries if isinstance(e, Committed)]
    assert sum(step.tokens for step in steps) == output
    assert all(s.times is not None and s.times[0] <= s.times[1] < s.times[2] for s in steps)
    result = CliRunner().invoke(replay.main, [str(path), "--check", "--chrome", str(tmp_path / "trace.json")])
    assert result.exit_code == 0, result.output
    assert "plans, all identical; closed" in result.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
