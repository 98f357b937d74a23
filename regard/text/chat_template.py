"""Chat templates: a conversation as one prompt, which a language model continues.

The default template:

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
    """One message of a conversation."""

    role: str  # user or assistant
    text: str


@dataclass(frozen=True)
class ChatTemplate:
    """The strings before and after the system text and every turn."""

    before_system: str = ""
    after_system: str = "\n\n"
    before_user: str = "User: "
    after_user: str = "\n"
    before_assistant: str = "Assistant: "
    after_assistant: str = "\n"

    def render(self, turns: Sequence[Turn], system: str = "") -> str:
        """Return the prompt of a conversation.

        After a user's turn it ends with the beginning of the answer, without its final space: in most vocabularies that
        space belongs to the first word of the answer.
        """
        text = self.before_system + system + self.after_system if system else ""
        for turn in turns:
            before, after = self._strings_around(turn.role)
            text += before + turn.text + after
        return text + self.before_assistant.rstrip(" ") if turns and turns[-1].role == "user" else text

    def _strings_around(self, role: str) -> tuple[str, str]:
        if role == "user":
            return self.before_user, self.after_user
        if role == "assistant":
            return self.before_assistant, self.after_assistant
        raise RegardError(f"a turn is the user's or the assistant's, not of '{role}': give the system text by itself")

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings of an answer: what begins the user's next turn or, if that is empty, what ends an answer."""
        candidates = (self.before_user.strip(), self.after_assistant)
        return next(((string,) for string in candidates if string), ())


DEFAULT_CHAT_TEMPLATE = ChatTemplate()


def keep_last_turns(turns: Sequence[Turn], fits: Callable[[Sequence[Turn]], bool]) -> list[Turn]:
    """Return as many of the last turns as fit, beginning with a user's turn; the last turn is always kept."""
    kept = list(turns)
    while len(kept) > 1 and not fits(kept):
        kept = kept[1:]
        while len(kept) > 1 and kept[0].role != "user":
            kept = kept[1:]
    return kept
