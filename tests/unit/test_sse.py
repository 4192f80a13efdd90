"""Server-sent events, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_cli import sse
from client_cli.sse import SseError, SseParser


def test_fields_comments_and_line_ends() -> None:
    stream = b': hello\ndata: {"a": 1}\n\nid: 7\nevent: x\ndata:two\r\n\r\ndata: a\ndata: b\n\n\n\ndata: not ended\n'
    assert SseParser().feed(stream) == [b'{"a": 1}', b"two", b"a\nb"]


@given(st.lists(st.binary(min_size=1).filter(lambda b: b"\n" not in b and b"\r" not in b)), st.data())
def test_any_cut_gives_the_same_events(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + event + b"\n\n" for event in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = SseParser()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[start:end])
    assert found == events


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = SseParser()
    with pytest.raises(SseError, match="100 bytes"):
        for _ in range(20):
            parser.feed(b"data: 0123456789\n")
    with pytest.raises(SseError):
        SseParser().feed(b"x" * 101)
