"""The detokenizer: joined pieces are the full decoding, characters stay whole, stops never leak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontends.text.detokenizer import Detokenizer, Piece
from frontends.text.model import TextModel

SCRIPTS = st.sampled_from("ab ,.\n1😀👩‍👩‍👧你好世界สวัสดีé\u0301กำ\u2581\ufffd𐍈")
TEXTS = st.lists(SCRIPTS, max_size=40).map("".join)
CUTS = st.lists(st.integers(1, 5), max_size=60)
PROPERTY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(ids: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    """`ids` in groups of the given sizes; the last one takes the rest."""
    groups, at = [], 0
    for size in sizes:
        groups.append(ids[at : at + size])
        at += size
    return [*groups, ids[at:]]


def run(detokenizer: Detokenizer, groups: Iterable[Sequence[int]]) -> list[Piece]:
    pieces = [detokenizer.feed(group) for group in groups]
    return [*pieces, detokenizer.finish()]


def joined(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(model: TextModel) -> st.SearchStrategy[list[int]]:
    """Random ids, the special ones and single bytes among them more often than in the vocabulary."""
    return st.lists(st.integers(0, 400) | st.integers(0, model.vocab_size - 1), max_size=40)


def check_pieces_join_to_the_decoding(model: TextModel, data: st.DataObject) -> None:
    ids = data.draw(ids_of(model) | TEXTS.map(model.encode))
    skip, sizes = data.draw(st.booleans()), data.draw(CUTS)
    pieces = run(Detokenizer(model, skip_special_tokens=skip), cut(ids, sizes))
    told = run(Detokenizer(model, skip_special_tokens=skip, with_tokens=True), cut(ids, sizes))
    expected = model.decode(ids, skip)
    assert joined(pieces) == expected
    assert joined(told) == expected
    assert sum(piece.num_tokens for piece in pieces) == len(ids)
    tokens = [token for piece in told for token in piece.tokens]
    assert [token.id for token in tokens] == ids
    assert "".join(token.text for token in tokens) == expected
    assert [token.offset for token in tokens] == [sum(len(t.text) for t in tokens[:i]) for i in range(len(tokens))]


@PROPERTY
@given(data=st.data())
def test_byte_level_pieces_join_to_the_decoding(smol: TextModel, data: st.DataObject) -> None:
    check_pieces_join_to_the_decoding(smol, data)


@PROPERTY
@given(data=st.data())
def test_sentencepiece_pieces_join_to_the_decoding(sentencepiece: TextModel, data: st.DataObject) -> None:
    check_pieces_join_to_the_decoding(sentencepiece, data)


def check_no_character_is_cut(model: TextModel, text: str) -> None:
    ids = model.encode(text, add_special_tokens=False)
    expected = model.decode(ids)
    detokenizer = Detokenizer(model)
    shown = ""
    for id in ids:
        shown += detokenizer.feed([id]).text
        assert expected.startswith(shown)
    assert shown + detokenizer.finish().text == expected


@PROPERTY
@given(text=TEXTS)
def test_byte_level_never_cuts_a_character(smol: TextModel, text: str) -> None:
    check_no_character_is_cut(smol, text)
    assert smol.decode(smol.encode(text)) == text


@PROPERTY
@given(text=TEXTS)
def test_sentencepiece_never_cuts_a_character(sentencepiece: TextModel, text: str) -> None:
    check_no_character_is_cut(sentencepiece, text)


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, int] | None:
    """Where the stop that is complete first begins and ends; of several that end together the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if s and text[:end].endswith(s)]
        if found:
            return end - max(map(len, found)), end
    return None


STOPS = st.lists(st.text("ab ,1😀你", max_size=4), max_size=4)
STOPPABLE = st.lists(st.sampled_from("ab ,1😀你"), max_size=30).map("".join)


@PROPERTY
@given(text=STOPPABLE, stops=STOPS, sizes=CUTS, include=st.booleans())
def test_stops_cut_the_text_where_the_first_one_is_complete(
    smol: TextModel, text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    ids = smol.encode(text)
    pieces = run(Detokenizer(smol, stops, include, with_tokens=True), cut(ids, sizes))
    found = first_stop(text, stops)
    kept = text if found is None else text[: found[1] if include else found[0]]
    assert joined(pieces) == kept
    assert any(piece.stopped for piece in pieces) is (found is not None)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(token.text for token in tokens) == kept
    assert sum(piece.num_tokens for piece in pieces) == len(tokens)
    assert len(tokens) <= len(ids)


@pytest.fixture
def alphabet(smol: TextModel) -> Callable[..., list[Piece]]:
    """Feeds the continuation of "ABC" token by token."""

    def feed(*stops: str, include: bool = False, min_tokens: int = 0) -> list[Piece]:
        detokenizer = Detokenizer(smol, stops, include, min_tokens=min_tokens)
        return run(detokenizer, [[id] for id in smol.encode("DEFGHIJKLMNOPQRSTUVWXYZ")])

    return feed


def test_a_stop_across_tokens_does_not_leak(alphabet: Callable[..., list[Piece]]) -> None:
    pieces = alphabet("DEFGHIJ")
    assert joined(pieces) == ""
    assert [piece.stop for piece in pieces if piece.stopped] == ["DEFGHIJ"]
    assert sum(piece.num_tokens for piece in pieces) == 0
    assert joined(alphabet("GHIJK")) == "DEF"
    assert joined(alphabet("GHIJK", include=True)) == "DEFGHIJK"


def test_a_near_miss_is_released(alphabet: Callable[..., list[Piece]]) -> None:
    pieces = alphabet("DEFGHIX", "Z!")
    assert joined(pieces) == "DEFGHIJKLMNOPQRSTUVWXYZ"
    assert not any(piece.stopped for piece in pieces)
    assert joined(pieces[:-1]) == "DEFGHIJKLMNOPQRSTUVWXY"
    assert pieces[-1].text == "Z"


def test_stops_within_the_first_min_tokens_do_not_count(alphabet: Callable[..., list[Piece]]) -> None:
    assert joined(alphabet("E", "W", min_tokens=2)) == "DEFGHIJKLMNOPQRSTUV"


def test_after_a_stop_nothing_comes(smol: TextModel) -> None:
    detokenizer = Detokenizer(smol, ["b"])
    assert detokenizer.feed(smol.encode("abab")).text == "a"
    assert detokenizer.feed(smol.encode("cd")) == Piece("", 0)
    assert detokenizer.finish() == Piece("", 0)


def test_the_end_of_sequence_counts_and_has_no_text(smol: TextModel) -> None:
    for with_tokens in (False, True):
        detokenizer = Detokenizer(smol, skip_special_tokens=False, with_tokens=with_tokens)
        piece = detokenizer.feed([*smol.encode("Tokyo."), 2], silent_last=True)
        assert piece.text + detokenizer.finish().text == "Tokyo."
        assert piece.num_tokens == len(smol.encode("Tokyo.")) + 1


def test_an_unfinished_character_becomes_one_replacement_at_the_end(smol: TextModel) -> None:
    ids = smol.encode("a😀")
    detokenizer = Detokenizer(smol, with_tokens=True)
    assert detokenizer.feed(ids[:-1]).text == "a"
    last = detokenizer.finish()
    assert last.text == "\ufffd"
    assert "".join(token.text for token in last.tokens) == "\ufffd"


def test_token_bytes_join_to_the_text(smol: TextModel) -> None:
    text = "é😀 สวัสดี"
    pieces = run(Detokenizer(smol, with_tokens=True), [smol.encode(text)])
    assert b"".join(token.data for piece in pieces for token in piece.tokens) == text.encode()
