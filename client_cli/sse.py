"""Server-sent events, as far as streams of completions use them (WHATWG HTML, section 9.2.6)."""

MAX_EVENT_BYTES = 64 * 2**20


class SseError(ValueError):
    """The stream is not what a server of completions sends."""


class SseParser:
    """Bytes in, cut anywhere; the data of each complete event out. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes. Raises SseError when an event is too large."""
        lines = (self._rest + chunk).split(b"\n") if self._rest else chunk.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                data = line[6:] if line[5:6] == b" " else line[5:]
                self._data.append(data)
                self._size += len(data)
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._size = 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise SseError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        return events
