"""Forms of address: which language token a text, a document and a pivoted text are translated with."""

from __future__ import annotations

import pytest
from fake_translation import CapitalTranslator
from fake_translator import DIRECTIONS, Fake

import regard
from regard.inference.streaming import ChunkTranslator

WITH_FORMS = (*DIRECTIONS, "en>de-formal", "en>de-familiar", "en>fr-formal", "en>fr-familiar")


def tokens(fake: Fake) -> list[str | None]:
    return [to for to, _ in fake.asked]


def test_forms_are_no_languages_of_their_own() -> None:
    fake = Fake(directions=WITH_FORMS)
    assert fake.directions == DIRECTIONS
    assert fake.forms == {"de": ("formal", "familiar"), "fr": ("formal", "familiar")}
    assert fake.translate("Can you help me?", to="de", source="en").target == "de"


def test_english_is_translated_formally_unless_it_is_familiar() -> None:
    fake = Fake(directions=WITH_FORMS)
    fake.translate(["Can you help me?", "Hey, can you help me?"], to="de", source="en")
    assert tokens(fake) == ["de-formal", "de-familiar"]


def test_a_form_can_be_asked_for() -> None:
    fake = Fake(directions=WITH_FORMS)
    fake.translate("Can you help me?", to="fr", source="en", formality="familiar")
    assert tokens(fake) == ["fr-familiar"]
    with pytest.raises(TypeError, match="auto, formal, familiar"):
        fake.translate("Can you help me?", to="fr", source="en", formality="polite")  # type: ignore[call-overload]


def test_the_form_of_the_source_goes_by_way_of_english() -> None:
    fake = Fake(directions=WITH_FORMS)
    fake.translate("Kannst du mir helfen?", to="fr", source="de")
    assert tokens(fake) == ["en", "fr-familiar"]


def test_languages_without_forms_and_models_without_forms() -> None:
    fake = Fake(directions=WITH_FORMS)
    fake.translate("Can you help me?", to="zh", source="en")
    assert tokens(fake) == ["zh"]
    plain = Fake()
    plain.translate("Can you help me?", to="de", source="en")
    assert tokens(plain) == ["de"]
    with pytest.raises(regard.RegardError, match="not trained with forms of address"):
        plain.translate("Can you help me?", to="de", source="en", formality="formal")


@pytest.mark.parametrize(("is_document", "form"), [(True, "familiar"), (False, None)])
def test_a_document_has_one_form_of_address(is_document: bool, form: str | None) -> None:
    fake = CapitalTranslator()
    fake.forms = {"de": ("formal", "familiar")}
    chunks = ChunkTranslator(fake, "de", is_document=is_document)  # type: ignore[arg-type]
    chunks.look_ahead(["Can you help me?", "Love you, Mom."])
    chunks.translate(["Can you help me?"])
    assert fake.called_with.get("formality") == form
