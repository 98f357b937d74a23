"""Chat templates: the prompt of a conversation, stop strings, and which turns are dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.inference.generator import Conversation
from regard.text.chat_template import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Turn, keep_last_turns

ASK, ANSWER, AGAIN = Turn("user", "Who are you?"), Turn("assistant", "A model."), Turn("user", "Since when?")


def test_a_conversation_reads_like_one() -> None:
    assert DEFAULT_CHAT_TEMPLATE.render([ASK, ANSWER, AGAIN], "Be brief.") == (
        "Be brief.\n\nUser: Who are you?\nAssistant: A model.\nUser: Since when?\nAssistant:"
    )


def test_without_a_system_text_there_is_nothing_before_the_first_turn() -> None:
    assert DEFAULT_CHAT_TEMPLATE.render([ASK]) == "User: Who are you?\nAssistant:"
    assert DEFAULT_CHAT_TEMPLATE.render([]) == ""


def test_an_answer_is_only_begun_after_a_question() -> None:
    assert DEFAULT_CHAT_TEMPLATE.render([ASK, ANSWER]) == "User: Who are you?\nAssistant: A model.\n"


@given(texts=st.lists(st.text("ab \n", max_size=5), min_size=1, max_size=4))
def test_what_was_read_is_the_beginning_of_what_is_read_next(texts: list[str]) -> None:
    """The next prompt contains an answer, with its leading space, exactly as the model generated it."""
    turns: list[Turn] = []
    for text in texts:
        turns.append(Turn("user", text))
        before = DEFAULT_CHAT_TEMPLATE.render(turns, "s")
        turns.append(Turn("assistant", text))
        assert DEFAULT_CHAT_TEMPLATE.render(turns, "s") == before + " " + text + "\n"


def test_every_mark_can_be_chosen() -> None:
    template = ChatTemplate("<s>", "</s>", "[Q]", "[/Q]", "[A]", "[/A]")
    assert template.render([ASK, ANSWER, AGAIN], "x") == (
        "<s>x</s>[Q]Who are you?[/Q][A]A model.[/A][Q]Since when?[/Q][A]"
    )
    assert template.stop == ("[Q]",)


def test_an_answer_stops_at_the_next_question() -> None:
    assert DEFAULT_CHAT_TEMPLATE.stop == ("User:",)
    assert ChatTemplate(before_user="").stop == ("\n",)
    assert ChatTemplate(before_user="", after_assistant="").stop == ()


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(RegardError, match="not of 'system'"):
        DEFAULT_CHAT_TEMPLATE.render([Turn("system", "x")])


@given(n=st.integers(1, 9), room=st.integers(0, 12))
def test_the_newest_turns_stay_and_begin_with_the_user(n: int, room: int) -> None:
    turns = [Turn("assistant" if i % 2 else "user", str(i)) for i in range(2 * n - 1)]
    kept = keep_last_turns(turns, lambda some: len(some) <= room)
    assert kept == turns[len(turns) - len(kept) :]
    assert kept[0].role == "user"
    assert len(kept) == (max(1, room - (room % 2 == 0)) if room < len(turns) else len(turns))


def test_own_stop_strings_come_beside_the_templates() -> None:
    for stop in ("END", ["END"]):
        assert Conversation(None, "", DEFAULT_CHAT_TEMPLATE, {"stop": stop}).options["stop"] == ("User:", "END")  # type: ignore[arg-type]
    assert Conversation(None, "", DEFAULT_CHAT_TEMPLATE, {}).options["stop"] == ("User:",)  # type: ignore[arg-type]
