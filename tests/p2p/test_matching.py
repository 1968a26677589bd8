"""The matcher against a model that does the obvious thing, slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_nixl.p2p.matching import Matcher

SOURCES = st.integers(0, 2)
WANTED = st.one_of(st.none(), SOURCES)
TAGS = st.integers(0, 2)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), WANTED, TAGS),
        st.tuples(st.just("message"), SOURCES, TAGS),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


class Model:
    """Two lists in order of time, searched from the front."""

    def __init__(self) -> None:
        self.receives: list[tuple[int, int | None, int]] = []
        self.messages: list[tuple[int, int, int]] = []

    def receive(self, name: int, source: int | None, tag: int) -> int | None:
        for entry in self.messages:
            if entry[2] == tag and source in (None, entry[1]):
                self.messages.remove(entry)
                return entry[0]
        self.receives.append((name, source, tag))
        return None

    def message(self, name: int, source: int, tag: int) -> int | None:
        for entry in self.receives:
            if entry[2] == tag and entry[1] in (None, source):
                self.receives.remove(entry)
                return entry[0]
        self.messages.append((name, source, tag))
        return None


@given(STEPS)
def test_matcher_pairs_what_the_model_pairs(steps: list[tuple[str, int | None, int]]) -> None:
    model, matcher = Model(), Matcher[str, str]()
    names: dict[str, str] = {}
    for number, (what, source, tag) in enumerate(steps):
        name = names.setdefault(str(number), str(number))
        if what == "receive":
            expected = model.receive(number, source, tag)
            peeked = matcher.peek(source, tag)
            found = matcher.take(source, tag)
            assert peeked is found
            assert found == (None if expected is None else str(expected))
            if found is None:
                matcher.post(name, source, tag)
        elif what == "message":
            assert source is not None
            expected = model.message(number, source, tag)
            found = matcher.match(source, tag)
            assert found == (None if expected is None else str(expected))
            if found is None:
                matcher.store(name, source, tag)
        elif what == "cancel" and model.receives:
            assert source is not None
            entry = model.receives.pop(source % len(model.receives))
            assert matcher.cancel(names[str(entry[0])], entry[1], entry[2])
            assert not matcher.cancel(names[str(entry[0])], entry[1], entry[2])
        elif what == "remove" and model.messages:
            assert source is not None
            message = model.messages.pop(source % len(model.messages))
            assert matcher.remove(names[str(message[0])], message[1], message[2])
            assert not matcher.remove(names[str(message[0])], message[1], message[2])
        assert matcher.num_messages == len(model.messages)
        assert matcher.num_any == sum(entry[1] is None for entry in model.receives)
        waiting = sorted(matcher.receives(), key=lambda entry: int(entry[2]))
        assert waiting == [(where, at, str(who)) for who, where, at in model.receives]
        assert sorted(matcher.messages(), key=int) == [str(one[0]) for one in model.messages]


def test_matcher_keeps_nothing_of_tags_that_are_used_up() -> None:
    matcher = Matcher[str, str]()
    for tag in range(100):
        matcher.store("m", 0, tag)
        assert matcher.take(None, tag) == "m"
        matcher.post("r", None, tag)
        assert matcher.match(0, tag) == "r"
    assert not matcher._messages
    assert not matcher._receives


def test_any_source_receive_posted_first_is_not_overtaken_by_a_specific_one() -> None:
    matcher = Matcher[str, str]()
    matcher.post("any", None, 0)
    matcher.post("specific", 1, 0)
    assert matcher.match(1, 0) == "any"
    assert matcher.match(1, 0) == "specific"
    assert matcher.match(1, 0) is None
