"""The cluster's configuration: round trip through the run directory, and refusals that name the option."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import (
    ADMISSIONS,
    CONFIG_FILE,
    CPU_KERNELS,
    DTYPES,
    GPU_ATTENTIONS,
    KV_DTYPES,
    POLICIES,
    SPECULATIONS,
    WEIGHT_COMPRESSIONS,
    CacheConfig,
    ClusterConfig,
    ConfigError,
    HttpConfig,
    ModelConfig,
    SchedulerConfig,
    SupervisionConfig,
)

positive = st.integers(1, 10**6)


@st.composite
def configs(draw: st.DrawFn, run_dir: str) -> ClusterConfig:
    model = ModelConfig(
        path=draw(st.text(min_size=1)),
        dtype=draw(st.sampled_from(DTYPES)),
        device=draw(st.sampled_from(("auto", "cpu", "cuda"))),
        context_len=draw(st.none() | st.integers(2, 10**6)),
        tp=draw(st.integers(1, 64)),
        threads=draw(st.none() | st.integers(1, 1024)),
        cpu_kernels=draw(st.sampled_from(CPU_KERNELS)),
        weight_compression=draw(st.sampled_from(WEIGHT_COMPRESSIONS)),
        gpu_attention=draw(st.sampled_from(GPU_ATTENTIONS)),
        **draw(
            st.sampled_from(
                [
                    {},
                    {"quantization": "int8"},
                    {"quantization": "int4", "quantization_group_size": 64},
                    {"quantization": "w4a8"},
                ]
            )
        ),
    )
    page_size = draw(st.integers(1, 4096))
    tokens, nothing = st.integers(page_size, 10**9), st.none()
    size = st.tuples(nothing, nothing) | st.tuples(tokens, nothing) | st.tuples(nothing, positive)
    cache = CacheConfig(page_size, *draw(size), draw(st.booleans()), draw(st.sampled_from(KV_DTYPES)))
    max_running = draw(st.integers(1, 4096))
    max_batch_tokens = draw(st.integers(max_running, 2**20))
    scheduler = SchedulerConfig(
        max_running,
        max_batch_tokens,
        chunk_tokens=draw(st.integers(1, max_batch_tokens)),
        max_waiting=draw(positive),
        steps_in_flight=draw(st.integers(1, 2)),
        policy=draw(st.sampled_from(POLICIES)),
        admission=draw(st.sampled_from(ADMISSIONS)),
        ageing_s=draw(st.floats(0.1, 86400.0)),
        itl_target_ms=draw(st.floats(0.0, 60000.0)),
        in_batch_gain=draw(positive),
        speculation=draw(st.sampled_from(SPECULATIONS)),
        num_speculative_tokens=draw(st.integers(1, 64)),
        prompt_lookup_min=(shortest := draw(st.integers(1, 32))),
        prompt_lookup_max=draw(st.integers(shortest, 32)),
    )
    http = HttpConfig(
        enabled=draw(st.booleans()),
        port=draw(st.integers(0, 65535)),
        served_names=draw(st.lists(st.text(min_size=1, max_size=20), max_size=3).map(tuple)),
        api_key_file=draw(st.none() | st.just("/keys")),
        cors_origins=draw(st.sampled_from([(), ("*",), ("https://a.example", "http://localhost:3000")])),
        strict_fields=draw(st.booleans()),
        key_concurrency=draw(st.integers(0, 100)),
    )
    seconds = st.floats(1.0, 3600.0)
    supervision = SupervisionConfig(draw(seconds), draw(st.integers(0, 1000)), draw(seconds), draw(seconds))
    return ClusterConfig(
        run_dir, model, cache, scheduler, http, supervision,
        listen=draw(st.none() | st.integers(1, 65535).map(lambda port: f"tcp://127.0.0.1:{port}")),
        log_level=draw(st.sampled_from(("debug", "info", "warning", "error"))),
        start_timeout_s=draw(st.floats(0.1, 86400.0)),
        record=draw(st.none() | st.just("/tmp/run.rec")),
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    @given(configs(str(tmp_path)))
    def check(config: ClusterConfig) -> None:
        config.save()
        assert ClusterConfig.load(tmp_path) == config

    check()


def build(section: str, **values: Any) -> Any:
    """The section of the configuration with these values, built as launch.py builds it."""
    if section == "model":
        return ModelConfig(**{"path": "m", **values})
    if section == "cache":
        return CacheConfig(**values)
    if section == "http":
        return HttpConfig(**values)
    if section == "scheduler":
        return SchedulerConfig(**values)
    if section == "supervision":
        return SupervisionConfig(**values)
    return ClusterConfig(**{"run_dir": "d", "model": ModelConfig("m"), **values})


@pytest.mark.parametrize(
    ("section", "values", "option"),
    [
        ("model", {"dtype": "int8"}, "dtype"),
        ("model", {"device": "tpu"}, "device"),
        ("model", {"tp": 0}, "tp"),
        ("model", {"tp": 65}, "tp"),
        ("model", {"context_len": 1}, "context-len"),
        ("model", {"threads": 0}, "threads"),
        ("model", {"threads": 1025}, "threads"),
        ("model", {"path": "m\udcff"}, "model"),
        ("cache", {"page_size": 0}, "page-size"),
        ("cache", {"page_size": 4097}, "page-size"),
        ("cache", {"kv_tokens": 15}, "kv-tokens"),
        ("cache", {"kv_bytes": 0}, "kv-memory"),
        ("cache", {"kv_bytes": 2**20, "kv_tokens": 64}, "kv-memory"),
        ("cache", {"kv_dtype": "fp8"}, "kv-cache-dtype"),
        ("model", {"quantization": "awq"}, "quantization"),
        ("model", {"quantization": "int4", "quantization_group_size": 48}, "quantization-group-size"),
        ("model", {"quantization": "int8", "quantization_group_size": 64}, "quantization-group-size"),
        ("supervision", {"freeze_timeout_s": 0.5}, "freeze-timeout"),
        ("supervision", {"restarts": -1}, "restarts"),
        ("supervision", {"restart_window_s": 0.0}, "restart-window"),
        ("supervision", {"drain_timeout_s": -1.0}, "drain-timeout"),
        ("scheduler", {"max_running": 0}, "max-running"),
        ("scheduler", {"max_running": 4097}, "max-running"),
        ("scheduler", {"max_batch_tokens": 255}, "max-batch-tokens"),
        ("scheduler", {"max_batch_tokens": 2**20 + 1}, "max-batch-tokens"),
        ("scheduler", {"chunk_tokens": 0}, "chunk-tokens"),
        ("scheduler", {"chunk_tokens": 2049}, "chunk-tokens"),
        ("scheduler", {"chunk_slowdown": 0.5}, "chunk-slowdown"),
        ("scheduler", {"chunk_slowdown": -1.0}, "chunk-slowdown"),
        ("cache", {"prefix_cache": False, "host_kv_bytes": 1}, "host-kv-memory"),
        ("scheduler", {"max_waiting": 0}, "max-waiting"),
        ("scheduler", {"max_waiting": 10**6 + 1}, "max-waiting"),
        ("scheduler", {"steps_in_flight": 0}, "steps-in-flight"),
        ("scheduler", {"steps_in_flight": 3}, "steps-in-flight"),
        ("scheduler", {"policy": "random"}, "policy"),
        ("scheduler", {"admission": "all"}, "admission"),
        ("scheduler", {"ageing_s": 0.0}, "ageing"),
        ("scheduler", {"ageing_s": float("nan")}, "ageing"),
        ("scheduler", {"itl_target_ms": -1.0}, "itl-target-ms"),
        ("scheduler", {"itl_target_ms": float("inf")}, "itl-target-ms"),
        ("scheduler", {"in_batch_gain": 0}, "in-batch-gain"),
        ("scheduler", {"speculation": "medusa"}, "speculation"),
        ("scheduler", {"num_speculative_tokens": 65}, "num-speculative-tokens"),
        ("scheduler", {"prompt_lookup_min": 0}, "prompt-lookup-min"),
        ("scheduler", {"prompt_lookup_min": 33, "prompt_lookup_max": 33}, "prompt-lookup-min"),
        ("scheduler", {"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt-lookup-max"),
        ("http", {"port": 65536}, "port"),
        ("http", {"host": ""}, "host"),
        ("http", {"host": 256 * "h"}, "host"),
        ("http", {"served_names": (257 * "n",)}, "served-model-name"),
        ("http", {"otlp_endpoint": "http://"}, "otlp-endpoint"),
        ("http", {"otlp_endpoint": "http:///v1/traces"}, "otlp-endpoint"),
        ("http", {"served_names": ("",)}, "served-model-name"),
        ("http", {"served_names": ("a",) * 17}, "served-model-name"),
        ("http", {"served_names": ("a\udcff",)}, "served-model-name"),
        ("http", {"key_concurrency": -1}, "key-concurrency"),
        ("http", {"max_body_bytes": 10}, "max-body"),
        ("http", {"cors_origins": ("example.org",)}, "cors-origin"),
        ("cluster", {"log_level": "loud"}, "log-level"),
        ("cluster", {"start_timeout_s": 0.0}, "start-timeout"),
        ("cluster", {"start_timeout_s": float("nan")}, "start-timeout"),
        ("cluster", {"start_timeout_s": float("inf")}, "start-timeout"),
        ("cluster", {"record": "run.rec"}, "record"),
        ("cluster", {"listen": "tcp://0.0.0.0:5555"}, "listen"),
        ("cluster", {"listen": "tcp://*:5555"}, "listen"),
        ("cluster", {"listen": "tcp://192.168.0.1:5555"}, "listen"),
        ("cluster", {"listen": "tcp://127.0.0.1"}, "listen"),
        ("cluster", {"listen": "tcp://127.0.0.1:0"}, "listen"),
        ("cluster", {"listen": "tcp://127.0.0.1:65536"}, "listen"),
        ("cluster", {"listen": "ipc:///tmp/x"}, "listen"),
        ("cluster", {"listen": "tcp://127.0.0.1.example.org:5555"}, "listen"),
    ],
)
def test_refusals_name_the_option(section: str, values: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} must be "):
        build(section, **values)


@pytest.mark.parametrize(
    ("section", "field", "least", "most"),
    [
        ("model", "tp", 1, 64), ("model", "context_len", 2, None), ("model", "threads", 1, 1024),
        ("cache", "page_size", 1, 4096), ("cache", "kv_tokens", 64, None), ("cache", "kv_bytes", 1, None),
        ("cache", "host_kv_bytes", 0, 2**50),
        ("scheduler", "max_running", 1, 4096), ("scheduler", "max_batch_tokens", 256, 2**20),
        ("scheduler", "chunk_tokens", 1, 8192), ("scheduler", "chunk_slowdown", None, 1000),
        ("scheduler", "max_waiting", 1, 10**6), ("scheduler", "steps_in_flight", 1, 2),
        ("scheduler", "ageing_s", None, 86400), ("scheduler", "in_batch_gain", 1, None),
        ("scheduler", "itl_target_ms", 0, 60000), ("scheduler", "num_speculative_tokens", 1, 64),
        ("scheduler", "prompt_lookup_min", 1, 32), ("scheduler", "prompt_lookup_max", 2, 32),
        ("supervision", "freeze_timeout_s", 1, 3600), ("supervision", "restarts", 0, 1000),
        ("supervision", "restart_window_s", None, 86400), ("supervision", "drain_timeout_s", 0, 86400),
        ("http", "port", 0, 65535), ("http", "key_concurrency", 0, 10**6), ("http", "max_body_bytes", 1024, 2**30),
        ("cluster", "start_timeout_s", None, 86400),
    ],
)  # fmt: skip
def test_limits_are_exactly_those_that_are_named(section: str, field: str, least: int | None, most: int | None) -> None:
    beside = {
        "kv_tokens": {"page_size": 64}, "prompt_lookup_min": {"prompt_lookup_max": 32},
        "max_running": {"max_batch_tokens": 8192}, "chunk_tokens": {"max_batch_tokens": 8192},
        "max_batch_tokens": {"chunk_tokens": 1},
    }.get(field, {})  # fmt: skip
    for limit, step in ((least, -1), (most, 1)):
        if limit is not None:
            assert getattr(build(section, **beside, **{field: limit}), field) == limit
            with pytest.raises(ConfigError, match=" must be "):
                build(section, **beside, **{field: limit + step})


def test_limits_of_texts_and_of_what_may_be_off() -> None:
    assert build("scheduler", chunk_slowdown=0).chunk_slowdown == 0
    assert build("http", host=255 * "h", served_names=16 * (256 * "n",)).names("/models/m")[0] == 256 * "n"
    assert (build("http").names("/models/m"), build("http").names("/")) == (("m",), ("model",))
    for port in (1, 65535):
        assert build("cluster", listen=f"tcp://127.0.0.1:{port}").listen


@pytest.mark.parametrize("section", ["model", "cache", "scheduler", "http", "cluster"])
def test_defaults_are_allowed_and_nothing_changes_afterwards(section: str) -> None:
    config = build(section)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("model", "tp"), "2", "model.tp"),
        (("model", "tp"), True, "model.tp"),
        (("model", "tp"), 2.0, "model.tp"),
        (("model", "path"), None, "model.path"),
        (("cache", "prefix_cache"), 1, "cache.prefix_cache"),
        (("cache", "kv_tokens"), "many", "cache.kv_tokens"),
        (("scheduler", "max_running"), None, "scheduler.max_running"),
        (("scheduler",), [], "scheduler"),
        (("http", "served_names"), "name", "http.served_names"),
        (("http", "cors_origins"), [1], "http.cors_origins"),
        (("listen",), 5555, "config.listen"),
        (("start_timeout_s",), "soon", "config.start_timeout_s"),
        (("unknown",), 1, "config"),
        (("model", "unknown"), 1, "model"),
        (("model", "tp"), 1000, "tp"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, path: tuple[str, ...], value: Any, named: str) -> None:
    build("cluster", run_dir=str(tmp_path)).save()
    values = json.loads((tmp_path / CONFIG_FILE).read_text())
    section = values
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = value
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"^{named}\\b"):
        ClusterConfig.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}", "\x00"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError):
        ClusterConfig.load(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ClusterConfig.load(tmp_path)


def test_an_integer_does_for_a_float(tmp_path: Path) -> None:
    build("cluster", run_dir=str(tmp_path), start_timeout_s=5).save()
    assert ClusterConfig.load(tmp_path).start_timeout_s == 5
