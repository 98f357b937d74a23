"""A conversation as one text, which a language model goes on with.

Be brief.

User: Who are you?
Assistant: A language model.
User: Since when?
Assistant:
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard.decode.generation import longest
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.inference.generator import Writer

log = logging.getLogger("regard")


@dataclass(frozen=True)
class Turn:
    role: str  # user or assistant
    text: str


@dataclass(frozen=True)
class Template:
    """What stands before and after the system text and every turn."""

    before_system: str = ""
    after_system: str = "\n\n"
    before_user: str = "User: "
    after_user: str = "\n"
    before_assistant: str = "Assistant: "
    after_assistant: str = "\n"

    def render(self, turns: Sequence[Turn], system: str = "") -> str:
        """The whole conversation. After a turn of the user's, the beginning of the answer too: without the space at its end,
        which belongs to the first word in most vocabularies."""
        text = self.before_system + system + self.after_system if system else ""
        for turn in turns:
            before, after = self.around(turn.role)
            text += before + turn.text + after
        return text + self.before_assistant.rstrip(" ") if turns and turns[-1].role == "user" else text

    def around(self, role: str) -> tuple[str, str]:
        if role == "user":
            return self.before_user, self.after_user
        if role == "assistant":
            return self.before_assistant, self.after_assistant
        raise RegardError(f"a turn is the user's or the assistant's, not of '{role}': give the system text by itself")

    @property
    def stop(self) -> tuple[str, ...]:
        """Where an answer is over: the next turn of the user's begins. Without a sign of that, where answers end."""
        marks = (self.before_user.strip(), self.after_assistant)
        return next(((mark,) for mark in marks if mark), ())


PLAIN = Template()


def newest(turns: Sequence[Turn], fits: Callable[[Sequence[Turn]], bool]) -> list[Turn]:
    """As many of the newest turns as fit, beginning with one of the user's; the last one always stays."""
    kept = list(turns)
    while len(kept) > 1 and not fits(kept):
        kept = kept[1:]
        while len(kept) > 1 and kept[0].role != "user":
            kept = kept[1:]
    return kept


class Conversation:
    """Turns and answers. Once it outgrows the model's context, the oldest turns are forgotten; never the system text."""

    def __init__(self, writer: Writer, system: str, template: Template, options: dict[str, Any]) -> None:
        self.writer, self.system, self.template = writer, system, template
        given = options.get("stop", ())
        self.options = {**options, "stop": (*template.stop, *([given] if isinstance(given, str) else given or ()))}
        self.turns: list[Turn] = []
        self.forgot = False  # whether turns were left out, ever

    def say(self, text: str, **options: Any) -> str:
        """The whole answer."""
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """The answer in pieces; one that is broken off stays in the conversation as far as it came."""
        chosen = {**self.options, **options}
        turns = self._fitting([*self.turns, Turn("user", text)], self.writer.decode_options(**chosen).max_new_tokens)
        pieces = self.writer.stream(self.template.render(turns, self.system), **chosen)
        said = waiting = ""
        try:
            for piece in pieces:
                waiting += piece if said or waiting else piece.lstrip()
                fresh = waiting.rstrip()  # white space is told once something follows it
                said, waiting = said + fresh, waiting[len(fresh) :]
                yield from filter(None, [fresh])
        finally:
            self.turns = [*turns, Turn("assistant", said)]

    def reset(self) -> None:
        """Begin again; the system text stays."""
        self.turns, self.forgot = [], False

    def _fitting(self, turns: list[Turn], new: int) -> list[Turn]:
        """The newest turns that leave room for an answer of `new` tokens, or of half the context where that is less."""
        most = longest(self.writer.model)
        room = most - min(new, most // 2)

        def fits(some: Sequence[Turn]) -> bool:
            return len(self.writer.framed(self.template.render(some, self.system))) <= room

        kept = newest(turns, fits)
        if len(kept) < len(turns) and not self.forgot:
            self.forgot = True
            log.warning(
                "the conversation outgrew the model's %d tokens (model.max_len): the oldest turns are forgotten", most
            )
        return kept
