"""Models with a target-language token: figures and statistics treat it as a token of the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokens import EOS, SOS
from typer.testing import CliRunner, Result

from regard import model_folder
from regard.cli.look_commands import look_app
from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.attention_figure import draw_alignment, draw_attention
from regard.look.gradient_figure import measure_gradients
from regard.look.head_importance import ResampledBleu
from regard.look.record import record
from regard.look.recorded_forward import record_forward
from regard.look.statistics_figure import measure_statistics
from regard.model_folder import ModelPackage
from regard.text.tokenizer import Tokenizer, Tokenizers

LINES = ["der Mann hat einen roten Apfel gegessen.", "the man has eaten a red apple."]
TEXT = "the man has eaten."


@pytest.fixture(scope="module")
def several(make: Callable[..., ModelPackage]) -> ModelPackage:
    """From English to German and Chinese."""
    pieces = Tokenizer.train(LINES * 3, TokenizerConfig(kind="bpe", vocab_size=60, language_tokens=("de", "zh")))
    sizes = {"source_vocab": len(pieces), "target_vocab": len(pieces)}
    return replace(
        make("translation", **sizes), tokenizers=Tokenizers(pieces, pieces), directions=("en>de", "en>zh"), target=""
    )


@pytest.fixture(scope="module")
def saved(several: ModelPackage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several") / "model"
    model_folder.save(path, several, "a card")
    return path


def forced(package: ModelPackage, to: str, layer: str) -> tuple[list[str], np.ndarray]:
    """The source's pieces, its tag first, and where a layer looks along the translation, (H, T, S)."""
    assert package.tokenizers is not None
    cut = package.tokenizers.source
    source = [cut.language_tokens()[to], *cut.encode(TEXT), EOS]
    (said,) = Translator(package).translate_sentences([TEXT], to=to)
    written = [SOS, *(cut._backend.token_to_id(piece) for piece in said.tokens), *[EOS] * said.ended]
    with torch.no_grad(), record(package.model, layer) as tape:
        package.model(torch.tensor([source]), torch.tensor([written[:-1]]))
    return list(cut.pieces(source)), tape.weights(layer)[0].numpy()


@pytest.mark.parametrize("to", ["de", "zh"])
def test_the_token_of_the_language_is_the_first_key(several: ModelPackage, to: str) -> None:
    pieces, weights = forced(several, to, "decoder.1.cross")
    (kept,) = draw_attention(several, TEXT, to=to).maps
    assert list(kept.keys.pieces) == pieces
    assert kept.keys.pieces[0] == f"<to-{to}>"
    np.testing.assert_allclose(kept.weights, weights, atol=1e-6)


def test_words_sums_and_sinks_count_it_too(several: ModelPackage) -> None:
    (merged,) = draw_attention(several, TEXT, words=True, to="de").maps
    assert merged.keys.pieces == ("<to-de>", "the", "man", "has", "eaten", ".", "<eos>")
    np.testing.assert_allclose(merged.weights.sum(-1), 1, atol=1e-6)
    hidden = draw_attention(several, TEXT, "encoder.0.self", words=True, hide_sinks=True, to="de")
    assert hidden.maps[0].keys.pieces == ("the", "man", "has", "eaten")
    assert "<to-de>" in hidden.note
    _, weights = forced(several, "de", "encoder.1.self")
    found = {layer.name: layer for layer in measure_statistics(several, [TEXT], to="de").layers}
    np.testing.assert_allclose(found["encoder.1.self"].measures["first"], weights[..., 0].mean(-1), atol=1e-6)


def test_an_alignment_has_it_among_its_words(several: ModelPackage) -> None:
    drawn = draw_alignment(Translator(several), TEXT, to="zh")
    _, weights = forced(several, "zh", "decoder.1.cross")
    assert drawn.source[:3] == ("<to-zh>", "the", "man")
    np.testing.assert_allclose(drawn.weights.sum(1), 1, atol=1e-6)
    assert drawn.weights[0, 0] == pytest.approx(weights.mean(0)[0, 0], abs=1e-6)


def test_names_that_are_not_as_many_as_the_weights_are_an_error_that_is_said(several: ModelPackage) -> None:
    found = record_forward(several, TEXT, to="de")
    queries, keys = found.tokens["cross"]
    wrong = replace(found, tokens={**found.tokens, "cross": (queries, keys.without_sinks())})
    with pytest.raises(
        RegardError, match=r"decoder\.1\.cross has \d+ queries and \d+ keys, but names for .*error in Reg"
    ):
        wrong.weights("decoder.1.cross")
    found.weights("decoder.1.cross")


def test_bleu_is_counted_as_in_the_language_that_is_translated_to(several: ModelPackage) -> None:
    user = Translator(several)
    assert ResampledBleu(user, ["我吃"], "zh").metric.tokenizer.signature() == "zh"
    assert ResampledBleu(user, ["ich"], "de").metric.tokenizer.signature() == "13a"


# ---- the commands ----------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    return CliRunner().invoke(look_app, [*words], obj={})


@pytest.mark.parametrize("command", ["attention", "statistics", "alignment"])
def test_commands_are_told_the_language(command: str, saved: Path) -> None:
    done = call(command, str(saved), TEXT, "--to", "de", "--json")
    assert done.exit_code == 0, done.exception
    json.loads(done.stdout)
    alone = call(command, str(saved), TEXT, "--json")  # the language that `translate` would choose
    assert (alone.exit_code, alone.stdout) == (0, done.stdout)


def test_a_model_that_only_reads_has_no_languages(folders: dict[str, Path]) -> None:
    for command in ("attention", "statistics"):
        message = str(call(command, str(folders["bert"]), TEXT, "--to", "de").exception)
        assert message == "--to is for models that translate: this one only reads"
    message = str(call("change", str(folders["gpt"]), "the man", "--zero", "*", "--to", "de").exception)
    assert "has no languages to translate to: leave out --to de" in message


def test_gradients_are_those_of_sources_that_say_where_they_go(saved: Path, tmp_path: Path) -> None:
    for language, line in zip(("en", "de"), reversed(LINES), strict=True):
        (tmp_path / f"s.{language}").write_text(f"{line}\n" * 4, encoding="utf-8")
    spec = str(tmp_path / "s.{lang}")
    with pytest.raises(RegardError, match=r"translates en>de, en>zh: .*s\.\{lang\}@en>de'"):
        measure_gradients(saved, {"data.train": spec}, device="cpu")
    found = measure_gradients(saved, {"data.train": f"{spec}@en>de"}, device="cpu")
    assert found.total > 0
