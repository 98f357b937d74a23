"""Text while it is being generated: token ids in, the text that can already be shown out.

Decoding token by token and joining the results is wrong: spaces at the joints would be lost or doubled, and a character
may be spread over several tokens. Decoding everything again at each token is right but costs more and more. Here only
the last few tokens are decoded, with and without the new one; what they gain is the new text.
"""

from regard.text.tokenizer import Tokenizer

_CONTEXT = 3
"""Tokens kept before the new one. One would do for the spaces; three are at least three bytes, and a character has at
most three bytes after its first, so after them the decoder stands where it would stand after the whole text."""

_BROKEN = "\ufffd"
"""What an unfinished character decodes to; so does a byte that belongs to none, which only the next token can tell."""


class Detokenizer:
    """All that `push` returns, joined, and then `flush`, is `tokenizer.decode` of all the ids pushed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # how many characters of the window's text have been returned

    def push(self, id: int) -> str:
        """Add a token; returns the text that is now certain, which may be empty."""
        if id in self._tokenizer.special_ids:
            return ""
        self._window.append(id)
        text = self._tokenizer.decode(self._window)
        certain = text.removesuffix(_BROKEN)  # however many bytes are waiting, they are one mark
        fresh = certain[self._shown :]
        self._shown = len(certain)
        if len(self._window) > _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            held = len(text) - len(certain)
            self._shown = len(self._tokenizer.decode(self._window)) - held
        return fresh

    def flush(self) -> str:
        """The end has come: returns what was held back, and makes ready for another text."""
        rest = self._tokenizer.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest
