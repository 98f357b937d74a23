"""A conversation as one text, which a language model goes on with.

Be brief.

User: Who are you?
Assistant: A language model.
User: Since when?
Assistant:
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.errors import RegardError


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
