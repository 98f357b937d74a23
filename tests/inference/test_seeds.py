"""Random seeds: a text is sampled with seed + its number, whatever else is translated with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from configured import model_config
from fake_translator import PROFILES, TEXTS
from tokens import SETTINGS

from regard.config import DecodeConfig
from regard.inference import sentence_translation
from regard.inference.streaming import ChunkTranslator
from regard.inference.translator import Translation, Translator
from regard.model_folder import ModelPackage
from regard.models.transformer import Transformer
from regard.text.tokenizer import Tokenizer, TokenizerConfig, Tokenizers

DIRECTIONS = ("en>de", "de>en", "en>fr", "fr>en")
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "nbest": 3},
    {"mbr": 4, "mbr_candidates": "ancestral"},
]
MIXED = [
    "The man said hello. I would not come with my friend. How are you?",
    "Der Mann ging in das Haus. Das ist die Strasse.",
    "The man went to the house of his friend.",
    "",
    "Who are you? Would they come to the house at https://a.b/c with his friend, or not?",
]


def make_translator(directions: Sequence[str] = DIRECTIONS) -> Translator:
    """Return an untrained translator whose distributions are far from uniform."""
    languages = tuple(dict.fromkeys(each.split(">")[1] for each in directions))
    config = TokenizerConfig(kind="byte-bpe", vocab_size=300, language_tokens=languages)
    tokens = Tokenizer.train(TEXTS.values(), config)
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 2, "d_ff": 32, "d_model": 16, "max_len": 64}
    torch.manual_seed(0)
    both = {"source_vocab": len(tokens), "target_vocab": len(tokens), "dropout": 0.0}
    model = Transformer(model_config(**sizes, **both, **SETTINGS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    own = {"directions": tuple(directions), "languages": PROFILES} if directions else {}
    options = DecodeConfig(beam=2, max_len_a=0.0, max_len_b=8, max_sentence_tokens=40)
    package = ModelPackage(model.eval(), Tokenizers(tokens, tokens), "translation", options, "en", "de", **own)
    return Translator(package)


@pytest.fixture(scope="module")
def translator() -> Translator:
    return make_translator()


def assert_same(found: Sequence[Translation], expected: Sequence[Translation]) -> None:
    assert [one.text for one in found] == [one.text for one in expected]
    assert [[one.text for one in each.nbest] for each in found] == [[h.text for h in each.nbest] for each in expected]


@pytest.fixture(params=["faults", "no faults"])
def _faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take translations as they are, or try those that cannot be right again, which are most of an untrained model's."""
    if request.param == "no faults":
        monkeypatch.setattr(sentence_translation, "find_fault", lambda *arguments: "")


@pytest.mark.usefixtures("_faults")
@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("to", [None, "fr"])  # French is reached from German by way of English
def test_a_text_is_translated_as_it_would_be_alone(translator: Translator, options: Any, to: str | None) -> None:
    together = translator.translate(MIXED, to, seed=5, **options)
    alone = [
        translator.translate(text, to, each.source or None, seed=5 + i, **options)
        for i, (text, each) in enumerate(zip(MIXED, together, strict=True))
    ]
    assert_same(together, alone)
    assert len({each.text for each in together}) == len(MIXED)


@pytest.mark.parametrize("options", SAMPLING)
def test_required_words_of_one_text_change_no_other(options: Any) -> None:
    translator = make_translator(())
    plain = translator.translate(MIXED, seed=5, **options)
    with_terms = translator.translate(MIXED, seed=5, glossary={"Mann": "man"}, **options)
    assert "man" in with_terms[1].text
    assert_same(with_terms[:1] + with_terms[2:], plain[:1] + plain[2:])


@pytest.mark.usefixtures("_faults")
@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [2, 3], [4, 1]])
@pytest.mark.parametrize("seed", [None, 7, 2**62 - 2, 2**62])
def test_a_stream_may_be_divided_anywhere(
    translator: Translator, options: Any, sizes: list[int], seed: int | None
) -> None:
    options = options if seed is None else {**options, "seed": seed}
    whole = ChunkTranslator(translator, "de", "en", **options).translate(MIXED)
    divided, at = ChunkTranslator(translator, "de", "en", **options), 0
    resumed, found = ChunkTranslator(translator, "de", "en", **options), []
    resumed.skip(MIXED[: sizes[0]])
    for size in sizes:
        found += divided.translate(MIXED[at : at + size])
        at += size
    assert_same(found, whole)
    assert_same(resumed.translate(MIXED[sizes[0] :]), whole[sizes[0] :])


def test_equal_sentences_of_a_text_have_other_samples(translator: Translator) -> None:
    sentence = "The man went to the house."
    once, both = (
        translator.translate(text, "de", "en", temperature=1.0, seed=3) for text in (sentence, f"{sentence} {sentence}")
    )
    first, second = both.text[: len(once.text)], both.text[len(once.text) :].strip()
    assert first == once.text != second
    assert second != translator.translate(sentence, "de", "en", temperature=1.0, seed=4).text
