"""The gateway's options of launch.py, which gets them as one HttpConfig."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from common.config import GENERATION_CONFIGS, ConfigError, HttpConfig
from common.tracing import require_extra
from gateway_proc.address import find_address
from gateway_proc.key_file import KeysError, read_keys

_OPTIONS = (
    click.option("--host", default="127.0.0.1", help="Address for HTTP; beyond loopback, API keys are required."),
    click.option("--port", type=int, default=8000, help="Port for HTTP; 0 takes a free one."),
    click.option("--no-http", is_flag=True, help="Start no HTTP gateway."),
    click.option("--served-model-name", multiple=True, help="What requests call the model.  [default: its directory]"),
    click.option("--api-key-file", type=click.Path(path_type=Path), help="Private file: `name:key` per line."),
    click.option("--key-concurrency", type=int, default=0, help="Live requests per API key; 0 is no limit."),
    click.option("--cors-origin", multiple=True, help="Origin whose pages may use HTTP, or *."),
    click.option("--strict-fields", is_flag=True, help="Refuse unknown fields instead of naming them."),
    click.option("--max-body", type=int, default=16 * 2**20, help="Bytes of a request's body."),
    click.option(
        "--generation-config", type=click.Choice(GENERATION_CONFIGS), default="auto",
        help="Sampling defaults of HTTP requests: auto takes the model's generation_config.json, as vLLM does.",
    ),
    click.option("--otlp-endpoint", default=None, metavar="URL", help="Collector for a trace of each request."),
)  # fmt: skip


def http_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, whose function gets `http`. A wrong one ends the command with its name."""

    @wraps(function)
    def with_http(
        *,
        host: str,
        port: int,
        no_http: bool,
        served_model_name: tuple[str, ...],
        api_key_file: Path | None,
        key_concurrency: int,
        cors_origin: tuple[str, ...],
        strict_fields: bool,
        max_body: int,
        generation_config: str,
        otlp_endpoint: str | None,
        **rest: Any,
    ) -> None:
        try:
            http = HttpConfig(
                enabled=not no_http,
                host=host,
                port=port,
                served_names=served_model_name,
                api_key_file=None if api_key_file is None else str(api_key_file.resolve()),
                cors_origins=cors_origin,
                strict_fields=strict_fields,
                key_concurrency=key_concurrency,
                max_body_bytes=max_body,
                generation_config=generation_config,
                otlp_endpoint=otlp_endpoint,
            )
            if otlp_endpoint is not None:
                require_extra()
            if http.enabled:
                _check(http)
        except (ConfigError, KeysError) as error:
            raise click.ClickException(str(error)) from None
        function(http=http, **rest)

    for option in reversed(_OPTIONS):
        with_http = option(with_http)
    return with_http


def _check(http: HttpConfig) -> None:
    """The gateway reads keys and finds its address itself: here, before anything is started, only whether it can."""
    keys = read_keys(None if http.api_key_file is None else Path(http.api_key_file), os.environ)
    find_address(http, with_keys=bool(keys))
