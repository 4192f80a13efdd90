"""What a simulated step costs: shapes of models, the roofline, and files of fitted costs."""

import json
from pathlib import Path

import pytest

from scheduler_proc.cost_model import CostError, Costs, ModelShape, Overheads, Roofline, StepWork
from tests.unit.simulator_runs import COST

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def write(path: Path, values) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_the_shape_of_a_known_model(tmp_path):
    shape = ModelShape.of_config(write(tmp_path / "config.json", LLAMA_8B))
    assert shape.kv_bytes_per_token == 131072
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9 - 0.525e9, rel=0.001)  # all but the table of embeddings
    assert ModelShape.of_config(tmp_path) == shape


def test_a_roofline_is_bandwidth_bound_in_decode_and_compute_bound_in_prefill(tmp_path):
    shape = ModelShape.of_config(write(tmp_path / "config.json", LLAMA_8B))
    cost = Roofline(shape, 3e12, 900e12, 1e-3)
    decode = cost.seconds(StepWork(1, 1, 0, 1, 1000, 1000, 1000))
    assert decode == pytest.approx(1e-3 + (shape.weight_bytes + 131072 * 1001) / 3e12)
    prefill = cost.seconds(StepWork(8192, 1, 1, 1, 8192, 8192 * 8193 // 2, 0))
    flops = 2 * 8192 * (8.03e9 - 2 * 0.525e9) + shape.flops_per_sample + 4 * 32 * 4096 * 8192 * 8193 / 2
    assert prefill == pytest.approx(1e-3 + flops / 900e12, rel=0.001)


@pytest.mark.parametrize(
    ("rates", "field"),
    [((0, 1), "bandwidth"), ((1, -1), "tflops"), ((float("nan"), 1), "bandwidth"), ((1, 1, -1), "step")],
)
def test_rates_that_are_none_are_refused_by_name(rates, field):
    with pytest.raises(CostError, match=field):
        Roofline(ModelShape(1, 1, 1, 1, 1), *rates)


def test_gpt2_and_what_is_refused(tmp_path):
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    shape = ModelShape.of_config(write(tmp_path / "gpt2.json", gpt2))
    assert shape.weight_bytes / 2 == pytest.approx(124.4e6 - 1024 * 768, rel=0.001)
    with pytest.raises(CostError, match="num_local_experts"):
        ModelShape.of_config(write(tmp_path / "moe.json", LLAMA_8B | {"num_local_experts": 8}))
    with pytest.raises(CostError, match="vocab_size"):
        ModelShape.of_config(write(tmp_path / "bad.json", LLAMA_8B | {"vocab_size": "many"}))
    with pytest.raises(CostError, match="cannot be read"):
        ModelShape.of_config(tmp_path / "missing.json")


def test_costs_come_back_from_their_file_and_errors_name_the_field(tmp_path):
    costs = Costs(COST, Overheads(submit_s=0.5e-3), "a test")
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    for values, field in (
        ({"step": {"base_s": -1}}, "step.base_s"),
        ({"step": {"speed": 1}}, "step.speed"),
        ({"overheads": {"plan_s": "1"}}, "overheads.plan_s"),
        ({"steps": {}}, "steps"),
    ):
        with pytest.raises(CostError, match=field):
            Costs.load(write(tmp_path / "bad.json", values))
