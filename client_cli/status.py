"""`status`: is the server healthy? One look, an exit code for scripts."""

import json
import time
from dataclasses import asdict
from typing import Any

import click

from client_cli.errors import EXIT_FAILED, EXIT_NO_CLUSTER
from client_cli.target import Target, target_options


@click.command("status", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=5.0, help="Seconds in which "
              "the server must answer.")  # fmt: skip
@target_options
def command(as_json: bool, timeout_s: float, target: Target) -> None:
    """Say whether a cluster serves: its processes live, and a question that passes through all of them is answered.

    Exit codes: 0 healthy, 1 unhealthy, 2 there is none or wrong usage.
    """
    state, code = _look(target, timeout_s)
    if as_json:
        click.echo(json.dumps(state))
    else:
        click.echo(f"{state['status']}" + (f": {state['problem']}" if state["problem"] else ""))
        for name in ("server", "model", "context_len", "kv_tokens", "requests", "answered_ms"):
            if state.get(name) is not None:
                click.echo(f"  {name:<12} {_words(state[name])}")
        if state.get("processes"):
            named = (f"{row['name']} {row['pid']}" for row in state["processes"])
            click.echo(f"  {'processes':<12} {'  '.join(named)}")
    raise SystemExit(code)


def _words(value: Any) -> str:
    return ", ".join(f"{v:g} {k}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _look(target: Target, timeout_s: float) -> tuple[dict[str, Any], int]:
    """What was found, and the exit code."""
    from client_cli.errors import NoClusterError
    from client_cli.watch import Watcher
    from common.connection import ConnectionLost, Unreachable

    state: dict[str, Any] = {"status": "none", "problem": None, "server": target.url or target.address}
    try:
        watcher = Watcher(target)
    except (NoClusterError, Unreachable) as error:
        return state | {"problem": str(error)}, EXIT_NO_CLUSTER
    started = time.monotonic()
    try:
        problem = _remote(watcher, state, timeout_s) if target.url else _local(watcher, state, timeout_s)
    except Unreachable as error:
        return state | {"problem": str(error)}, EXIT_NO_CLUSTER
    except ConnectionLost as error:
        problem = str(error)
    finally:
        watcher.close()
    state["answered_ms"] = None if problem else round((time.monotonic() - started) * 1000, 1)
    state |= {"status": "unhealthy" if problem else "healthy", "problem": problem}
    return state, EXIT_FAILED if problem else 0


def _local(watcher: Any, state: dict[str, Any], timeout_s: float) -> str | None:
    """Fill in what a local cluster says; the problem, if there is one."""
    model = watcher.info.get("model", {})
    processes = watcher.look()
    state |= {"model": model.get("path"), "context_len": model.get("context_len"), "kv_tokens": model.get("kv_tokens")}
    state |= {"server": state["server"] or watcher.info.get("addresses", {}).get("frontend")}
    state["processes"] = [asdict(row) for row in processes]
    gone = [row.name for row in processes if row.rss is None]
    if gone:
        return f"not running: {', '.join(gone)}"
    snapshot = watcher.snapshot(timeout_s)
    state["requests"] = {"running": snapshot.running, "waiting": snapshot.waiting}
    return None


def _remote(watcher: Any, state: dict[str, Any], timeout_s: float) -> str | None:
    """The same over HTTP: its list of models, and /health where it has one."""
    from client_cli.http_models import PATH, models_of
    from common.connection import ConnectionLost

    try:
        models = models_of(watcher.page(PATH, timeout_s))
    except ValueError:
        return f"{PATH} is not a list of models"
    state["model"] = ", ".join(model["id"] for model in models)
    state["context_len"] = models[0].get("max_model_len")
    for path in ("/health/ready", "/health"):
        try:
            watcher.page(path, timeout_s)
            break
        except ConnectionLost as error:
            if "HTTP 404" not in str(error):
                return str(error)
    try:
        snapshot = watcher.snapshot(timeout_s)
    except ConnectionLost:  # /metrics is not part of OpenAI's API
        return None
    if snapshot.running is not None:
        state["requests"] = {"running": snapshot.running, "waiting": snapshot.waiting or 0}
    return None
