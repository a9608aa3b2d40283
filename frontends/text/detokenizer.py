"""The detokenizer of one choice: token ids in, text that may be shown out.

    running     `feed` takes the tokens of a step and gives the text that is certain; the end of the text is
                held back while it may be the beginning of a stop string
    stopped     a stop string was completed; text and tokens from it on are dropped, `feed` gives nothing more
    finished    `finish` was called: what was held back is out, an unfinished character included

A choice that is cancelled is simply dropped; nothing is held outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from frontends.text.decoding import incremental_decoder
from frontends.text.model import TextModel
from frontends.text.stops import StopFinder, StopFound


class TokenText(msgspec.Struct, frozen=True):
    """One token's share of the text. `text` is "" while a character is unfinished, so texts join to the whole.

    `data` are the token's own bytes; `offset` counts the choice's characters before the token.
    """

    id: int
    text: str
    data: bytes
    offset: int


class Piece(msgspec.Struct, frozen=True):
    """What one call brought. Over all pieces, `text` joins to the choice's text and `num_tokens` adds up to the
    tokens in it (those that a stop string cut off are not counted).

    `tokens` tells these tokens one by one, if the detokenizer was made to; a token comes out when all of its
    text has. `stop` is the stop string that was found.
    """

    text: str
    num_tokens: int
    tokens: tuple[TokenText, ...] = ()
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the choice: cancel the generation."""
        return self.stop is not None


_NOTHING = Piece("", 0)


class Detokenizer:
    """Text of one choice. Feeding token by token or in any groups gives the same text in the end."""

    def __init__(
        self,
        model: TextModel,
        stops: Iterable[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        *,
        with_tokens: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """With `include_stop` the stop string stays in the text; those completed within the first `min_tokens`
        tokens do not count. `with_tokens` fills `Piece.tokens`."""
        self._vocabulary = model.vocabulary
        self._decoder = incremental_decoder(model, skip_special_tokens=skip_special_tokens)
        self._skipped = model.special_ids if skip_special_tokens else frozenset()
        self._finder = StopFinder(stops)
        self._include_stop = include_stop
        self._with_tokens = with_tokens
        self._min_tokens = min_tokens
        self._is_plain = not self._finder.has_stops and not with_tokens
        self._num_fed = 0
        self._num_chars = 0  # decoded so far
        self._num_shown = 0  # of these, handed out
        self._held = ""  # the rest
        self._pending: list[TokenText] = []  # tokens that were not handed out yet
        self._num_open = 0  # of these, the last ones, which wait for the rest of their character
        self._is_over = False

    def feed(self, ids: Sequence[int], *, silent_last: bool = False) -> Piece:
        """Takes tokens; what may be shown now. With `silent_last` the last one counts but has no text (end of
        sequence, or another stop token)."""
        if self._is_over:
            return _NOTHING
        if self._is_plain:
            return Piece(self._decoder.push_all(ids[:-1] if silent_last else ids), len(ids))
        for i, id in enumerate(ids):
            is_silent = silent_last and i == len(ids) - 1
            found = self._take(id, "" if is_silent else self._decoder.push(id), is_silent)
            if found is not None:
                return self._stop_at(found)
        return self._show(self._num_chars - self._finder.num_held)

    def finish(self) -> Piece:
        """The text still held back; called once when the generation has ended, a no-op after a stop."""
        if self._is_over:
            return _NOTHING
        rest = self._decoder.flush()
        self._is_over, self._num_open = True, 0
        if self._is_plain:
            return Piece(rest, 0)
        found = self._append_rest(rest) if rest else None
        return self._stop_at(found) if found is not None else self._show(self._num_chars)

    def _take(self, id: int, text: str, is_silent: bool) -> StopFound | None:
        data = b"" if is_silent or id in self._skipped else self._vocabulary.bytes_of(id)
        self._pending.append(TokenText(id, text, data, self._num_chars))
        continues = self._num_open > 0 and not text
        self._num_open = 1 + (self._num_open if continues else 0) if self._decoder.is_mid_character else 0
        self._num_fed += 1
        self._num_chars += len(text)
        self._held += text
        return self._finder.feed(text, armed=self._num_fed > self._min_tokens)

    def _append_rest(self, rest: str) -> StopFound | None:
        """Gives the flushed text to the last token with bytes; it is pending while a character is unfinished."""
        owner = max(i for i, token in enumerate(self._pending) if token.data)
        for i, token in enumerate(self._pending[owner:], owner):
            text, offset = (token.text + rest, token.offset) if i == owner else (token.text, token.offset + len(rest))
            self._pending[i] = msgspec.structs.replace(token, text=text, offset=offset)
        self._num_chars += len(rest)
        self._held += rest
        return self._finder.feed(rest, armed=self._num_fed > self._min_tokens)

    def _stop_at(self, found: StopFound) -> Piece:
        self._is_over = True
        end = found.end if self._include_stop else found.start
        kept = [_cut(t, end) for t in self._pending if t.offset < end]
        text = self._held[: end - self._num_shown]
        return Piece(text, len(kept), tuple(kept) if self._with_tokens else (), found.stop)

    def _show(self, upto: int) -> Piece:
        """Hands out the text before character `upto`, and the tokens all of whose text that is."""
        size = upto - self._num_shown
        text, self._held, self._num_shown = self._held[:size], self._held[size:], upto
        num, limit = 0, len(self._pending) - self._num_open
        while num < limit and _end(self._pending[num]) <= upto:
            num += 1
        out, self._pending = self._pending[:num], self._pending[num:]
        return Piece(text, num, tuple(out) if self._with_tokens else ())


def _end(token: TokenText) -> int:
    return token.offset + len(token.text)


def _cut(token: TokenText, end: int) -> TokenText:
    """The token without its text from character `end` on."""
    if _end(token) <= end:
        return token
    text = token.text[: end - token.offset]
    return msgspec.structs.replace(token, text=text, data=text.encode())
