"""A Hugging Face hub on loopback: the four requests that huggingface_hub makes for a snapshot, over a directory."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """`models` maps ids to directories. `served` lists the files whose bytes were given out."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._refuse("EntryNotFound")

    def _api(self, repo: str, rest: list[str]) -> None:
        home = self.server.models.get(repo)
        if home is None:
            return self._refuse("RepoNotFound")
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._refuse("RevisionNotFound")
        names = sorted(str(file.relative_to(home)) for file in home.rglob("*") if file.is_file())
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": n, "size": (home / n).stat().st_size, "oid": _oid(home / n)} for n in names
            ]
            return self._send(json.dumps(tree).encode(), {"Content-Type": "application/json"})
        about = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        self._send(json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, name: str) -> None:
        home = self.server.models.get(repo)
        if home is None or not (home / name).is_file():
            return self._refuse("EntryNotFound")
        if self.command == "GET":
            self.server.served.append(name)
        self._send((home / name).read_bytes(), {"ETag": f'"{_oid(home / name)}"', "X-Repo-Commit": COMMIT})

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "Content-Type": "application/json"}, 404)


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    server = Hub(models)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
