"""Streaming detokenization: token ids in, the text that is already certain out.

Decoding token by token and joining the results is wrong: spaces between tokens would be lost or doubled, and a character may
be spread over several tokens. Decoding the whole text again at each token is right but takes quadratic time. Here only the
last few tokens are decoded, with and without the new one; the difference is the new text.
"""

from regard.text.tokenizer import Tokenizer

_CONTEXT = 3
"""Tokens kept before the new one. One would be enough for spaces; three tokens are at least three bytes, and a UTF-8
character has at most three bytes after its first, so the decoder is in the same state as after the whole text."""

_REPLACEMENT = "\ufffd"
"""The replacement character, to which an unfinished character decodes. A byte that belongs to no character decodes to it
too; only the next token tells which of the two it is."""


class Detokenizer:
    """Decodes a stream of ids: all results of `push` and then `flush`, joined, equal `tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # how many characters of the window's text have been returned

    def push(self, id: int) -> str:
        """Add a token and return the text that is now certain, which may be empty."""
        if id in self._tokenizer.special_ids:
            return ""
        self._window.append(id)
        text = self._tokenizer.decode(self._window)
        certain = text.removesuffix(_REPLACEMENT)  # any number of pending bytes are one character
        new_text = certain[self._shown :]
        self._shown = len(certain)
        if len(self._window) > _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            held = len(text) - len(certain)
            self._shown = len(self._tokenizer.decode(self._window)) - held
        return new_text

    def flush(self) -> str:
        """Return the text that was held back, and reset for another text."""
        rest = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest
