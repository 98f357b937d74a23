"""Forms of address: which one a text has, and which ones a model knows."""

import pytest

from regard.text.formality import detect_form, forms_of_address, split_form


@pytest.mark.parametrize(
    ("language", "text", "form"),
    [
        ("en", "Could you send me the invoice?", "formal"),
        ("en", "Hey, are you coming tonight?", "familiar"),
        ("en", "Mom, where are you?", "familiar"),
        ("en", "The heyday of the railway was over.", "formal"),
        ("de", "Können Sie mir helfen?", "formal"),
        ("de", "Kannst du mir helfen?", "familiar"),
        ("de", "Sie schläft. Sie ist müde.", "formal"),  # she, and no second person
        ("fr", "Pouvez-vous m'aider ?", "formal"),
        ("fr", "Est-ce que tu peux m'aider ?", "familiar"),
        ("zh", "您好！", "formal"),
        ("zh", "你好！", "familiar"),
        ("zh-Hant", "你叫什麼名字？", "familiar"),
        ("es", "¿Cómo estás?", "formal"),  # a language without patterns
    ],
)
def test_the_form_of_a_text(language: str, text: str, form: str) -> None:
    assert detect_form([text], language) == form


def test_texts_that_belong_together_have_one_form() -> None:
    assert detect_form(["Hast du Zeit?", "Sagen Sie das nicht.", "Dein Freund wartet auf dich."], "de") == "familiar"


def test_the_forms_of_a_model_are_in_its_directions() -> None:
    directions = ("en>de", "de>en", "en>de-formal", "en>de-familiar", "en>fr-formal", "en>zh-Hant")
    assert forms_of_address(directions) == {"de": ("formal", "familiar"), "fr": ("formal",)}
    assert split_form("zh-Hant") == ("zh-Hant", "")
    assert split_form("de-formal") == ("de", "formal")
