"""A language model taught a few sentences: it continues them, chats, scores, ranks and embeds them."""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import BERT_TEMPLATE, EOS, SETTINGS, SOS

from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.decode.constraints import pad_rows
from regard.errors import RegardError
from regard.inference.embedder import Embedder, similarity
from regard.inference.generator import Generator
from regard.model_folder import ModelPackage
from regard.models.bert import Bert
from regard.models.gpt import GPT
from regard.models.transformer import Transformer
from regard.models.vit import ViT
from regard.text.chat_template import Turn
from regard.text.special_tokens import PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers

LINES = [
    "I was eating an apple.",
    "I was eating a pear with my hands.",
    "I was reading a book.",
    "You were eating soup.",
    "User: Hello\nAssistant: Good day to you.\nUser: Bye\nAssistant: See you soon.",
]
DOCUMENT = SpecialTokenTemplate(before=(SOS,))


@cache
def tokenizers() -> Tokenizers:
    joint = Tokenizer.train(LINES, TokenizerConfig(kind="byte-bpe", vocab_size=300))
    return Tokenizers(joint, joint)


@cache
def taught() -> ModelPackage:
    """The sentences above by heart, more or less; trained by hand, in a second or two."""
    tokenizer = tokenizers().target
    torch.manual_seed(0)
    sizes = {"n_decoder_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "max_len": 96}
    config = ModelConfig(
        preset="gpt-tiny", architecture="gpt", target_vocab=len(tokenizer), dropout=0.0, **SETTINGS, **sizes
    )  # type: ignore[arg-type]
    model = GPT(config)
    rows = pad_rows([[SOS, *tokenizer.encode(line), EOS] for line in LINES], torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        logits = model(rows[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    return ModelPackage(model, tokenizers(), "causal-lm", DecodeConfig(max_new_tokens=60), token_template=DOCUMENT)


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(taught())


# ---- generate and stream ---------------------------------------------------------------------------------------------


def test_it_continues_what_it_knows(generator: Generator) -> None:
    found = generator.generate("You were")
    assert (found.prompt, found.text, found.end, found.ended) == ("You were", " eating soup.", "end", True)
    assert "".join(found.tokens).replace("▁", " ") == found.text
    assert [str(g) for g in generator.generate(["You were eating", "I was reading"])] == [" soup.", " a book."]


def test_an_empty_prompt_begins_a_document(generator: Generator) -> None:
    found = generator.generate("", temperature=1.0, n=8)
    assert found.samples[0].text == found.text
    assert sum(g.text in LINES for g in found.samples) >= 4


def test_a_stop_string_and_all_after_it_is_left_out(generator: Generator) -> None:
    found = generator.generate("You were", stop="ing so")
    assert (found.text, found.end) == (" eat", "stop")
    assert generator.generate("You were", stop=["xyz", "soup", "eat"]).text == " "
    assert generator.generate("You were", stop_strings=["p."]).text == " eating sou"


def test_what_is_cut_off_says_why(generator: Generator) -> None:
    short = generator.generate("You were", max_new_tokens=2)
    assert (short.end, short.ended, len(short.tokens)) == ("length", False, 2)
    long = generator.generate("I was", max_new_tokens=1000, min_len=1000)
    assert (long.end, long.ended) == ("context", False)
    assert len(generator.framed("I was")) + len(long.tokens) == 96


@settings(max_examples=40)
@given(
    prompt=st.text("Iwas etU:é\n", max_size=12),
    stops=st.lists(st.sampled_from(["a", "User:", " e", ".", "é", "ng a"]), max_size=2),
    seed=st.integers(1, 2**40),
    temperature=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_the_streamed_pieces_are_the_text(prompt: str, stops: list[str], seed: int, temperature: float) -> None:
    generator = Generator(taught())
    options: dict[str, Any] = {"stop": stops, "temperature": temperature, "max_new_tokens": 12}
    pieces = list(generator.stream(prompt, seed=seed, **options))
    whole = generator.generate(prompt, seed=seed, **options)
    assert "".join(pieces) == whole.text
    assert "" not in pieces
    assert not any(stop in whole.text for stop in stops)
    assert generator.generate(["I was", prompt, "You"], seed=seed - 1, **options)[1].text == whole.text


def test_words_are_streamed_before_the_end(generator: Generator) -> None:
    pieces = generator.stream("You were")
    first = next(pieces)
    assert " eating soup.".startswith(first)
    assert len(first) < 8
    assert first + "".join(pieces) == " eating soup."


def test_what_cannot_be_written_is_refused_at_once(generator: Generator) -> None:
    long = "I was " * 60
    for call in (generator.generate, generator.stream):
        with pytest.raises(RegardError, match=r"prompt .* tokens, but the model was built for at most 96 .*shorten"):
            call(long)
    with pytest.raises(RegardError, match="one text can be streamed"):
        generator.stream("I", n=2, temperature=1.0)
    with pytest.raises(RegardError, match="at temperature 0 are all the same"):
        generator.generate("I", n=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature': did you mean 'temperature'"):
        generator.generate("I", temprature=1.0)  # type: ignore[call-overload]


def test_other_models_do_not_write() -> None:
    for package in (bert_bundle(), transformer_bundle()):
        with pytest.raises(RegardError, match="writing needs a language model"):
            Generator(package)


# ---- score and rank --------------------------------------------------------------------------------------------------


def log_softmax_rows(model: GPT, ids: list[int]) -> np.ndarray:
    """log p of each token but the first, fp64 from one full forward."""
    logits = model(torch.tensor([ids]))[0, :-1].double().numpy()
    logits -= logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return log_p[np.arange(len(ids) - 1), ids[1:]]


def test_a_score_is_the_sum_of_the_models_log_probabilities(generator: Generator) -> None:
    text = "I was eating soup."
    ids = tokenizers().target.encode(text)
    expected = log_softmax_rows(generator.model, [SOS, *ids])
    score = generator.score(text)
    assert score.log_probs == pytest.approx(expected, abs=1e-4)
    assert len(score.tokens) == len(ids)
    assert score.total == pytest.approx(expected.sum(), abs=1e-3)
    assert score.perplexity == pytest.approx(np.exp(-expected.mean()), rel=1e-4)
    assert score.bits_per_character == pytest.approx(-expected.sum() / np.log(2) / len(text), rel=1e-4)


def test_without_a_start_token_the_first_token_is_given(generator: Generator) -> None:
    bare = Generator(dataclasses.replace(taught(), token_template=SpecialTokenTemplate()))
    ids = tokenizers().target.encode("I was eating")
    score = bare.score("I was eating")
    assert score.log_probs == pytest.approx(log_softmax_rows(bare.model, ids), abs=1e-4)
    assert len(score.tokens) == len(ids) - 1
    with pytest.raises(RegardError, match="no token that begins a text"):
        bare.generate("")
    with pytest.raises(RegardError, match="needs a longer prefix"):
        bare.rank("", ["I was", "You were"])


def test_texts_are_scored_together_as_alone(generator: Generator) -> None:
    together = generator.score(LINES[:4])
    for line, score in zip(LINES, together, strict=False):
        assert score.log_probs == pytest.approx(generator.score(line).log_probs, abs=1e-4)


def test_what_it_was_eating(generator: Generator) -> None:
    ranked = generator.rank("I was eating", [" a book.", " an apple.", " hands."])
    assert ranked[0].text == " an apple."
    assert sum(r.probability for r in ranked) == pytest.approx(1)
    assert [r.log_prob for r in ranked] == sorted((r.log_prob for r in ranked), reverse=True)
    encode = tokenizers().target.encode
    for r in ranked:
        given, whole = [SOS, *encode("I was eating")], [SOS, *encode("I was eating" + r.text)]
        assert whole[: len(given)] == given  # the vocabulary does not join across this border
        expected = log_softmax_rows(generator.model, whole)[len(given) - 1 :]
        assert r.log_prob == pytest.approx(expected.sum(), abs=1e-3)
        assert r.per_token == pytest.approx(expected.mean(), abs=1e-3)
    a, b = ranked[:2]
    assert a.probability / b.probability == pytest.approx(math.exp(a.log_prob - b.log_prob), rel=1e-6)


def test_ranking_holds_where_the_vocabulary_joins_the_border(generator: Generator) -> None:
    """'eat' + 'ing' is one token or two: probabilities compare whole texts, however they are cut."""
    prefix, ends = "I was e", ["ating an apple.", "xyz"]
    encode = tokenizers().target.encode
    assert any(encode(prefix + end)[: len(encode(prefix))] != encode(prefix) for end in ends)
    totals = {end: log_softmax_rows(generator.model, [SOS, *encode(prefix + end)]).sum() for end in ends}
    a, b = generator.rank(prefix, ends)
    assert a.log_prob - b.log_prob == pytest.approx(totals[a.text] - totals[b.text], abs=1e-3)


def test_what_cannot_be_scored_is_named(generator: Generator) -> None:
    with pytest.raises(RegardError, match=r"text 2 \(''\) is too short"):
        generator.score(["I was", ""])
    with pytest.raises(RegardError, match=r"text 1 has \d+ tokens, but the model was built for at most 96"):
        generator.score("I was " * 60)
    with pytest.raises(RegardError, match="a continuation is empty"):
        generator.rank("I was", [" eating", ""])
    with pytest.raises(RegardError, match="nothing to rank"):
        generator.rank("I was", [])


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_has_turns(generator: Generator) -> None:
    conversation = generator.chat()
    assert conversation.say("Hello") == "Good day to you."
    assert "".join(conversation.stream("Bye")) == "See you soon."
    assert conversation.turns == [
        Turn("user", "Hello"),
        Turn("assistant", "Good day to you."),
        Turn("user", "Bye"),
        Turn("assistant", "See you soon."),
    ]
    conversation.reset()
    assert conversation.turns == []


def test_white_space_around_an_answer_is_left_out(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Generator, "stream", lambda generator, prompt, **options: iter([" ", "\n", " a", " ", "\nb", "c ", "\n"])
    )
    conversation = generator.chat()
    assert list(conversation.stream("Hello")) == ["a", " \nb", "c"]
    assert conversation.turns[-1] == Turn("assistant", "a \nbc")


def test_an_answer_that_is_broken_off_is_remembered_as_far_as_it_came(generator: Generator) -> None:
    conversation = generator.chat()
    pieces = conversation.stream("Hello")
    first = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert conversation.turns == [Turn("user", "Hello"), Turn("assistant", first.strip())]


def test_old_turns_are_forgotten_and_the_system_text_is_not(
    generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    conversation = generator.chat("You were eating soup.", max_new_tokens=12, min_len=12)
    read: list[str] = []
    framed = generator.framed
    conversation.generator = Generator(taught())
    conversation.generator.framed = lambda text: (read.append(text), framed(text))[1]  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "regard"):
        for i in range(9):
            conversation.say(f"I was reading {i}")
            assert read[-1].startswith("You were eating soup.\n\nUser: ")
            assert read[-1].endswith(f"I was reading {i}\nAssistant:")
            assert len(framed(read[-1])) <= 96 - 12
    assert "I was reading 0" not in read[-1]
    assert len(caplog.records) == 1
    assert "outgrew the model's 96 tokens" in caplog.text


def test_a_question_too_long_for_the_model_is_refused_and_forgotten(generator: Generator) -> None:
    conversation = generator.chat()
    conversation.say("Hello")
    before = list(conversation.turns)
    with pytest.raises(RegardError, match="shorten it"):
        conversation.say("I was " * 60)
    assert conversation.turns == before


# ---- embed -----------------------------------------------------------------------------------------------------------


@cache
def bert_bundle(pooling: str = "mean") -> ModelPackage:
    torch.manual_seed(1)
    size = len(tokenizers().source)
    config = ModelConfig(preset="bert-tiny", architecture="bert", source_vocab=size, max_len=40, positions="learned")
    return ModelPackage(Bert(config).eval(), tokenizers(), "masked-lm", token_template=BERT_TEMPLATE, pooling=pooling)


@cache
def transformer_bundle() -> ModelPackage:
    torch.manual_seed(1)
    size = len(tokenizers().source)
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 40}
    config = ModelConfig(architecture="transformer", source_vocab=size, target_vocab=size, **SETTINGS, **sizes)  # type: ignore[arg-type]
    return ModelPackage(Transformer(config).eval(), tokenizers(), "translation")


def mean_by_hand(package: ModelPackage, text: str) -> np.ndarray:
    """One text alone, no padding: the mean of its vectors, at length 1."""
    ids, model = tokenizers().source.encode(text), package.model
    with torch.no_grad():
        if isinstance(model, Bert):
            hidden = model.hidden(torch.tensor([[SOS, *ids, EOS]]))
        elif isinstance(model, GPT):
            hidden = model.hidden(torch.tensor([[SOS, *ids]]), torch.arange(len(ids) + 1)[None])
        else:
            hidden = model.encode(torch.tensor([[*ids, EOS]]))[0]  # type: ignore[operator]
    mean = hidden[0].double().mean(0).numpy()
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("make", [bert_bundle, taught, transformer_bundle], ids=["bert", "gpt", "transformer"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 8192])
def test_a_vector_is_the_mean_whatever_the_batch(make: Any, batch_tokens: int) -> None:
    texts = [*LINES[:4], "", "I"]
    vectors = Embedder(make()).embed(texts, batch_tokens=batch_tokens)
    assert vectors.dtype == np.float32
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_allclose(vector, mean_by_hand(make(), text), atol=1e-5)


def test_the_first_token_can_stand_for_the_text() -> None:
    embedder = Embedder(bert_bundle("first"))
    with torch.no_grad():
        hidden = embedder.model.hidden(torch.tensor([[SOS, *tokenizers().source.encode("I was"), EOS]]))  # type: ignore[operator]
    raw = embedder.embed(["I was", LINES[1]], normalize=False)
    np.testing.assert_allclose(raw[0], hidden[0, 0].numpy(), atol=1e-5)
    unit = embedder.embed(["I was"], pooling="mean")
    np.testing.assert_allclose(unit[0], mean_by_hand(bert_bundle(), "I was"), atol=1e-5)


def test_long_texts_are_cut_only_where_asked() -> None:
    embedder = Embedder(bert_bundle())
    long = "I was eating " * 30
    with pytest.raises(RegardError, match=r"text 2 has \d+ tokens, but the model was built for at most 38 .*truncate"):
        embedder.embed(["I", long])
    ids = tokenizers().source.encode(long)[:38]
    with torch.no_grad():
        expected = embedder.model.hidden(torch.tensor([[SOS, *ids, EOS]]))[0].mean(0).numpy()  # type: ignore[operator]
    np.testing.assert_allclose(embedder.embed([long], truncate=True, normalize=False)[0], expected, atol=1e-5)


def test_what_cannot_be_embedded_is_refused() -> None:
    with pytest.raises(RegardError, match="first token has seen nothing but itself"):
        Embedder(taught()).embed(["I"], pooling="first")
    with pytest.raises(RegardError, match="pooling must be one of mean, first, not 'max'"):
        Embedder(taught()).embed(["I"], pooling="max")
    with pytest.raises(RegardError, match="text 1 is empty"):
        Embedder(dataclasses.replace(taught(), token_template=SpecialTokenTemplate())).embed([""])
    vit = ViT(ModelConfig(preset="vit-tiny", architecture="vit", n_classes=2))
    with pytest.raises(RegardError, match="use a transformer, gpt, bert or rnn"):
        Embedder(ModelPackage(vit, None, "image-classification"))


def test_no_texts_make_no_vectors() -> None:
    assert Embedder(bert_bundle()).embed([]).shape == (0, 128)


def test_similarities_are_cosines() -> None:
    a = np.array([[3.0, 4.0], [0.0, 0.0]])
    b = np.array([[4.0, 3.0], [-3.0, -4.0], [8.0, 6.0]])
    np.testing.assert_allclose(similarity(a, b), [[0.96, -1.0, 0.96], [0.0, 0.0, 0.0]])
