"""Head importance against a loop that zeroes matrices, sacreBLEU itself, and errors computed in NumPy."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
import typer
from sacrebleu.metrics import BLEU
from tokens import EOS, SOS
from typer.testing import CliRunner, Result

from regard import model_folder
from regard.cli.look_commands import look_heads
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.head_importance import (
    Effect,
    HeadImportance,
    ResampledBleu,
    all_heads,
    make_batches,
    ratio,
    scan_heads,
)
from regard.look.record import attention_layers
from regard.model_folder import ModelPackage
from regard.text.special_tokens import PAD

RNG = random.Random(3)
SOURCE = [toy.sentence(RNG) for _ in range(12)]
TARGET = [toy.translated(text) for text in SOURCE]
LINES = [
    "der Mann hat einen roten Apfel gegessen.",
    "the man has eaten a red apple.",
    "don't, say I!",
    "",
    "the red man",
]


def silenced(package: ModelPackage, name: str, head: int) -> Any:
    """A copy of the model without what this head says."""
    model = copy.deepcopy(package.model)
    layer: Any = attention_layers(model)[name]
    with torch.no_grad():
        layer.out.weight[:, head * layer.d_head : (head + 1) * layer.d_head] = 0.0
    return model


def translation_losses(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """-log p of each translation, one at a time, and how many tokens it has."""
    found, counts = [], []
    for source, target in zip(SOURCE, TARGET, strict=True):
        read, said = toy.tokens().encode(source), toy.tokens().encode(target)
        with torch.no_grad():
            log_p = model(torch.tensor([[*read, EOS]]), torch.tensor([[SOS, *said]])).double().log_softmax(-1)[0]
        found.append(-sum(log_p[i, token].item() for i, token in enumerate([*said, EOS])))
        counts.append(len(said) + 1)
    return np.array(found), np.array(counts)


def test_the_loss_without_a_head_is_that_of_a_model_without_it() -> None:
    package = toy.taught("transformer")
    found = scan_heads(package, SOURCE, TARGET)
    base, counts = translation_losses(package.model)
    assert found.baseline == pytest.approx(base.sum() / counts.sum(), abs=1e-6)
    assert found.sentences == 12
    assert [(e.layer, e.head) for e in found.effects] == [
        (n, h) for n in attention_layers(package.model) for h in range(4)
    ]
    for effect in found.effects[::3]:
        differences = translation_losses(silenced(package, effect.layer, effect.head))[0] - base
        assert effect.change == pytest.approx(differences.sum() / counts.sum(), abs=1e-5)
        spread = differences - effect.change * counts
        error = np.sqrt(12 / 11 * (spread**2).sum()) / counts.sum()
        assert effect.error == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_in_a_toy_language_some_head_that_reads_the_source_matters_most_without_all_of_them_nothing_works() -> None:
    found = scan_heads(toy.taught("transformer"), SOURCE, TARGET)
    worst = found.ranked[0]
    assert worst.is_significant
    assert worst.change > 0
    assert worst.change == max(effect.change for effect in found.effects)
    assert all(not effect.is_significant for effect in found.useless)
    assert len(found.useless) + sum(effect.is_significant for effect in found.effects) == len(found.effects)


def test_a_recurrent_decoder_has_one_head_and_cannot_do_without() -> None:
    (effect,) = scan_heads(toy.taught("rnnsearch"), SOURCE, TARGET).effects
    assert (effect.layer, effect.head) == ("decoder.cross", 0)
    assert effect.change > 0.5
    assert effect.is_significant


def test_errors_are_those_of_a_ratio() -> None:
    """Worked by hand: 3/4 of differences 1, 0, 2 over 2, 1, 1; residuals -0.5, -0.75, 1.25."""
    value, error = ratio(np.array([1.0, 0.0, 2.0]), np.array([2, 1, 1]))
    assert value == 0.75
    assert error == pytest.approx(np.sqrt(1.5 * (0.25 + 0.5625 + 1.5625)) / 4)
    rng = np.random.default_rng(0)
    counts = rng.integers(3, 30, (2000, 50))
    sums = rng.normal(0.3, 1.0, counts.shape) * counts
    found = np.array([ratio(s, c) for s, c in zip(sums, counts, strict=True)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.05)


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_models_of_plain_text_are_measured_on_its_lines(bundles: dict[str, ModelPackage], kind: str) -> None:
    package = bundles[kind]
    found = scan_heads(package, LINES)
    total, count = 0.0, 0
    for rows in make_batches(package, LINES):
        for read, wanted in zip(rows.inputs, rows.labels, strict=True):
            row = read[read != PAD]
            with torch.no_grad():
                log_p: Any = package.model(row[None]).double().log_softmax(-1)[0]
            asked = [(i, token) for i, token in enumerate(wanted.tolist()) if token != PAD]
            total -= sum(log_p[i, token].item() for i, token in asked)
            count += len(asked)
    assert found.sentences == 4
    assert found.baseline == pytest.approx(total / count, abs=1e-5)
    assert len(found.effects) == len(all_heads(package.model))
    assert any(effect.change != 0 for effect in found.effects)


def test_a_language_model_is_asked_for_every_token_but_the_first_and_bert_for_blanks(
    bundles: dict[str, ModelPackage],
) -> None:
    tokenizers = bundles["gpt"].tokenizers
    assert tokenizers is not None
    ids = tokenizers.target.encode(LINES[1])
    (rows,) = make_batches(bundles["gpt"], LINES[1:2])
    assert rows.inputs.tolist() == [[SOS, *ids[:-1]]]
    assert rows.labels.tolist() == [ids]
    (rows,) = make_batches(bundles["bert"], LINES[1:2])
    asked = rows.labels[0] != PAD
    assert 1 <= asked.sum() <= max(1, round(0.15 * len(ids)))
    assert [SOS, *ids, EOS] == torch.where(asked, rows.labels[0], rows.inputs[0]).tolist()
    again = make_batches(bundles["bert"], LINES[1:2])[0]
    assert torch.equal(again.inputs, rows.inputs)


# ---- BLEU ------------------------------------------------------------------------------------------------------------


def test_bleu_from_the_counts_of_sentences_is_sacrebleus() -> None:
    translator = Translator(toy.taught("transformer"))
    spoken = [" ".join(reversed(text.split())) if i % 3 else text for i, text in enumerate(TARGET)]
    bleu = ResampledBleu(translator, TARGET)
    assert bleu.score(bleu.counts(spoken)) == pytest.approx(BLEU().corpus_score(spoken, [TARGET]).score, abs=1e-9)
    assert bleu.score(bleu.counts(TARGET)) == pytest.approx(100)


def test_bleu_without_a_head_is_that_of_its_greedy_translations() -> None:
    package = toy.taught("transformer")
    found = scan_heads(package, SOURCE, TARGET, "bleu")
    written = [t.text for t in Translator(package).translate(SOURCE, beam=1)]
    assert found.baseline == pytest.approx(BLEU().corpus_score(written, [TARGET]).score)
    worst = found.ranked[0]
    other = Translator(
        ModelPackage(silenced(package, worst.layer, worst.head), package.tokenizers, "translation", target="de")
    )
    without = BLEU().corpus_score([t.text for t in other.translate(SOURCE, beam=1)], [TARGET]).score
    assert worst.change == pytest.approx(without - found.baseline)
    assert worst.change == min(effect.change for effect in found.effects)


def test_sentences_that_are_left_out_are_counted_and_one_alone_is_refused() -> None:
    package, long = toy.taught("transformer"), " ".join(["ape"] * 40)
    found = scan_heads(package, [*SOURCE, long, ""], [*TARGET, "Affe", "Affe"])
    assert (found.sentences, found.left_out) == (12, 2)
    assert str(found).startswith("12 sentences (2 left out: empty, or too long for this model): ")
    assert found.numbers()["left_out"] == 2
    assert scan_heads(package, SOURCE, TARGET).left_out == 0
    with pytest.raises(RegardError, match="1 sentence has no error to tell"):
        scan_heads(package, [SOURCE[0], long], [TARGET[0], "Affe"])
    with pytest.raises(RegardError, match="1 sentence has no error to tell"):
        scan_heads(package, SOURCE[:1], TARGET[:1], "bleu")


# ---- as it is shown --------------------------------------------------------------------------------------------------

MADE = HeadImportance(
    "loss",
    2.0,
    0.1,
    7,
    (
        Effect("encoder.0.self", 0, 0.5, 0.1),
        Effect("encoder.0.self", 1, 0.1, 0.1),
        Effect("encoder.1.self", 0, -0.3, 0.1),
        Effect("encoder.1.self", 1, 0.0, 0.0),
        Effect("decoder.0.cross", 0, 1.5, 0.2),
        Effect("decoder.0.cross", 1, 0.2, 0.1),
    ),
)


def test_heads_that_matter_stand_first_and_those_that_do_not_are_named() -> None:
    lines = str(MADE).splitlines()
    assert lines[0] == "7 sentences: 2.0000 nats a token with all heads (standard error 0.1000)"
    assert lines[1] == "3 heads change it, these most:"
    assert [line.split()[0] for line in lines[2:5]] == ["decoder.0.cross:0", "encoder.0.self:0", "encoder.1.self:0"]
    assert lines[5] == "better without: encoder.1.self:0"
    names = "decoder.0.cross:1, encoder.0.self:1, encoder.1.self:1"
    assert lines[6] == f"3 of 6 heads change it by no more than twice the error: {names}"
    bleu = HeadImportance("bleu", 30.0, 0.5, 7, (Effect("a.self", 0, 2.0, 0.1), Effect("a.self", 1, -3.0, 0.1)))
    assert [e.head for e in bleu.ranked] == [1, 0]
    assert "better without: a.self:0" in str(bleu)


def test_the_picture_has_a_panel_a_kind_on_one_scale() -> None:
    drawn = [axes for axes in MADE.figure().axes if axes.images]
    assert [axes.get_title() for axes in drawn] == ["encoder", "cross"]
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in drawn] == [("head", "layer")] * 2
    np.testing.assert_array_equal(drawn[0].images[0].get_array(), [[0.5, 0.1], [-0.3, 0.0]])
    np.testing.assert_array_equal(drawn[1].images[0].get_array(), [[1.5, 0.2]])
    assert {axes.images[0].get_clim() for axes in drawn} == {(-1.5, 1.5)}
    dots = [axes.collections[0].get_offsets().tolist() for axes in drawn]  # type: ignore[union-attr]
    assert dots == [[[0, 0], [0, 1]], [[0, 0]]]
    assert [axes.get_yticks().tolist() for axes in drawn] == [[0, 1], [0]]
    assert MADE._repr_png_()[:4] == b"\x89PNG"


def test_what_cannot_be_measured_is_refused(bundles: dict[str, ModelPackage]) -> None:
    package = toy.taught("transformer")
    with pytest.raises(RegardError, match="loss or bleu, not 'chrf'"):
        scan_heads(package, SOURCE, TARGET, "chrf")
    with pytest.raises(RegardError, match="give a target too"):
        scan_heads(package, SOURCE)
    with pytest.raises(RegardError, match="12 lines and the target 3"):
        scan_heads(package, SOURCE, TARGET[:3])
    with pytest.raises(RegardError, match="12 lines and the target 3"):
        scan_heads(package, SOURCE, TARGET[:3], "bleu")
    with pytest.raises(RegardError, match="only translations have a target"):
        scan_heads(bundles["gpt"], LINES, metric="bleu")
    with pytest.raises(RegardError, match="no text to measure"):
        scan_heads(bundles["gpt"], ["", " "])
    with pytest.raises(RegardError, match="translate, write or fill in blanks"):
        scan_heads(bundles["classifier"], LINES)


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    app = typer.Typer()
    app.command()(look_heads)
    return CliRunner().invoke(app, [*words, "--device", "cpu"], obj={})


def test_the_command_prints_draws_and_gives_numbers(tmp_path: Path) -> None:
    model_folder.save(tmp_path / "model", toy.taught("transformer"), "a card")
    for name, lines in (("a.en", SOURCE), ("a.de", TARGET)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    files = [str(tmp_path / "model"), "--source", str(tmp_path / "a.en"), "--target", str(tmp_path / "a.de")]
    result = call(*files, "--sentences", "6", "--output", str(tmp_path / "h.svg"))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == str(tmp_path / "h.svg")
    assert (tmp_path / "h.svg").read_text().startswith("<?xml")
    found = json.loads(call(*files, "--json", "--output", str(tmp_path / "j.png")).output)
    assert (tmp_path / "j.png").read_bytes()[:4] == b"\x89PNG"
    expected = scan_heads(toy.taught("transformer"), SOURCE, TARGET)
    assert found["sentences"] == 12
    assert found["baseline"] == pytest.approx(expected.baseline)
    assert [head["change"] for head in found["heads"]] == pytest.approx([e.change for e in expected.effects])
    assert "at least 2" in str(call(*files, "--sentences", "1").exception)
    refused = call(*files, "--output", str(tmp_path / "h.pdf"))
    assert "h.pdf: pictures are PNG or SVG" in str(refused.exception)
    assert not (tmp_path / "h.pdf").exists()
