"""A trained classifier in use: what it predicts for texts, pairs, sentences of words and pictures, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokens import BERT_TEMPLATE, EOS, SOS

import regard
from regard import model_folder
from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.inference.classifier import Classifier
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.models.classification_model import ClassificationModel
from regard.text.tokenizer import Tokenizer, Tokenizers

TOKENIZER = Tokenizer.train(["the cat sat on a mat and a dog ran"], TokenizerConfig(kind="word", vocab_size=40))
NAMES = ("bad", "fair", "good")
MODEL: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_ff": 16, "n_encoder_layers": 1, "max_len": 12}
TEXTS = ["the cat sat", "a", "on a mat and a dog ran", "the dog ran", "cat"]


def package(task: str, names: tuple[str, ...] = NAMES) -> ModelPackage:
    torch.manual_seed(4)
    head, size = "token" if task == "tagging" else "sequence", len(TOKENIZER)
    heads = {"prediction_head": head, "n_classes": len(names) or 1, "token_types": 2, "source_vocab": size}
    model = make_model(preset("bert-tiny", **MODEL, **heads))
    for parameter in model.parameters():  # predictions that differ plainly
        torch.nn.init.normal_(parameter, std=0.5)
    return ModelPackage(
        model.eval(), Tokenizers(TOKENIZER, TOKENIZER), task, labels=names, token_template=BERT_TEMPLATE
    )


def picture_bundle() -> ModelPackage:
    torch.manual_seed(4)
    model = make_model(
        preset("vit-tiny", **{**MODEL, "max_len": 5}, **{"vit.patch_size": 4}, n_classes=3, positions="learned")
    )
    return ModelPackage(model.eval(), None, "image-classification", labels=NAMES, pixels={"mean": [0.5], "std": [0.25]})


def logits(model: ClassificationModel, ids: list[int], types: list[int]) -> np.ndarray:
    """Of one row alone."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), torch.tensor([types]))[0].double().numpy()


def body(found: ModelPackage) -> ClassificationModel:
    assert isinstance(found.model, ClassificationModel)
    return found.model


# ---- classes and numbers ---------------------------------------------------------------------------------------------


def test_probabilities_are_the_softmax_of_each_text_alone_in_the_order_given() -> None:
    found = package("classification")
    predictions = Classifier(found).classify(TEXTS)
    assert len({prediction.probability for prediction in predictions}) == len(TEXTS)
    for text, prediction in zip(TEXTS, predictions, strict=True):
        ids = [SOS, *TOKENIZER.encode(text), EOS]
        weights = np.exp(logits(body(found), ids, [0] * len(ids)))
        assert list(prediction.probabilities) == list(NAMES)
        np.testing.assert_allclose(list(prediction.probabilities.values()), weights / weights.sum(), atol=1e-5)
        assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-6)
        assert prediction.label == str(prediction) == NAMES[weights.argmax()]
        assert prediction.probability == max(prediction.probabilities.values())


def test_pairs_and_single_texts_may_be_mixed() -> None:
    found = package("classification")
    predictions = Classifier(found).classify([("the cat", "a dog"), "the cat", ("a dog", "the cat")])
    first, second = TOKENIZER.encode("the cat"), TOKENIZER.encode("a dog")
    ids = [SOS, *first, EOS, *second, EOS]
    weights = np.exp(logits(body(found), ids, [0] * (len(first) + 2) + [1] * (len(second) + 1)))
    np.testing.assert_allclose(list(predictions[0].probabilities.values()), weights / weights.sum(), atol=1e-5)
    assert predictions[1].probabilities == pytest.approx(
        Classifier(found).classify(["the cat"])[0].probabilities, abs=1e-6
    )
    assert predictions[0].probability != pytest.approx(predictions[2].probability, abs=1e-6)


def test_a_number_is_the_answer_itself() -> None:
    found = package("regression", ())
    predictions = Classifier(found).classify(TEXTS)
    for text, prediction in zip(TEXTS, predictions, strict=True):
        ids = [SOS, *TOKENIZER.encode(text), EOS]
        assert prediction.value == pytest.approx(logits(body(found), ids, [0] * len(ids))[0], abs=1e-4)
        assert prediction.value is not None
        assert float(prediction.label) == pytest.approx(prediction.value, rel=1e-3)
        assert prediction.probabilities == {}


def test_one_text_has_one_answer() -> None:
    classifier = Classifier(package("classification"))
    assert classifier.classify("the cat sat") == classifier.classify(["the cat sat"])[0]


def test_nothing_to_classify() -> None:
    assert Classifier(package("classification")).classify([]) == []


def test_a_text_that_is_too_long_is_refused_by_number() -> None:
    long = " ".join(["cat"] * 11)  # 13 tokens with what stands around
    for task in ("classification", "tagging"):
        with pytest.raises(RegardError, match="text 2 has 13 tokens, but the model reads at most 12: shorten it"):
            Classifier(package(task)).classify(["cat", long])
    fitting = " ".join(["cat"] * 10)
    assert Classifier(package("classification")).classify([fitting])[0].label in NAMES


# ---- tags ------------------------------------------------------------------------------------------------------------


def test_each_word_has_the_tag_of_its_first_piece() -> None:
    found = package("tagging")
    predictions = Classifier(found).classify(["the cat  sat", "a zebra ran", "dog"])
    assert [[word for word, _ in prediction.tags] for prediction in predictions] == [
        ["the", "cat", "sat"],
        ["a", "zebra", "ran"],  # a word that is not in the vocabulary is tagged too
        ["dog"],
    ]
    ids = [SOS, *TOKENIZER.encode("the cat sat"), EOS]
    best = logits(body(found), ids, [0] * 5)[1:4].argmax(-1)
    assert [tag for _, tag in predictions[0].tags] == [NAMES[i] for i in best]
    assert str(predictions[0]) == " ".join(f"{word}/{tag}" for word, tag in predictions[0].tags)


def test_an_empty_sentence_has_no_tags_and_a_pair_is_one_sentence() -> None:
    empty, pair = Classifier(package("tagging")).classify(["", ("the cat", "sat")])
    assert empty.tags == ()
    assert [word for word, _ in pair.tags] == ["the", "cat", "sat"]


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_are_scaled_and_normalised_as_in_training(tmp_path: Path) -> None:
    found = picture_bundle()
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    Image.new("RGB", (31, 17), (0, 0, 0)).save(tmp_path / "black.jpg")
    predictions = Classifier(found).classify([str(tmp_path / "white.png"), str(tmp_path / "black.jpg")])
    for prediction, brightness in zip(predictions, (1.0, 0.0), strict=True):
        with torch.inference_mode():
            weights = found.model(torch.full((1, 1, 8, 8), (brightness - 0.5) / 0.25))[0].double().exp().numpy()
        np.testing.assert_allclose(list(prediction.probabilities.values()), weights / weights.sum(), atol=1e-5)


def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("no picture")
    with pytest.raises(RegardError, match=r"x\.png cannot be read as an image"):
        Classifier(picture_bundle()).classify([str(tmp_path / "x.png")])


# ---- from a folder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "regression", "tagging"])
def test_load_gives_a_classifier_that_answers_the_same(tmp_path: Path, task: str) -> None:
    found = package(task, () if task == "regression" else NAMES)
    model_folder.save(tmp_path / "model", found, "a card")
    loaded = regard.load(tmp_path / "model", device="cpu")
    assert isinstance(loaded, Classifier)
    for ours, before in zip(loaded.classify(TEXTS), Classifier(found).classify(TEXTS), strict=True):
        # its weights lie in another order in memory, so the last digit may differ
        assert ours.value == pytest.approx(before.value) if task == "regression" else str(ours) == str(before)
        assert ours.probabilities == pytest.approx(before.probabilities)


def test_a_model_that_learned_no_answers_is_refused() -> None:
    found = ModelPackage(make_model(preset("bert-tiny", **MODEL, source_vocab=40)), None, "masked-lm")
    with pytest.raises(RegardError, match="learned masked-lm, not to predict labels: fine-tune it"):
        Classifier(found)
