"""Lines of a batch on an HTTP server: bodies go as they are, and answers come back as they are."""

import json

import aiohttp

from client_cli.batch_file import Line, Outcome
from client_cli.http_loop import HttpLoop, Server, failure_text
from client_cli.http_models import find_model


class HttpRunner:
    """Posts lines; `model` replaces that of every body. Raises as find_model does: a server that is not there, or does
    not take the key, must not cost the file a line for each request."""

    def __init__(self, server: Server, model: str | None, wait_s: float):
        self._http: HttpLoop[Outcome] = HttpLoop(server)
        self._model = model
        self._live = 0
        try:
            find_model(self._http, model or "", wait_s)
        except BaseException:
            self._http.close()
            raise

    @property
    def live(self) -> int:
        return self._live

    def start(self, line: Line) -> None:
        self._live += 1
        self._http.start(self._run(line))

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Lines that have ended."""
        ended = self._http.poll(timeout_s)
        self._live -= len(ended)
        return ended

    async def _run(self, line: Line) -> None:
        body = line.body if self._model is None else {**line.body, "model": self._model}
        try:
            async with self._http.post(line.url, body) as response:
                values = json.loads(await response.read())
                status = response.status
            if type(values) is not dict:
                raise ValueError(f"an object was expected, got {type(values).__name__}")
            outcome = Outcome(line.custom_id, status, values)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome = _lost(line, "connection_error", failure_text(error))
        except Exception as error:  # whatever a server says, the line must end
            outcome = _lost(line, "invalid_response", f"the server's answer cannot be read: {error}")
        self._http.arrive(outcome)

    def stop(self) -> None:
        """Nothing to do before `close`, which cuts the connections."""

    def close(self) -> None:
        self._http.close()


def _lost(line: Line, code: str, message: str) -> Outcome:
    return Outcome(line.custom_id, 0, None, {"code": code, "message": message})
