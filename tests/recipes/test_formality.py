"""Forms of address in German and French."""

from __future__ import annotations

import formality
import pytest
from formality import Pair


@pytest.mark.parametrize(
    ("english", "foreign", "lang", "form"),
    [
        ("Have you eaten?", "Hast du gegessen?", "de", "familiar"),
        ("Your car is here.", "Dein Auto ist hier.", "de", "familiar"),
        ("I see all of you.", "Ich sehe euch alle.", "de", "familiar"),
        ("Have you eaten?", "Haben Sie gegessen?", "de", "formal"),
        ("I will give it to you.", "Ich gebe es Ihnen.", "de", "formal"),
        ("I have your letters.", "Ich habe Ihre Briefe.", "de", "formal"),
        ("Did you eat?", "As-tu mangé ?", "fr", "familiar"),
        ("I love you.", "Je t'aime.", "fr", "familiar"),
        ("Is this yours?", "Est-ce le vôtre ?", "fr", "formal"),
        ("Where do you live?", "Où habitez-vous ?", "fr", "formal"),
        # "Sie" at the beginning of a sentence may be "she" or "they".
        ("She has eaten.", "Sie hat gegessen.", "de", ""),
        ("You ate. They left.", "Es wurde gegessen. Sie gingen.", "de", ""),
        ("I thank you. They left.", "Ich danke Ihnen. Sie gingen.", "de", "formal"),
        # An imperative with "Sie" is formal without an English "you".
        ("Close the door.", "Schließen Sie die Tür.", "de", "formal"),
        ("Please wait.", "Bitte warten Sie.", "de", "formal"),
        ("Please change it.", "Bitte ändern Sie es.", "de", "formal"),
        ("Remember that he saw her.", "Denk daran, dass er Sie sah.", "de", ""),
        # Both forms, or none.
        ("You said you know Sie.", "Du sagtest, du kennst Sie.", "de", ""),
        ("You must not smoke here.", "Hier darf man nicht rauchen.", "de", ""),
        ("The train is late.", "Der Zug hat Verspätung.", "de", ""),
        ("Thank you.", "Merci.", "fr", ""),
        ("He said that.", "Il te l'a dit.", "fr", ""),
    ],
)
def test_the_form_of_a_sentence(english: str, foreign: str, lang: str, form: str) -> None:
    assert formality.find_form(english, foreign, lang) == form


def make_pairs(n: int) -> dict[str, list[Pair]]:
    return {
        "formal": [(f"Do you have {i}?", f"Haben Sie {i}?") for i in range(n)],
        "familiar": [(f"Do you have {i}?", f"Hast du {i}?") for i in range(n)],
        "neutral": [(f"This is {i}.", f"Das ist {i}.") for i in range(n)],
    }


def test_pairs_are_in_the_set_of_their_form_and_a_few_neutral_ones_in_both() -> None:
    made = make_pairs(1000)
    found = formality.select_forms([pair for pairs in made.values() for pair in pairs], "de")
    neutral = [set(pairs) - set(made[form]) for form, pairs in found.items()]
    assert neutral[0] == neutral[1] < set(made["neutral"])
    assert 25 <= len(neutral[0]) <= 80  # about 0.05 of 1,000
    for form in formality.FORMS:
        assert set(found[form]) == set(made[form]) | neutral[0]
        assert len(found[form]) == len(set(found[form]))


def test_a_set_has_at_most_so_many_pairs_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formality, "MOST", 10)
    made = make_pairs(50)
    found = formality.select_forms(made["formal"] + made["familiar"][:4], "de")
    assert {form: len(pairs) for form, pairs in found.items()} == {"formal": 10, "familiar": 4}
    assert set(found["formal"]) != set(made["formal"][:10])  # chosen at random


def test_sets_are_joined_by_language() -> None:
    german, french = [("Have you eaten?", "Hast du gegessen?")], [("Have you eaten?", "Avez-vous mangé ?")]
    sets = {"tatoeba-en-de": german, "docs-en-de": german, "tatoeba-en-fr": french, "tatoeba-en-zh": [("You.", "你。")]}
    assert formality.split_by_formality(sets) == {
        "de": {"formal": [], "familiar": german * 2},
        "fr": {"formal": french, "familiar": []},
    }
