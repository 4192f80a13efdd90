"""Gateways with clusters of their own: what they are started with, until the model is there, and how they end."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.helpers_http import dial, post, until, until_closed
from tests.integration.cluster import ROOT, Cluster, running, wait_until
from tests.integration.test_gateway import DEMO, LONG, running_requests


def test_keys_strict_fields_and_names(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice-0123456789\n")
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--strict-fields", "--served-model-name", "a", "--served-model-name", "b")
    with running(DEMO, "--port", "0", *flags) as cluster:
        url = cluster.info["addresses"]["http"]
        for name in ("launcher", "gateway", "tokenizer", "worker-0"):
            line = Path(f"/proc/{cluster.pid(name)}/cmdline").read_bytes()
            assert b"sk-alice" not in line
        body: dict[str, Any] = {"model": "b", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        headers = {"authorization": "Bearer sk-alice-0123456789"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).json()["model"] == "b"
        assert httpx.post(f"{url}/v1/completions", json=body | {"zap": 1}, headers=headers).status_code == 400
        assert (
            httpx.post(f"{url}/v1/completions", json=body | {"model": "demo_model"}, headers=headers).status_code == 404
        )
        names = [m["id"] for m in httpx.get(f"{url}/v1/models", headers=headers).json()["data"]]
        assert names == ["a", "b"]
        assert "sk-alice" not in cluster.log


def test_a_taken_port_and_wrong_options_end_the_start_with_a_word() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, words in (
            (["--port", port], f"port {port}: Address already in use"),
            (["--host", "0.0.0.0", "--port", "0"], "API keys are required"),
            (["--api-key-file", "/nowhere"], "No such file"),
            (["--port", "99999"], "port must be between 0 and 65535"),
            (["--cors-origin", "x"], "cors-origin must be"),
        ):
            ended = subprocess.run(
                [sys.executable, str(ROOT / "launch.py"), *flags], capture_output=True, text=True, timeout=120
            )
            assert ended.returncode == 1 and words in ended.stderr, ended.stderr


def test_draining_finishes_streams_and_refuses_new_requests() -> None:
    with Cluster(DEMO, "--port", "0") as cluster:
        url = cluster.wait_ready().info["addresses"]["http"]
        with dial(url) as connection, dial(url) as other:
            with cluster.frozen():  # so that the answer cannot end before all this has happened
                connection.sendall(post("/v1/completions", LONG | {"stream": True}))
                wait_until(lambda: running_requests(url)[0] == 1, 30)
                cluster.process.send_signal(signal.SIGTERM)
                while httpx.get(f"{url}/health/ready").status_code != 503:
                    assert cluster.process.poll() is None, cluster.log
                other.sendall(post("/v1/completions", LONG))
                refused = until(other, b'"code":"draining"')
            rest = until_closed(connection)
        assert cluster.process.wait(30) == 0, cluster.log
        assert b" 503 " in refused.split(b"\r\n")[0], refused
        assert b'"finish_reason":"length"' in rest and b"data: [DONE]" in rest, rest[-500:]
        cluster.check_gone()


def test_a_second_signal_ends_streams_with_a_word() -> None:
    with Cluster(DEMO, "--port", "0") as cluster:
        url = cluster.wait_ready().info["addresses"]["http"]
        with dial(url) as connection:
            connection.sendall(post("/v1/completions", LONG | {"stream": True}))
            until(connection, b"data: ")
            cluster.process.send_signal(signal.SIGTERM)
            assert cluster.stop(signal.SIGINT) == 0, cluster.log
            rest = until_closed(connection)
        assert b'"code":"shutting_down"' in rest and rest.rstrip().endswith(b"0"), rest[-500:]
        cluster.check_gone()


def test_liveness_before_the_model_is_there() -> None:
    """The gateway answers while the workers still load, and says why requests have to wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = Cluster(DEMO, "--port", str(port))
    url = f"http://127.0.0.1:{port}"

    def live() -> bool:
        try:
            return httpx.get(f"{url}/health/live").status_code == 200
        except httpx.TransportError:
            return False

    with cluster:
        wait_until(live, 60, lambda: cluster.log)
        early = httpx.get(f"{url}/health/ready")  # usually before the model is there
        assert early.status_code == 200 or "starting" in early.json()["reason"]
        cluster.wait_ready()
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 10, lambda: cluster.log)
        assert cluster.stop() == 0
        cluster.check_gone()
