"""`regard classify` as a user meets it: texts, pairs, a file, stdin, JSON, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import call
from test_classifier import NAMES, TEXTS, package

from regard import model_folder
from regard.inference.classifier import Classifier, Prediction


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    for task in ("classification", "regression", "tagging"):
        model_folder.save(path / task, package(task, () if task == "regression" else NAMES), "a card")
    return path


def expected(task: str, items: list[str | tuple[str, str]]) -> list[Prediction]:
    return Classifier(package(task, () if task == "regression" else NAMES)).classify(items)


def test_texts(models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capfd, monkeypatch, "classify", str(models / "classification"), *TEXTS)
    lines = [f"{prediction.label}\t{prediction.probability:.4f}" for prediction in expected("classification", [*TEXTS])]
    assert (code, out.splitlines()) == (0, lines)


def test_lines_of_a_file_and_of_stdin(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "".join(text + "\n" for text in TEXTS)
    (tmp_path / "texts").write_text(written)
    model = str(models / "classification")
    direct = call(capfd, monkeypatch, "classify", model, *TEXTS)[1]
    assert call(capfd, monkeypatch, "classify", model, "--input", str(tmp_path / "texts"))[:2] == (0, direct)
    assert call(capfd, monkeypatch, "classify", model, stdin=written.encode())[:2] == (0, direct)


def test_json_has_every_probability_and_a_tab_makes_a_pair(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["the cat\ta dog", "the cat"]
    code, out, _ = call(capfd, monkeypatch, "classify", str(models / "classification"), "--json", *given)
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [item["text"] for item in found] == given
    predictions = expected("classification", [("the cat", "a dog"), "the cat"])
    for item, prediction in zip(found, predictions, strict=True):
        assert item["label"] == prediction.label
        assert item["probabilities"] == pytest.approx(prediction.probabilities)


def test_numbers_and_tags_stand_alone(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("regression", "tagging"):
        code, out, _ = call(capfd, monkeypatch, "classify", str(models / task), *TEXTS)
        assert (code, out.splitlines()) == (0, [str(prediction) for prediction in expected(task, [*TEXTS])])


def test_tags_as_json(models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, _ = call(capfd, monkeypatch, "classify", str(models / "tagging"), "--json", "the cat")
    assert json.loads(out)["tags"] == [list(pair) for pair in expected("tagging", ["the cat"])[0].tags]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["classification", "a text", "--input", "file"], "give texts or --input FILE, not both"),
        (["nowhere", "a text"], "no model at"),
        (["classification", " ".join(["cat"] * 11)], "text 1 has 13 tokens"),
        (["classification", "--input", "gone.txt"], "there is no file gone.txt"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    models: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    code, out, err = call(capfd, monkeypatch, "classify", str(models / words[0]), *words[1:])
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_settings_of_a_recipe_are_refused(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capfd, monkeypatch, "classify", str(models / "classification"), "x", "--train.steps", "3")
    assert (code, "--train.steps does not belong here" in err) == (2, True)


def test_scores_of_classes_have_no_beam(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("evaluate", str(models / "classification"), "--data", "x.tsv", "--beam", "3")
    code, _, err = call(capfd, monkeypatch, *words)
    assert (code, "are for translations; this is a model for classification" in err) == (2, True)
