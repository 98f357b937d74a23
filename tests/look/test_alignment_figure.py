"""Alignment figures: merged words by hand, weights of a Transformer and of RNNsearch, drawing, and the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from configured import model_config
from matplotlib.image import imread
from tokens import EOS, SETTINGS, SOS
from torch import nn
from typer.testing import CliRunner, Result

from regard import model_folder
from regard.cli.look_commands import look_app
from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.attention_figure import AlignmentFigure, draw_alignment
from regard.look.record import record
from regard.look.token_sequence import group_words
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.text.alignment import merge_weights
from regard.text.tokenizer import Tokenizer, Tokenizers

LINES = ["der Mann hat einen roten Apfel gegessen.", "the man has eaten a red apple.", "don't, say I!"] * 3
KINDS = [("bpe", 60), ("char", 60), ("word", 60), ("unigram", 60), ("wordpiece", 90), ("byte-bpe", 300)]


def tokenizer(kind: str = "bpe", size: int = 60) -> Tokenizer:
    return Tokenizer.train(LINES, TokenizerConfig(kind=kind, vocab_size=size))


def package(kind: str, **changes: object) -> model_folder.ModelPackage:
    """An untrained model of either architecture, with weights that look somewhere."""
    tokens = tokenizer()
    sizes = {
        "d_model": 16,
        "source_vocab": len(tokens),
        "target_vocab": len(tokens),
        "max_len": 64,
        "dropout": 0.0,
        **SETTINGS,
    }
    torch.manual_seed(0)
    model: nn.Module
    if kind == "transformer":
        layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "n_heads": 2, "d_ff": 32}
        model = Transformer(model_config(**(sizes | layers | changes)))  # type: ignore[arg-type]
    else:
        recurrent = {
            "preset": "rnnsearch-small",
            "recurrent.bidirectional": True,
            "cell": "gru",
            "recurrent.d_hidden": 16,
        }
        model = Seq2Seq(model_config(**(sizes | recurrent | changes)))  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return model_folder.ModelPackage(model.eval(), Tokenizers(tokens, tokens), "translation")


def translator(kind: str, **changes: object) -> Translator:
    return Translator(package(kind, **changes))


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_pieces_are_put_together_to_words_whatever_the_vocabulary(kind: str, size: int) -> None:
    cut = tokenizer(kind, size)
    ids = [*cut.encode("the red man, der Apfel."), EOS]
    found = group_words(cut, ids)
    assert [word for word, _ in found] == ["the", "red", "man", ",", "der", "Apfel", ".", "<eos>"]
    assert [i for _, places in found for i in places] == list(range(len(ids)))
    if kind == "char":
        assert [len(places) for _, places in found] == [4, 4, 4, 1, 4, 6, 1, 1]  # with the spaces before them


# ---- pictures --------------------------------------------------------------------------------------------------------


def expected(chosen: Translator, layer: str, source: Sequence[int], written: Sequence[int]) -> np.ndarray:
    """The mean over heads of what teacher forcing along the translation looks at, (T, S)."""
    with torch.no_grad(), record(chosen.model, layer) as tape:
        chosen.model(torch.tensor([source]), torch.tensor([written[:-1]]))
    return tape.weights(layer)[0].mean(0).numpy()


@pytest.mark.parametrize(("kind", "layer"), [("transformer", "decoder.1.cross"), ("rnnsearch", "decoder.cross")])
def test_a_picture_is_where_the_last_layer_looked_along_the_translation(kind: str, layer: str) -> None:
    chosen, text = translator(kind), "der Mann hat einen Apfel."
    drawn = draw_alignment(chosen, text, max_len_b=5, max_len_a=0.0)
    assert drawn.layer == layer
    assert drawn.source == ("der", "Mann", "hat", "einen", "Apfel", ".", "<eos>")
    result = chosen.translate(text, max_len_b=5, max_len_a=0.0)
    assert drawn.translation == result.text
    tokens = chosen.tokenizers.target
    written = [SOS, *(tokens._backend.token_to_id(piece) for piece in result.tokens), *[EOS] * result.ended]
    source = [*tokens.encode(text), EOS]
    weights = expected(chosen, layer, source, written)
    merged = merge_weights(weights, group_words(tokens, written[1:]), group_words(tokens, source))
    np.testing.assert_allclose(drawn.weights, merged, atol=1e-6)
    np.testing.assert_allclose(drawn.weights.sum(1), 1, atol=1e-6)
    assert drawn.weights.shape == (len(drawn.target), 7)


def test_a_decoder_that_begins_with_two_tokens_is_drawn_from_its_first_word_on() -> None:
    given = package("rnnsearch")
    chosen, how = (
        Translator(replace(given, token_template=replace(given.token_template, start=(EOS, SOS)))),
        {"max_len_b": 6, "beam": 1},
    )
    drawn = draw_alignment(chosen, "der Mann", **how)
    tokens = chosen.tokenizers.target
    result = chosen.translate("der Mann", **how)
    written = [*(tokens._backend.token_to_id(piece) for piece in result.tokens), *[EOS] * result.ended]
    assert drawn.target == tuple(word for word, _ in group_words(tokens, written))
    weights = expected(chosen, "decoder.cross", [*tokens.encode("der Mann"), EOS], [EOS, SOS, *written])[1:]
    merged = merge_weights(
        weights, group_words(tokens, written), group_words(tokens, [*tokens.encode("der Mann"), EOS])
    )
    np.testing.assert_allclose(drawn.weights, merged, atol=1e-6)


def test_a_layer_can_be_chosen_and_what_is_not_there_is_refused() -> None:
    chosen = translator("transformer")
    assert draw_alignment(chosen, "der Mann", "decoder.0.cross").layer == "decoder.0.cross"
    with pytest.raises(RegardError, match=r"'decoder\.0\.self'.*decoder\.0\.cross, decoder\.1\.cross"):
        draw_alignment(chosen, "der Mann", "decoder.0.self")
    with pytest.raises(RegardError, match="give a sentence"):
        draw_alignment(chosen, " ")
    with pytest.raises(RegardError, match="no attention over its source"):
        draw_alignment(
            translator("rnnsearch", attention_score="none", **{"recurrent.bidirectional": False}), "der Mann"
        )


def test_white_is_all_and_black_is_nothing(tmp_path: Path) -> None:
    """Three black cells and two grey ones, all of one size, which fill most of the image; text and frame are thin."""
    weights = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 1.0]])
    AlignmentFigure("decoder.cross", "a b c d", ("x", "y"), ("a", "b", "c", "d"), weights).save(tmp_path / "a.png")
    image = imread(tmp_path / "a.png")[..., 0]
    black, grey = image < 0.02, np.abs(image - 0.5) < 0.02
    assert black.mean() / grey.mean() == pytest.approx(3 / 2, rel=0.1)
    assert 0.15 < grey.mean() < 0.25
    rows, columns = (np.diff(np.percentile(places, [2, 98]))[0] for places in np.argwhere(grey).T)  # not the letters
    assert columns / rows == pytest.approx(2, rel=0.05)  # a row of two squares,
    assert np.median(np.argwhere(grey)[:, 0]) > len(image) / 2  # the third of four


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str, **settings: str) -> Result:
    return CliRunner().invoke(look_app, ["alignment", *words], obj={f"decode.{k}": v for k, v in settings.items()})


@pytest.mark.parametrize("kind", ["transformer", "rnnsearch"])
def test_the_command_draws_and_prints(kind: str, tmp_path: Path) -> None:
    model_folder.save(tmp_path / "model", package(kind), "a card")
    asked, png = (str(tmp_path / "model"), "der rote Mann."), tmp_path / "pictures" / "a.png"
    done = call(*asked, "--output", str(png), max_len_b="4")
    assert done.exit_code == 0, done.output
    translation, shown = done.stdout.splitlines()
    assert shown == str(png)
    assert imread(png).ndim == 3
    numbers = json.loads(call(*asked, "--json", max_len_b="4").stdout)
    assert numbers["translation"] == translation
    assert np.array(numbers["weights"]).shape == (len(numbers["target"]), len(numbers["source"]))
    assert numbers["source"] == ["der", "rote", "Mann", ".", "<eos>"]
    assert "choose one of decoder" in str(call(*asked, "--layer", "encoder.0.self").exception)
    assert "decode.nonsense" in str(call(*asked, nonsense="4").exception)
