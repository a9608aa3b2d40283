"""The codec: whatever bytes come, they become frames or a `ProtocolFault`."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph import Message
from graph.errors import Failure, Overloaded, PeerFault, ProtocolFault
from graph.link.codec import MALFORMED, Batch, Hello, Kind, decode_batch, decoder, encode


class Number(Message, frozen=True):
    value: int


class Word(Message, frozen=True):
    value: str


def sealed(*frames):
    """One wire message."""
    batch = Batch()
    for frame in frames:
        batch.add(frame)
    return bytes(batch.seal())


def test_frames_come_back_as_they_went():
    frames = decode_batch(
        sealed((1, Kind.REQUEST, Number(5), "port"), (2, Kind.ITEM, Word("x")), (3, Kind.CANCEL, None))
    )
    assert [(frame.stream, frame.kind, frame.port) for frame in frames] == [(1, 0, "port"), (2, 1, ""), (3, 4, "")]
    decode = decoder(Number, Word)
    assert [decode(frame.payload) for frame in frames[:2]] == [Number(5), Word("x")]


@pytest.mark.parametrize("num_frames", [0, 1, 15, 16, 70_000])
def test_a_batch_holds_any_number_of_frames(num_frames):
    frames = decode_batch(sealed(*((number, Kind.END, None) for number in range(num_frames))))
    assert [frame.stream for frame in frames] == list(range(num_frames))


def test_a_frame_that_cannot_be_encoded_leaves_the_batch_as_it_was():
    batch = Batch()
    batch.add((1, Kind.ITEM, Number(1)))
    with pytest.raises(TypeError):
        batch.add((2, Kind.ITEM, [Number(2), object()]))
    batch.add((3, Kind.ITEM, Number(3)))
    assert [frame.stream for frame in decode_batch(bytes(batch.seal()))] == [1, 3]


def test_a_payload_encoded_once_is_the_same_on_the_wire():
    assert sealed((1, Kind.ITEM, encode(Number(1)))) == sealed((1, Kind.ITEM, Number(1)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_frames_or_a_fault(data):
    try:
        frames = decode_batch(data)
    except ProtocolFault:
        return
    assert all(isinstance(frame.stream, int) for frame in frames)


@given(st.data())
def test_a_damaged_message_is_frames_or_a_fault(data):
    wire = bytearray(sealed((1, Kind.HELLO, Hello("a/0", "1")), (2, Kind.REQUEST, Word("text"), "port")))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames = decode_batch(bytes(wire))
    except ProtocolFault:
        return
    for frame in frames:
        try:
            message = decoder(Number, Word)(frame.payload)
        except MALFORMED:
            continue
        assert isinstance(message, Number | Word)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # four thousand million frames announced
        b"\x91" * 100_000,  # nested without end
        b"\x91\x93\x01\x02" + b"\x91" * 1_000_000,
        b"\x91\x93\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        sealed((1, Kind.END, None)) + b"x",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_hostile_bytes_are_a_fault(data):
    with pytest.raises(ProtocolFault):
        decode_batch(data)


def test_types_are_told_apart_by_their_tags_alone():
    with pytest.raises(MALFORMED):
        decoder(Word)(encode(Number(1)))
    with pytest.raises(MALFORMED):
        decoder(Number)(encode(Number("one")))
    with pytest.raises(MALFORMED):
        decoder(Word)(msgspec.Raw(b"\x92\xa4Word\xa2\xff\xfe"))  # not UTF-8


def test_a_failure_crosses_as_data_and_an_unknown_kind_becomes_a_fault_of_the_peer():
    decode = decoder(Failure)
    error = decode(encode(Failure.of(Overloaded("full", retry_after_s=1.5)))).error()
    assert (type(error), error.message, error.retry_after_s) == (Overloaded, "full", 1.5)
    assert type(decode(encode(Failure("SystemExit", "boo", "x"))).error()) is PeerFault
