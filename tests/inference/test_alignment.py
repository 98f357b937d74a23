"""Word alignment of given texts by cross-attention, with untrained models."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import EOS, SETTINGS, SOS
from torch import nn

from regard import model_folder
from regard.config import TokenizerConfig
from regard.decode.source_attention import WeightsHook, forced_attention, hooked_layers, mean_weights, source_layers
from regard.errors import RegardError
from regard.inference.attention_alignment import equal_spans, mask_spans
from regard.inference.translator import Translator
from regard.layers.hooks import is_observed
from regard.look.record import record
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.text.alignment import Link, word_spans
from regard.text.placeholders import PROTECTED
from regard.text.tokenizer import Tokenizer, Tokenizers

LINES = [
    "der Mann hat einen roten Apfel gegessen.",
    "the man has eaten a red apple.",
    "don't, say I! ⟦1⟧ 0123456789",
] * 3


def translator(kind: str = "transformer", **changes: object) -> Translator:
    """An untrained model of either architecture, whose attention differs from place to place."""
    tokens = Tokenizer.train(LINES, TokenizerConfig(kind="byte-bpe", vocab_size=300))
    sizes = {"d_model": 16, "source_vocab": len(tokens), "target_vocab": len(tokens), "max_len": 64, "dropout": 0.0}
    torch.manual_seed(0)
    model: nn.Module
    if kind == "transformer":
        layers = {"n_encoder_layers": 1, "n_decoder_layers": 2, "n_heads": 2, "d_ff": 32}
        model = Transformer(model_config(**(sizes | SETTINGS | layers | changes)))  # type: ignore[arg-type]
    else:
        recurrent = {
            "preset": "rnnsearch-small",
            "recurrent.bidirectional": True,
            "cell": "gru",
            "recurrent.d_hidden": 16,
        }
        model = Seq2Seq(model_config(**(sizes | SETTINGS | recurrent | changes)))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    package = model_folder.ModelPackage(
        model.eval(), Tokenizers(tokens, tokens), "translation", source="en", target="de"
    )
    return Translator(package)


@pytest.fixture(scope="module", params=["transformer", "rnnsearch"])
def model(request: pytest.FixtureRequest) -> Translator:
    return translator(request.param)


def test_weights_are_the_mean_over_all_layers_and_heads_of_the_steps_that_predict(model: Translator) -> None:
    rng = random.Random(1)
    pairs = [[[rng.randrange(5, 250) for _ in range(rng.randint(1, 9))] for _ in range(2)] for _ in range(6)]
    found = forced_attention(model.model, [p[0] for p in pairs], [p[1] for p in pairs], model.token_template)  # type: ignore[arg-type]
    for (source, target), weights in zip(pairs, found, strict=True):
        with torch.no_grad(), record(model.model, "*cross") as tape:
            model.model(torch.tensor([[*source, EOS]]), torch.tensor([[SOS, *target[:-1]]]))
        expected = torch.stack([tape.weights(name)[0].mean(0) for name in tape]).mean(0).numpy()
        assert weights.shape == (len(target), len(source) + 1)
        np.testing.assert_allclose(weights, expected, atol=1e-5)


def check(links: list[Link], source: str, target: str) -> None:
    words = set(word_spans(source)), set(word_spans(target))
    for link in links:
        assert link[:2] in words[0]
        assert link[2:4] in words[1]
        assert 0 < link.weight <= 1
    assert [link.target_begin for link in links] == sorted(link.target_begin for link in links)


def test_links_are_between_whole_words_of_the_texts_as_given(model: Translator) -> None:
    source, target = "The  red\u00a0man, “he” ate\r\n an apple.", "Der rote Mann — er hat „einen“ Apfel gegessen. "
    (links,) = model.align([source], [target])
    check(links, source, target)
    linked = {link[2:4] for link in links}
    assert all(span in linked for span in word_spans(target) if target[span[0]].isalnum())


def test_sentences_are_aligned_one_by_one_where_their_numbers_agree(model: Translator) -> None:
    source, target = "The man ate. A red apple.\nSay so!", "Der Mann hat gegessen.\n\nEinen roten Apfel. Sag es!"
    (links,) = model.align([source], [target])
    check(links, source, target)
    begins = [source.index("A red"), source.index("Say")], [target.index("Einen"), target.index("Sag")]
    for link in links:
        place = [
            sum(at >= begin for begin in own)
            for at, own in zip((link.source_begin, link.target_begin), begins, strict=True)
        ]
        assert place[0] == place[1]
    (alone,) = model.align(["A red apple."], ["Einen roten Apfel."])
    shifted = [link.shift(begins[0][0], begins[1][0]) for link in alone]
    middle = [link for link in links if begins[1][0] <= link.target_begin < begins[1][1]]
    assert [link[:4] for link in middle] == [link[:4] for link in shifted]


def test_what_is_not_translated_is_linked_to_itself(model: Translator) -> None:
    source, target = "see \ue000 the \ue001\ue002 man https://a.b/c 😀", "😀 https://a.b/c der \ue002 Mann \ue000\ue001"
    (links,) = model.align([source], [target])
    for kept in ("\ue000", "\ue001", "\ue002", "https://a.b/c", "😀"):
        spans = [(text.index(kept), text.index(kept) + len(kept)) for text in (source, target)]
        own = [link for link in links if link.target_begin < spans[1][1] and link.target_end > spans[1][0]]
        assert own == [Link(*spans[0], *spans[1], 1.0)]


def test_texts_beyond_the_longest_input_and_empty_texts_are_taken(model: Translator) -> None:
    source, target = "the man " * 40, "der Mann " * 40
    links, nothing, half = model.align([source, "", "the man"], [target, "", "!"])
    check(links, source, target)
    assert links
    assert nothing == half == []


def test_batches_do_not_change_links(model: Translator) -> None:
    texts = ["the man", "a red apple has eaten the man.", "don't, say I!"]
    targets = ["der Mann", "der Apfel", "einen roten Apfel gegessen, gegessen, hat der Mann einen."]
    together = model.align(texts, targets)
    for text, target, links in zip(texts, targets, together, strict=True):
        (alone,) = model.align([text], [target])
        assert [link[:4] for link in alone] == [link[:4] for link in links]
        np.testing.assert_allclose([link.weight for link in alone], [link.weight for link in links], atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_texts_are_aligned(source: str, target: str) -> None:
    (links,) = MODEL.align([source], [target])
    for link in links:
        assert 0 <= link.source_begin < link.source_end <= len(source)
        assert 0 <= link.target_begin < link.target_end <= len(target)


MODEL = translator()


def test_wrong_arguments_are_refused(model: Translator) -> None:
    with pytest.raises(RegardError, match="as many texts as translations, not 1 and 2"):
        model.align(["a"], ["a", "b"])
    with pytest.raises(TypeError, match="align takes"):
        model.align([3], ["a"])  # type: ignore[list-item]
    without: Any = translator("rnnsearch", attention_score="none", **{"recurrent.bidirectional": False})
    with pytest.raises(RegardError, match="no attention over its source"):
        without.align(["a"], ["b"])
    assert without.translate("the man", alignment=True).alignment == ()


def test_a_translation_has_its_alignment_where_it_is_asked_for(model: Translator) -> None:
    found = model.translate("the man has eaten.", alignment=True, max_len_b=5)
    assert found.alignment is not None
    check(list(found.alignment), "the man has eaten.", found.text)
    assert list(found.alignment) == model.align_sentences([("the man has eaten.", found.text)], [("en", "de")])[0]
    assert model.translate("the man").alignment is None


def test_recording_and_aligning_do_not_disturb_each_other(model: Translator) -> None:
    with record(model.model, "*cross") as tape:
        model.align(["the man"], ["der Mann"])
        assert not any(tape[name] for name in tape)
        model.translate_sentences(["the man"], max_len_b=3)
    assert all(len(tape[name]) == 1 for name in tape)


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_masked_texts_know_where_their_words_were() -> None:
    text = "a https://b.c/d  “e” *f*"
    spans = equal_spans(text, text, PROTECTED)
    assert [text[slice(*one)] for one, _ in spans] == ["https://b.c/d", "*", "*"]
    masked, words = mask_spans(text, {one: i for i, (one, _) in enumerate(spans, 1)})
    assert masked == 'a ⟦1⟧  "e" f'
    assert [(text[slice(*old)], masked[slice(*new)]) for old, new in words] == [
        ("a", "a"),
        ("“", '"'),
        ("e", "e"),
        ("”", '"'),
        ("f", "f"),
    ]


def test_threads_that_share_a_model_have_weights_of_their_own(model: Translator) -> None:
    """The second thread begins within the call of the first, and ends after it; a third wants no weights."""
    net: Any = model.model
    layers = source_layers(net)
    sources = [torch.tensor([[5, 6, 7, EOS]]), torch.tensor([[9, 8, EOS]])]
    targets = [torch.tensor([[SOS, 5, 6]]), torch.tensor([[SOS, 7, 8, 9, 10]])]

    def read(i: int) -> None:
        with torch.inference_mode():
            net.head_input(sources[i], targets[i])

    def alone(i: int) -> torch.Tensor:
        with hooked_layers(layers) as hooks:
            read(i)
            return mean_weights(hooks)

    expected = [alone(0), alone(1)]
    found: dict[int, torch.Tensor] = {}
    turns = [threading.Event() for _ in range(3)]

    def second() -> None:
        with hooked_layers(layers) as hooks:
            read(1)
            turns[0].set()
            assert turns[1].wait(20)
            found[1] = mean_weights(hooks)

    def third() -> None:
        assert not is_observed(net)
        read(1)
        turns[2].set()

    threads = [threading.Thread(target=work) for work in (second, third)]
    with hooked_layers(layers) as hooks:
        read(0)
        for thread, turn in zip(threads, (turns[0], turns[2]), strict=True):
            thread.start()
            assert turn.wait(20)
        found[0] = mean_weights(hooks)
    turns[1].set()
    for thread in threads:
        thread.join(20)
    for i, weights in enumerate(expected):
        torch.testing.assert_close(found[i], weights)
    assert not any("attend" in layer.__dict__ for layer in layers)


def test_a_forked_process_can_ask_for_weights_whatever_other_threads_did() -> None:
    """Another thread holds the lock when the process is forked."""
    held = threading.Event()

    def hold() -> None:
        with WeightsHook.lock:
            held.set()
            time.sleep(0.3)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(0 if WeightsHook.lock.acquire(timeout=20) else 1)
    other.join(20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not WeightsHook.lock.locked()
