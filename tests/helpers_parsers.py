"""What a parser finds in a text in pieces, in short forms to compare."""

from itertools import count, pairwise

from common.parsers import ArgumentsDelta, ContentDelta, Reasoning, ReasoningDelta, ToolCallDelta, make_parser


def parse(pieces, tools, reasoning=Reasoning.NONE, **more):
    """The merged deltas of a text in pieces."""
    ids = count()
    parser = make_parser(tools=tools, reasoning=reasoning, new_id=lambda: f"id{next(ids)}", **more)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    merged = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if not isinstance(delta, ToolCallDelta):
            assert delta.text, "an empty delta"
        if isinstance(delta, ContentDelta | ReasoningDelta) and type(last) is type(delta):
            merged[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            assert delta.index == last.index
            merged[-1] = ArgumentsDelta(last.index, last.text + delta.text)
        else:
            merged.append(delta)
    calls = [d for d in merged if isinstance(d, ToolCallDelta)]
    assert [c.index for c in calls] == list(range(len(calls)))
    assert parser.called == bool(calls)
    return merged


def shown(merged):
    """Deltas in short: content as text, reasoning as ("think", text), calls as (name, arguments)."""
    result = []
    for delta in merged:
        match delta:
            case ContentDelta(text):
                result.append(text)
            case ReasoningDelta(text):
                result.append(("think", text))
            case ToolCallDelta(name=name):
                result.append((name, ""))
            case ArgumentsDelta(text=text):
                name, arguments = result[-1]
                result[-1] = (name, arguments + text)
    return result


def split(text, points):
    cuts = [0, *sorted(p % (len(text) + 1) for p in points), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]
