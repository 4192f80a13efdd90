"""The parts of an answer that are no calls."""

from collections.abc import Sequence

from common.parsers.deltas import DeltaWriter
from common.parsers.scanning import find_marker


class Content:
    """Passes text on up to a marker. White space next to a call is no content: it is held back until it is known what
    follows, and dropped after a call, as is the beginning of a mark there with which all ends."""

    def __init__(self, writer: DeltaWriter) -> None:
        self._writer = writer
        self.after_call = False
        self.said = False  # anything since this was set to False

    def scan(self, text: str, markers: Sequence[str], *, final: bool) -> tuple[str, str]:
        """Pass `text` on as far as it is known. Returns what must be seen again together with what comes, and, where
        one of the `markers` came, the white space with that marker; the text behind it is what is left then."""
        if self.after_call:
            text = text.lstrip()
            if final and any(marker.startswith(text) and marker != text for marker in markers):
                return "", ""  # the answer was cut off within a mark
        at, marker = find_marker(text, markers, final=final)
        end = len(text[:at].rstrip()) if marker or not final else at
        self.after_call = self.after_call and not (end or marker)
        self._writer.content(text[:end])
        self.said = self.said or end > 0
        if marker:
            return text[at + len(marker) :], text[end : at + len(marker)]
        return text[end:], ""

    def restore(self, raw: str) -> None:
        """Text that looked like a call was none."""
        self._writer.content(raw)
        self.said = True
        self.after_call = False
