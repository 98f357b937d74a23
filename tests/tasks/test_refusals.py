"""What a task cannot do is said in one line that names the setting or the file, before any training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from little import config_of, learn, write_all
from PIL import Image

import regard
from regard.errors import RegardError


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    write_all(tmp_path)
    return tmp_path


def refused(corpora: Path, task: str, words: str, **changes: Any) -> None:
    """An error of these words, and no checkpoint."""
    run = corpora / "run"
    with pytest.raises(RegardError, match=words):
        learn(config_of(corpora, task, **changes), run)
    assert not any(run.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("task", "preset", "words"),
    [
        ("causal-lm", "bert-tiny", "causal-lm trains a gpt or rnn, but model.preset bert-tiny is a bert"),
        ("masked-lm", "gpt-tiny", "masked-lm trains a bert, but model.preset gpt-tiny is a gpt"),
        ("span-corruption", "gpt-tiny", "span-corruption trains a transformer"),
        ("denoising", "bert-tiny", "denoising trains a transformer"),
        ("image-classification", "bert-tiny", "image-classification trains a vit"),
        ("classification", "transformer-tiny", "classification trains a gpt, bert or rnn, but .*transformer-tiny"),
        ("tagging", "vit-tiny", "tagging trains a gpt, bert or rnn, but .*vit-tiny is a vit"),
    ],
)
def test_a_model_of_another_kind(corpora: Path, task: str, preset: str, words: str) -> None:
    refused(corpora, task, words, **{"model.preset": preset, "model.n_decoder_layers": 1, "model.n_encoder_layers": 1})


@pytest.mark.parametrize(
    ("task", "metric", "listed"),
    [
        ("causal-lm", "bleu", "loss"),
        ("classification", "spearman", "loss, accuracy, f1, matthews"),
        ("regression", "accuracy", "loss, pearson, spearman"),
        ("tagging", "matthews", "loss, accuracy, f1"),
        ("image-classification", "bleu", "loss, accuracy, f1, matthews"),
    ],
)
def test_a_measure_that_the_task_does_not_have(corpora: Path, task: str, metric: str, listed: str) -> None:
    words = f"train.metric {metric} is not measured by the task {task}: choose one of {listed}$"
    refused(corpora, task, words, **{"train.metric": metric})


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "classification", "image-classification"])
def test_no_data(corpora: Path, task: str) -> None:
    refused(corpora, task, r"(no train text|data\.train names no)", **{"data.train": []})


def test_a_column_that_is_not_there(corpora: Path) -> None:
    words = r"film\.tsv line 1: there is no column 'review'; its columns are sentence, label"
    refused(corpora, "classification", words, **{"data.text_column": "review"})


def test_a_table_without_rows(corpora: Path) -> None:
    (corpora / "empty.tsv").write_text("sentence\tlabel\n")
    refused(corpora, "classification", r"nothing of the 0 examples .*empty\.tsv", **{"data.train": ["empty.tsv"]})


def test_a_class_that_training_does_not_have(corpora: Path) -> None:
    (corpora / "valid.tsv").write_text("sentence\tlabel\nthe cat sat\tgood\na dog\tsuperb\n")
    words = r"valid\.tsv line 3: label 'superb' is not one of the training data's: bad, good"
    refused(corpora, "classification", words, **{"data.valid": ["valid.tsv"]})


def test_a_tag_that_training_does_not_have(corpora: Path) -> None:
    (corpora / "valid.jsonl").write_text('{"words": ["a"], "tags": ["B-CITY"]}\n')
    refused(corpora, "tagging", r"valid\.jsonl line 1: label 'B-CITY' is not one", **{"data.valid": ["valid.jsonl"]})


def test_a_number_that_is_none(corpora: Path) -> None:
    columns = {
        "data.train": ["film.tsv"],
        "data.valid": ["film.tsv"],
        "data.text_column": "sentence",
        "data.pair_column": "",
        "data.label_column": "label",
    }
    refused(corpora, "regression", r"film\.tsv line 2: label 'bad' is not a number", **columns)


def test_an_auxiliary_loss_without_a_language_model(corpora: Path) -> None:
    refused(
        corpora,
        "classification",
        r"train\.auxiliary adds the loss of a language model: it needs a gpt or rnn",
        **{"train.auxiliary": 0.5},
    )


def picture_folder(folder: Path, size: int = 8) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (size, size), 40 * i).save(folder / label / f"{i}.png")


def test_a_picture_that_cannot_be_read(corpora: Path) -> None:
    picture_folder(corpora / "animals")
    (corpora / "animals" / "dog" / "2.png").write_bytes(b"not a picture")
    refused(corpora, "image-classification", r"dog/2\.png cannot be read as an image", **{"data.train": ["animals"]})


def test_pictures_that_patches_do_not_fill(corpora: Path) -> None:
    picture_folder(corpora / "animals", 10)
    words = r"images of animals are 10 x 10 pixels, which patches of 4 x 4 do not fill: set model\.vit\.patch_size"
    refused(corpora, "image-classification", words, **{"data.train": ["animals"]})


def test_a_kind_of_picture_that_training_does_not_have(corpora: Path) -> None:
    picture_folder(corpora / "animals")
    shutil.copytree(corpora / "animals", corpora / "more")
    (corpora / "more" / "cat").rename(corpora / "more" / "cow")
    changes = {"data.train": ["animals"], "data.valid": ["more"]}
    refused(
        corpora, "image-classification", r"more: the class 'cow' is not in the training data \(cat, dog\)", **changes
    )


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "image-classification", "classification", "tagging"])
def test_a_part_that_holds_nothing(corpora: Path, task: str) -> None:
    whole = config_of(corpora, task).data.test[0].split("[")[0]
    refused(corpora, task, r"nothing of .* is left", **{"data.valid": [f"{whole}[:0.0001%]"]})


def test_a_text_of_one_token_has_none_to_predict(corpora: Path) -> None:
    (corpora / "short.txt").write_text("one")
    changes = {"data.valid": ["short.txt"], "tokenizer.kind": "wordpiece"}
    refused(corpora, "causal-lm", r"short\.txt is one token, and none comes after it", **changes)


def test_no_room_for_a_text(corpora: Path) -> None:
    refused(corpora, "masked-lm", r"model\.max_len 2 has no room beside the 2 tokens", **{"model.max_len": 2})


def test_too_few_marks_for_the_gaps(corpora: Path) -> None:
    refused(
        corpora,
        "span-corruption",
        r"sentinels",
        **{"tokenizer.n_sentinels": 1, "data.mean_span": 1.0, "tokenizer.vocab_size": 60},
    )


def test_a_measure_of_entities_where_tags_name_none(corpora: Path) -> None:
    (corpora / "words.conll").write_text("the\tDET\ncat\tNOUN\n\n" * 9)
    changes = {"data.train": ["words.conll"], "data.valid": ["words.conll"], "train.metric": "f1"}
    refused(corpora, "tagging", r"train\.metric f1 is not measured by the task tagging.*loss, accuracy", **changes)


def test_settings_that_would_do_nothing(corpora: Path) -> None:
    with pytest.raises(RegardError, match=r"train\.auxiliary is for classification and tagging, not for causal-lm"):
        config_of(corpora, "causal-lm", **{"train.auxiliary": 0.5})
    refused(corpora, "classification", r"train\.r_drop is not for this kind of classification", **{"train.r_drop": 5.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("cell", "gru"), ("attention_score", "dot"), ("recurrent.d_hidden", 8), ("recurrent.variational", False)],
        ("seq2seq.reverse_source", True),
    ],
)
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "image-classification", "denoising"])
def test_settings_of_recurrent_models_elsewhere(corpora: Path, task: str, name: str, value: Any) -> None:
    table = name.split(".")[0]
    words = rf"model\.{name} is for (rnn, )?seq2seq models, and \S+-tiny is a"
    if table != name:
        words = rf"\[model\.{table}\] would do nothing here: it is for (rnn, )?seq2seq models, and this is a"
    with pytest.raises(RegardError, match=words):
        config_of(corpora, task, **{f"model.{name}": value})


@pytest.mark.parametrize(
    ("name", "value"), [("bptt", 8), ("carry_state", False), ("ar_weight", 1.0), ("tar_weight", 1.0)]
)
@pytest.mark.parametrize(("task", "preset"), [("causal-lm", "gpt-tiny"), ("classification", "lstm-small")])
def test_settings_of_carried_states_elsewhere(corpora: Path, task: str, preset: str, name: str, value: Any) -> None:
    with pytest.raises(RegardError, match=rf"train\.{name} is for recurrent language models"):
        config_of(corpora, task, **{"model.preset": preset, f"train.{name}": value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("mbr", 8), ("coverage_penalty", 0.2), ("prune", 3.0), ("length_norm", "gnmt"), ("replace_unknown", "copy")],
)
def test_decoding_of_translations_in_a_language_model(corpora: Path, setting: str, value: Any) -> None:
    refused(corpora, "causal-lm", f"decode.{setting} is for translations", **{f"decode.{setting}": value})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode.replace_unknown": "copy"}, "decode.replace_unknown needs to know which source word"),
        ({"decode.coverage_penalty": 0.2}, "decode.coverage_penalty needs attention over the source"),
    ],
)
def test_attention_that_a_translator_does_not_have(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    """It is said before training, not at the first validation or after it."""
    small = {"model.preset": "sutskever-small", "model.d_model": 8, "model.recurrent.d_hidden": 8, "train.steps": 1}
    given = {"tokenizer.kind": "word", "tokenizer.vocab_size": 100, "data.train": ["toy:50"], "data.valid": ["toy:5"]}
    with pytest.raises(RegardError, match=words):
        regard.train("toy-en-de", tmp_path / "run", settings={**small, **given, **settings}, quiet=True)
    assert not (tmp_path / "run" / "checkpoints").exists()
