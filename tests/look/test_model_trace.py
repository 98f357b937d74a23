"""Traces of one input: they show what each kind of model did, and a second trace can be compared with a first."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokens import BERT_TEMPLATE, EOS, MASK, SOS

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.interventions import Forbid, Pin, Replace, Zero, parse
from regard.look.model_trace import Trace
from regard.look.page.html_page import show
from regard.look.reading_tracers import encode_with_masks
from regard.look.record import record
from regard.look.token_sequence import is_punctuation
from regard.look.tracers import trace
from regard.model_folder import ModelPackage
from regard.text.tokenizer import Tokenizer, Tokenizers

Maker = Callable[..., ModelPackage]
KINDS = {
    "translation": "translation",
    "post-norm": "translation",
    "rope": "translation",
    "gpt": "language",
    "bert": "filling",
    "classifier": "classification",
    "vit": "picture",
    "rnnsearch": "alignment",
}


def view(bundles: dict[str, ModelPackage], asked: dict[str, str], kind: str, **options: Any) -> Trace:
    return trace(bundles[kind], asked[kind], **options)


# ---- every kind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_of_every_layer_is_there_and_its_rows_sum_to_one(kind: str, bundles: Any, asked: Any) -> None:
    seen = view(bundles, asked, kind)
    config = bundles[kind].config
    assert seen.kind == KINDS[kind]
    kinds = [one.kind for one in seen.attention]
    by_kind = {name: kinds.count(name) for name in dict.fromkeys(kinds)}
    if seen.kind == "translation":
        assert by_kind == {"encoder": 2, "decoder": 2, "cross": 2}
    elif seen.kind == "alignment":
        assert by_kind == {"alignment": 1}
    else:
        assert by_kind == {"decoder" if kind == "gpt" else "encoder": 2}
    for one in seen.attention:
        weights = one.weights().numpy()
        assert one.heads == (1 if seen.kind == "alignment" else config.n_heads)
        assert weights.shape == one.shape == (one.heads, *(len(seen.sequences[s].ids) for s in (one.queries, one.keys)))
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        assert one.causal == (one.kind == "decoder")
        if one.causal:
            assert (
                weights[:, np.triu_indices(weights.shape[1], 1)[0], np.triu_indices(weights.shape[1], 1)[1]] == 0
            ).all()
        if one.kind != "alignment":
            assert 0 <= one.difference() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_strips_say_what_was_read_in_pieces_and_words(kind: str, bundles: Any, asked: Any) -> None:
    for strip in view(bundles, asked, kind).sequences.values():
        n = len(strip.ids)
        assert len(strip.pieces) == len(strip.special) == n
        assert [i for _, places in strip.words for i in places] == list(range(n))
        assert any(strip.special)
        assert not all(strip.special)


def test_special_tokens_and_punctuation_are_marked(bundles: Any) -> None:
    strip = trace(bundles["translation"], "don't, say I!").sequences["source"]
    marked = {piece for piece, special in zip(strip.pieces, strip.special, strict=True) if special}
    assert {",", "!", "<eos>"} <= marked
    assert "I" not in " ".join(marked)
    assert all(is_punctuation(piece) for piece in (".", "▁", "▁„", "…", "。", "", "##."))
    assert not any(is_punctuation(piece) for piece in ("▁a", "👩", "1", "##a", "a."))


@pytest.mark.parametrize("kind", ["translation", "rnnsearch", "gpt", "bert", "classifier", "vit"])
def test_a_folder_a_bundle_and_whoever_uses_it_are_seen_alike(
    kind: str, bundles: Any, folders: Any, asked: Any
) -> None:
    users: dict[str, Any] = {"translation": Translator, "rnnsearch": Translator, "gpt": Generator, "bert": Embedder}
    expected = view(bundles, asked, kind)
    ways = [trace(folders[kind], asked[kind]), trace(str(folders[kind]), asked[kind])]
    ways.append(trace(users.get(kind, Classifier)(bundles[kind]), asked[kind]))
    for found in ways:
        assert found.kind == expected.kind
        assert found.output == expected.output
        chosen = [[(one.place, one.chosen.id) for one in each.predictions] for each in (found, expected)]
        assert chosen[0] == chosen[1]
        torch.testing.assert_close(found.attention[-1].weights(), expected.attention[-1].weights())
    assert ways[0].title == f"{folders[kind].name}: {asked[kind]}"
    assert ways[0].model["name"] == folders[kind].name
    parameters = sum(p.numel() for p in bundles[kind].model.parameters())
    assert expected.model["parameters"] == parameters


STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("translation", {"positions": "t5", "norm_kind": "rms", "bias": False, "scale_logits": True}),
    "bart": ("post-norm", {"embedding_norm": True}),
    "convs2s": ("translation", {"mixer": "convolution", "positions": "none"}),
    "shaw": ("translation", {"positions": "shaw"}),
    "window": ("gpt", {"positions": "alibi", "attention.window": 3}),
    "cope": ("gpt", {"positions": "cope"}),
    "deberta": ("bert", {"encoder_positions": "disentangled"}),
    "palm": ("gpt", {"parallel": True}),
    "gpt with a prediction head": ("classifier", {"preset": "gpt-tiny", "n_decoder_layers": 2, "token_types": 0}),
}


@pytest.mark.parametrize("style", STYLES)
def test_models_of_every_style_are_seen_whole(style: str, make: Maker) -> None:
    kind, changes = STYLES[style]
    seen = trace(make(kind, **changes), "the man has eaten.")
    for one in seen.attention:
        np.testing.assert_allclose(one.weights().sum(-1), 1, atol=1e-5)
        assert one.difference() < 1e-4
    residual = [stage for stage in seen.activations if stage.stage == "residual"]
    per_layer = {"translation": 5, "post-norm": 5}.get(kind, 2)
    assert len(residual) == 2 * per_layer
    assert all(stage.values.isfinite().all() for stage in seen.activations)
    assert any(stage.stage == "mix" for stage in seen.activations)


# ---- models that write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["translation", "post-norm", "rope", "rnnsearch"])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_translation_is_the_translators_and_so_are_its_numbers(
    kind: str, beam: int, bundles: Any, asked: Any
) -> None:
    seen = view(bundles, asked, kind, beam=beam)
    translator = Translator(bundles[kind])
    expected = translator.translate(asked[kind], beam=beam)
    assert seen.output == expected.text
    written = [*seen.written[1:]]
    assert tuple(translator.tokenizers.target.pieces(written)) == (*expected.tokens, *["<eos>"] * expected.ended)
    assert seen.sequences["target"].ids == seen.written[:-1]
    assert seen.sequences["target"].ids[0] == SOS
    assert seen.sequences["source"].ids == (*translator.tokenizers.source.encode(asked[kind]), EOS)
    assert [one.chosen.id for one in seen.predictions] == written
    assert math.fsum(one.chosen.log_prob for one in seen.predictions) == pytest.approx(expected.log_prob, abs=1e-4)
    assert [one.place for one in seen.predictions] == list(range(len(written)))
    assert not any(one.given for one in seen.predictions)


@pytest.mark.parametrize("kind", ["translation", "rnnsearch"])
def test_the_tree_holds_the_surviving_path_among_others(kind: str, bundles: Any, asked: Any) -> None:
    seen = view(bundles, asked, kind, beam=4)
    assert seen.tree is not None
    path = [twig for step in seen.tree for twig in step if twig.best]
    assert [twig.token for twig in path] == [*seen.written[1:]]
    assert path[-1].log_prob == pytest.approx(math.fsum(one.chosen.log_prob for one in seen.predictions), abs=1e-4)
    assert max(len(step) for step in seen.tree) >= 4
    for before, step in zip(seen.tree, seen.tree[1:], strict=False):
        for twig in step:
            assert twig.log_prob <= before[twig.parent].log_prob + 1e-6
            assert not before[twig.parent].ended
    assert "differ from those shown by at most" in seen.notes[0]
    assert float(seen.notes[0].rsplit(" ", 1)[1].rstrip(".")) < 1e-5


def test_a_language_model_is_seen_with_its_prompt_and_what_it_went_on_with(bundles: Any, asked: Any) -> None:
    seen, writer = view(bundles, asked, "gpt"), Generator(bundles["gpt"])
    expected = writer.generate(asked["gpt"])
    prompt = [SOS, *writer.tokenizer.encode(asked["gpt"])]
    assert seen.output == expected.text
    assert [*seen.written[: len(prompt)]] == prompt
    assert writer.tokenizer.pieces(seen.written[len(prompt) :])[:6] == [*expected.tokens]
    assert [one.chosen.id for one in seen.predictions] == [*seen.written[1:]]
    own = [one.chosen.log_prob for one in seen.predictions[len(prompt) - 1 :]]
    assert math.fsum(own) == pytest.approx(expected.log_prob, abs=1e-4)
    given = [one.given for one in seen.predictions]
    assert given == [True] * (len(prompt) - 1) + [False] * (len(given) + 1 - len(prompt))
    assert seen.tree is None
    assert f"first {len(prompt)} tokens" in seen.notes[0]


@pytest.mark.parametrize("kind", ["translation", "gpt"])
def test_a_known_trace_without_changes_need_not_be_decoded_again(kind: str, bundles: Any, asked: Any) -> None:
    """The words that interventions name are those of the output without changes, however it is known."""
    first = trace(bundles[kind], asked[kind])
    changes = [parse("zero", "decoder.0.self")]
    ways = [trace(bundles[kind], asked[kind], changes, first, unchanged=known) for known in (None, first)]
    assert ways[0].output == ways[1].output
    assert ways[0].written == ways[1].written
    assert ways[0].notes == ways[1].notes


def test_a_sampled_text_is_the_one_that_is_seen(bundles: Any, asked: Any) -> None:
    how = {"temperature": 1.5, "seed": 3}
    seen = view(bundles, asked, "gpt", **how)
    assert seen.output == Generator(bundles["gpt"]).generate(asked["gpt"], **how).text
    assert seen.output != view(bundles, asked, "gpt").output


# ---- models that read ------------------------------------------------------------------------------------------------


def test_candidates_are_the_likeliest_tokens_in_float64(bundles: Any) -> None:
    package = bundles["bert"]
    tokenizer = package.tokenizers.source
    seen = trace(package, "der Mann <mask> einen Apfel")
    (one,) = seen.predictions
    ids = [*seen.sequences["tokens"].ids]
    assert ids[one.place] == MASK
    with torch.no_grad():
        logits = package.model(torch.tensor([ids]))[0, one.place].double().numpy()
    p = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-p)
    assert [candidate.id for candidate in one.top] == order[:10].tolist()
    np.testing.assert_allclose([math.exp(candidate.log_prob) for candidate in one.top], p[order[:10]], rtol=1e-6)
    np.testing.assert_allclose([candidate.logit for candidate in one.top], logits[order[:10]], rtol=1e-5)
    assert [candidate.piece for candidate in one.top] == tokenizer.pieces(order[:10])
    assert one.chosen == one.top[0]
    assert not one.given
    full = [order[0] if id == MASK else id for id in ids]
    assert seen.output == tokenizer.decode(full)


def test_without_a_mask_every_token_is_scored_where_it_stands(bundles: Any, asked: Any) -> None:
    seen = view(bundles, asked, "bert")
    ids = seen.sequences["tokens"].ids
    assert [one.chosen.id for one in seen.predictions] == [*ids]
    assert all(one.given for one in seen.predictions)
    assert ids[0] == SOS
    assert seen.output == asked["bert"]


@pytest.mark.parametrize("kind", ["bpe", "char", "word", "unigram", "wordpiece", "byte-bpe"])
def test_a_mask_stands_in_a_text_as_it_stood_in_training(kind: str) -> None:
    lines = ["the cat sat on a mat, a dog ran."] * 3
    tokenizer = Tokenizer.train(lines, TokenizerConfig(kind=kind, vocab_size=320 if kind == "byte-bpe" else 60))
    for text, word in [(lines[0], "cat"), (lines[0], "the"), ("a cat sat", "sat"), ("the cat, a dog", "cat")]:
        before, _, after = text.partition(word)
        whole = tokenizer.encode(text)
        first = tokenizer.encode(before.rstrip())
        assert whole[: len(first)] == first
        ends = (i for i in range(len(whole) + 1) if tokenizer.decode(whole[i:]).strip() == after.strip())
        assert encode_with_masks(tokenizer, text.replace(word, "<mask>", 1)) == [*first, MASK, *whole[next(ends) :]], (
            word
        )
    assert encode_with_masks(tokenizer, "<mask><mask>") == [MASK, MASK]
    assert encode_with_masks(tokenizer, "") == []


def test_classes_are_the_labellers_with_their_probabilities(bundles: Any, asked: Any) -> None:
    for text in (asked["classifier"], "the man\ta red apple"):
        first, tab, second = text.partition("\t")
        (prediction,) = Classifier(bundles["classifier"]).classify([(first, second) if tab else first])
        seen = trace(bundles["classifier"], text)
        assert seen.labels is not None
        assert dict(seen.labels) == pytest.approx(prediction.probabilities, abs=1e-6)
        assert seen.output == prediction.label == seen.labels[0][0]
        assert [p for _, p in seen.labels] == sorted((p for _, p in seen.labels), reverse=True)
    pair = trace(bundles["classifier"], "the man\ta red apple").sequences["tokens"].pieces
    assert pair.count("<eos>") == 2


def test_numbers_and_tags_are_seen_too(make: Maker) -> None:
    number = replace(make("classifier", n_classes=1), task="regression", labels=())
    (prediction,) = Classifier(number).classify(["the man has eaten"])
    seen = trace(number, "the man has eaten")
    assert seen.output == prediction.label
    assert seen.labels is None
    tags = replace(make("classifier", prediction_head="token"), task="tagging")
    (prediction,) = Classifier(tags).classify(["the red apple"])
    seen = trace(tags, "the red apple")
    assert seen.output == str(prediction)
    assert [one.chosen.piece for one in seen.predictions] == [tag for _, tag in prediction.tags]
    starts = [word[0] for word in ("the", "red", "apple")]
    shown = [seen.sequences["tokens"].pieces[one.place].strip("▁")[:1] for one in seen.predictions]
    assert [s in ("", start) for s, start in zip(shown, starts, strict=True)] == [True] * 3


def test_a_picture_is_shown_with_its_patches(bundles: Any, asked: Any, picture: Path) -> None:
    seen = view(bundles, asked, "vit")
    (prediction,) = Classifier(bundles["vit"]).classify([str(picture)])
    assert dict(seen.labels or []) == pytest.approx(prediction.probabilities, abs=1e-6)
    assert seen.image is not None
    assert (seen.image.rows, seen.image.columns) == (4, 4)
    shown = np.asarray(Image.open(io.BytesIO(seen.image.png)))
    np.testing.assert_array_equal(shown, np.asarray(Image.open(picture)))
    pieces = seen.sequences["tokens"].pieces
    assert pieces[:3] == ("summary", "1,1", "1,2")
    assert len(pieces) == 17
    assert pieces[-1] == "4,4"
    assert seen.sequences["tokens"].special == (True, *[False] * 16)


# ---- two views -------------------------------------------------------------------------------------------------------


def test_a_second_model_reads_what_the_first_one_wrote(bundles: Any, asked: Any) -> None:
    first = view(bundles, asked, "translation")
    alone = trace(bundles["rope"], asked["translation"])
    second = trace(bundles["rope"], asked["translation"], along=first)
    assert alone.written != first.written
    assert second.written == first.written
    assert second.sequences == first.sequences
    assert second.output == alone.output
    assert second.tree == alone.tree
    assert alone.output in second.notes[0]
    assert [one.chosen.id for one in second.predictions] == [one.chosen.id for one in first.predictions]
    source, target = (torch.tensor([second.sequences[side].ids]) for side in ("source", "target"))
    with torch.no_grad(), record(bundles["rope"].model) as tape:
        bundles["rope"].model(source, target)
    for one in second.attention:
        torch.testing.assert_close(one.weights(), tape.weights(one.name)[0])


def test_a_second_language_model_goes_on_with_the_firsts_text(make: Maker, bundles: Any, asked: Any) -> None:
    first, other = view(bundles, asked, "gpt"), make("gpt", positions="alibi")
    second = trace(other, asked["gpt"], along=first)
    assert second.sequences == first.sequences
    assert second.output == Generator(other).generate(asked["gpt"]).text != first.output


def test_models_of_other_vocabularies_keep_their_own_tokens_and_say_so(bundles: Any, make: Maker) -> None:
    first = trace(bundles["translation"], "the man has")
    second = trace(bundles["hostile"], "the man has", along=first)
    assert second.sequences["target"].pieces != first.sequences["target"].pieces
    assert "other pieces" in second.notes[0]
    same = trace(bundles["translation"], "the man has", along=first)
    assert "differ" in same.notes[0]  # nothing had to be forced


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_changes_hold_while_a_model_is_seen_and_are_said(bundles: Any, asked: Any) -> None:
    before = {name: p.clone() for name, p in bundles["translation"].model.state_dict().items()}
    plain = view(bundles, asked, "translation")
    forbidden = Forbid("decoder.1.cross", (1,), 2, "man")
    seen = view(bundles, asked, "translation", changes=[forbidden, Zero("encoder.0.self", (0,))])
    (places,) = [places for word, places in seen.sequences["source"].words if word == "man"]
    (layer,) = [one for one in seen.attention if one.name == "decoder.1.cross"]
    assert (layer.weights()[1, 2, list(places)] == 0).all()
    assert (layer.weights()[0, 2, list(places)] > 0).all()
    assert layer.weights()[1, 2].sum() == pytest.approx(1, abs=1e-5)
    mixed = [s for s in seen.activations if (s.layer, s.sublayer, s.stage, s.sequence) == (0, "self", "mix", "source")]
    assert (mixed[0].values[:, :8] == 0).all()
    assert (mixed[0].values[:, 8:] != 0).any()
    assert seen.changes == ("forbid decoder.1.cross:1@2>man", "zero encoder.0.self:0")
    after = view(bundles, asked, "translation")
    assert torch.equal(after.attention[-1].weights(), plain.attention[-1].weights())
    assert all(torch.equal(p, before[name]) for name, p in bundles["translation"].model.state_dict().items())


def test_other_tokens_are_read_or_written_by_force(bundles: Any, asked: Any) -> None:
    plain = view(bundles, asked, "translation")
    source = view(bundles, asked, "translation", changes=[Replace("source", "man", " apple")])
    assert [word for word, _ in source.sequences["source"].words].count("apple") == 2
    target = view(bundles, asked, "translation", changes=[Replace("target", 2, "I")], along=plain)
    forced = bundles["translation"].tokenizers.target.encode("I")
    assert [*target.written[2 : 2 + len(forced)]] == forced
    assert target.written[:2] == plain.written[:2]
    assert "I" in target.output
    given = [one.given for one in target.predictions]
    assert given == [i < 1 + len(forced) for i in range(len(given))]
    assert target.tree is not None
    assert [t.token for step in target.tree for t in step if t.best] == [*target.written[2 + len(forced) :]]


@pytest.mark.parametrize("kind", ["gpt", "bert", "classifier", "vit", "rnnsearch"])
def test_every_kind_can_be_changed(kind: str, bundles: Any, asked: Any) -> None:
    name = view(bundles, asked, kind).attention[0].name
    seen = view(bundles, asked, kind, changes=[Forbid(name, None, 3, 1)])
    weights = seen.attention[0].weights()
    assert (weights[:, 3, 1] == 0).all()
    assert (weights[:, 2, 1] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_another_word_in_a_prompt_is_read_before_what_the_first_one_wrote(bundles: Any, asked: Any) -> None:
    first = view(bundles, asked, "gpt")
    second = view(bundles, asked, "gpt", changes=[Replace("source", "man", " apple has")], along=first)
    tokenizer = bundles["gpt"].tokenizers.target
    (places,) = [places for word, places in first.sequences["tokens"].words if word == "man"]
    asked_for = [SOS, *tokenizer.encode(asked["gpt"])]
    prompt = [*asked_for[: places[0]], *tokenizer.encode(" apple has"), *asked_for[places[-1] + 1 :]]
    assert [*second.written] == [*prompt, *first.written[len(asked_for) :]]
    assert second.sequences["tokens"].ids == second.written[:-1]
    own = trace(bundles["gpt"], asked["gpt"], [Replace("source", "man", " apple has")])
    assert second.output == own.output != first.output
    assert [one.given for one in second.predictions].count(True) == len(prompt) - 1


def test_a_word_of_a_text_that_is_only_read_can_be_another(bundles: Any) -> None:
    seen = trace(bundles["bert"], "the man has eaten", changes=[Replace("source", "man", " apple")])
    assert "apple" in [word for word, _ in seen.sequences["tokens"].words]
    with pytest.raises(RegardError, match="as many pieces"):
        trace(bundles["classifier"], "the man has", changes=[Replace("source", "man", " eaten roten gegessen")])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_has_no_attention_is_refused_with_a_reason(make: Maker) -> None:
    with pytest.raises(RegardError, match=r"no attention \(model.attention_score none\)"):
        trace(make("rnnsearch", attention_score="none", **{"recurrent.bidirectional": False}), "der Mann")
    with pytest.raises(RegardError, match="attends to anything"):
        trace(make("gpt", mixer="convolution", positions="none", n_kv_heads=4), "the man")
    with pytest.raises(RegardError, match="nothing to look into"):
        trace(3.5, "the man")


@pytest.mark.parametrize(
    ("first", "second"), [(a, b) for i, a in enumerate(KINDS) for j, b in enumerate(KINDS) if (j - i) % len(KINDS) < 3]
)
def test_models_of_two_kinds_are_not_compared(first: str, second: str, bundles: Any, folders: Any, asked: Any) -> None:
    alike = KINDS[first] == KINDS[second] or {KINDS[first], KINDS[second]} == {"translation", "alignment"}
    text = asked[first]
    if alike:
        assert len(show(bundles[first], text, bundles[second]).views) == 2
        return
    for own in (False, True):
        with pytest.raises(RegardError, match=rf"{first} \({KINDS[first]}\) and {second} \({KINDS[second]}\)"):
            show(folders[first], text, folders[second], own=own)


@pytest.mark.parametrize("kind", ["bert", "classifier", "vit"])
def test_what_only_writers_can_do_is_refused_by_readers(kind: str, bundles: Any, asked: Any) -> None:
    with pytest.raises(RegardError, match=r"--decode\.beam has no meaning"):
        view(bundles, asked, kind, beam="3")
    with pytest.raises(RegardError, match="--to has no meaning"):
        view(bundles, asked, kind, to="fr")
    with pytest.raises(RegardError, match="target:1=dog': this model writes nothing"):
        view(bundles, asked, kind, changes=[Replace("target", 1, "dog")])


def test_changes_that_would_do_nothing_are_refused(bundles: Any, asked: Any) -> None:
    with pytest.raises(RegardError, match="a picture has no words"):
        view(bundles, asked, "vit", changes=[Replace("source", 1, "x")])
    for kind, first in (("gpt", 1 + len(bundles["gpt"].tokenizers.target.encode(asked["gpt"]))), ("translation", 1)):
        with pytest.raises(RegardError, match=f"begin at {first}"):
            view(bundles, asked, kind, changes=[Replace("target", 0, "I")])
    for change in (Forbid("*cross", None, "man", "the"), Forbid("*cross", None, 1, 0), Pin("man", "the")):
        with pytest.raises(RegardError, match=r"no attention over a source: name a layer, .* 'decoder\.\*\.self@"):
            view(bundles, asked, "gpt", changes=[change])
    with pytest.raises(RegardError, match="there is one view"):
        show(bundles["translation"], asked["translation"], own=True)


@pytest.mark.parametrize(("kind", "what"), [("translation", "translate"), ("bert", "read"), ("gpt", "continue")])
def test_an_empty_text_is_refused(kind: str, what: str, bundles: Any) -> None:
    with pytest.raises(RegardError, match=f"nothing to {what}"):
        trace(bundles[kind], "")


@pytest.mark.parametrize("kind", ["translation", "bert", "classifier", "gpt"])
def test_a_text_that_is_too_long_is_refused(kind: str, bundles: Any) -> None:
    with pytest.raises(RegardError, match="at most"):
        trace(bundles[kind], "apple " * 70)


def test_a_model_without_a_tokenizer_is_refused(bundles: Any) -> None:
    with pytest.raises(RegardError, match="no tokenizer"):
        trace(replace(bundles["bert"], tokenizers=None), "the man")


def test_the_names_of_the_package_are_imported_when_first_used() -> None:
    import regard.look

    assert regard.look.trace is trace
    assert regard.look.Trace is Trace
    with pytest.raises(AttributeError, match="nothing"):
        _ = regard.look.nothing


def test_two_vocabularies_of_a_translator_are_told_apart(make: Maker) -> None:
    package = make("translation", tie="decoder")
    other = Tokenizer.train(["a b c d"] * 3, TokenizerConfig(kind="char", vocab_size=60))
    assert package.tokenizers is not None
    sizes = {"source_vocab": len(other), "tie": "decoder"}
    mixed = replace(
        make("translation", **sizes),
        tokenizers=Tokenizers(other, package.tokenizers.target),
        token_template=BERT_TEMPLATE,
    )
    seen = trace(mixed, "a b")
    assert seen.sequences["source"].pieces == ("<sos>", *other.pieces(other.encode("a b")), "<eos>")
