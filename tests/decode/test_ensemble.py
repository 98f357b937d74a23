"""Ensembles: probabilities against means in float64, searches against exhaustive search, and models that do not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from oracle import BANNED, EOS, every_sequence, padded, random_sources, tiny_transformer
from tokens import SETTINGS, SOS

import regard
from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.parallel_corpus import ParallelCorpus
from regard.decode.batch_decoding import decode
from regard.decode.constrained_beam_search import OutputConstraints, Phrase, decode_constrained
from regard.decode.constraints import uses_cuda_graphs, why_not_captured
from regard.errors import RegardError
from regard.evaluate.evaluation import evaluate
from regard.inference.ensemble_loading import join_packages
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.models.ensemble import Ensemble
from regard.models.model import TranslationModel
from regard.serve.batch_runner import BatchRunner, DecodeTask
from regard.text.tokenizer import Tokenizer, Tokenizers

CPU = torch.device("cpu")
VOCAB = 23


def random_model(name: str, seed: int, source: int = VOCAB, target: int = VOCAB) -> Any:
    """Return a model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "source_vocab": source,
        "target_vocab": target,
        "max_len": 64,
        "dropout": 0.0,
        "d_model": 16,
    }
    sizes["tie"] = "none"
    if name.startswith("rnn"):
        sizes |= {"recurrent.d_hidden": 16, "cell": "gru"}
    else:
        sizes |= {"n_heads": 2, "n_encoder_layers": 2, "n_decoder_layers": 2}
        sizes |= {"d_ff": 32} if name.startswith("transformer") else {}
    model: Any = make_model(preset(name, **sizes, **SETTINGS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def mixed() -> Ensemble:
    return Ensemble([random_model(name, 1) for name in ("transformer-base", "rnnsearch-small", "convs2s-small")])


def mean_log_p(ensemble: Ensemble, source: list[int], said: tuple[int, ...], average: str = "mean") -> np.ndarray:
    """Return log p of the next token by whole forward passes of the members, averaged in float64."""
    with torch.no_grad():
        inputs = torch.tensor([[*source, EOS]]), torch.tensor([[SOS, *said]])
        p = np.stack([member(*inputs)[0, -1].double().softmax(-1).numpy() for member in ensemble.members])
    if average == "mean":
        return np.log(p.mean(0))
    geometric = np.exp(np.log(p).mean(0))
    return np.log(geometric / geometric.sum())


@torch.no_grad()
@pytest.mark.parametrize("average", ["mean", "log"])
def test_the_probability_of_a_token_is_the_mean_of_those_of_the_members(average: str) -> None:
    ensemble, source = mixed(), [7, 9, 5, 11]
    state = ensemble.begin(padded([source]))
    state.average = average
    said: tuple[int, ...] = ()
    for token in (SOS, 8, 14, 6):
        said = said if token == SOS else (*said, token)
        found = ensemble.step(torch.tensor([token]), state).double().log_softmax(-1)[0].numpy()
        np.testing.assert_allclose(found, mean_log_p(ensemble, source, said, average), atol=1e-4)


@pytest.mark.parametrize("average", ["mean", "log"])
def test_a_wide_beam_is_exhaustive_search(average: str) -> None:
    """Sequences of at most two tokens of 18 words: 1 + 18 + 18 * 18, all of them ranked."""
    ensemble = mixed()
    sources = [[7, 9, 5], [12]]
    options = DecodeConfig(beam=343, nbest=343, ensemble=average, max_len_a=0.0, max_len_b=2, length_penalty=0.6)
    found = decode(ensemble, sources, options, 64, CPU)
    for source, ranked in zip(sources, found, strict=True):
        memo: dict[tuple[int, ...], np.ndarray] = {}

        def log_p(said: tuple[int, ...], source: list[int] = source, memo: Any = memo) -> np.ndarray:
            if said not in memo:
                memo[said] = mean_log_p(ensemble, source, said, average)
            return memo[said]

        expected = every_sequence(log_p, 2, 0.6)
        assert len(ranked) == len(expected) == 343
        scores = {(*tokens, ended): score for tokens, score, _, ended in expected}
        for h in ranked:
            assert h.score == pytest.approx(scores[(*h.tokens, h.ended)], abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 1},
        {"beam": 4, "nbest": 4},
        {"temperature": 0.8, "nbest": 3},
        {"beam": 4, "coverage_penalty": 0.3, "length_norm": "gnmt"},
        {"beam": 4, "ensemble": "log"},
    ],
)
def test_twice_the_same_model_is_the_model(options: dict[str, Any]) -> None:
    model, sources = tiny_transformer(3), random_sources(0, 9)
    alone = decode(model, sources, DecodeConfig(**{**options, "ensemble": "mean"}), 64, CPU)
    both = decode(Ensemble([model, model]), sources, DecodeConfig(**options), 64, CPU)
    for a, b in zip(alone, both, strict=True):
        assert [h.tokens for h in a] == [h.tokens for h in b]
        np.testing.assert_allclose([h.score for h in a], [h.score for h in b], atol=1e-4)


def test_required_phrases_are_in_the_translation_of_an_ensemble() -> None:
    sources = random_sources(1, 4)
    constraints = [OutputConstraints((Phrase((9, 20)),))] * 4
    found = decode_constrained(mixed(), sources, constraints, DecodeConfig(beam=6), 64, CPU)
    for ranked in found:
        assert (9, 20) in itertools.pairwise(ranked[0].tokens)


@pytest.mark.parametrize("options", [DecodeConfig(beam=3, max_len_b=4), DecodeConfig(beam=1, max_len_b=4)])
def test_a_server_decodes_an_ensemble_by_continuous_batching(options: DecodeConfig) -> None:
    ensemble, sources = Ensemble([tiny_transformer(1), tiny_transformer(2)]).double(), random_sources(2, 7)
    runner, found = BatchRunner(ensemble), {}
    waiting = [DecodeTask(i, (*ids, EOS), options, (SOS,)) for i, ids in enumerate(sources)]
    while waiting or runner.size:
        if waiting:
            runner.add(waiting.pop())
        for event in runner.step():
            assert not event.error
            found[event.number] = event.hypotheses[0].tokens
    expected = decode(ensemble, sources, options, 64, CPU)
    assert [found[i] for i in range(len(sources))] == [ranked[0].tokens for ranked in expected]


def test_decoding_settings_come_from_all_members() -> None:
    short = random_model("transformer-base", 1)
    long = tiny_transformer(1, max_len=32)
    ensemble = Ensemble([short, long])
    assert ensemble.config.max_len == 32
    assert set(BANNED) <= set(ensemble.config.suppress_tokens)
    with pytest.raises(RegardError, match="model 2 has 24 tokens"):
        Ensemble([short, random_model("transformer-base", 1, target=24)])


def test_an_average_of_one_model_is_refused() -> None:
    with pytest.raises(RegardError, match="several models"):
        decode(tiny_transformer(1), [[5]], DecodeConfig(ensemble="log"), 64, CPU)


def test_a_repetition_penalty_which_is_for_logits_is_refused() -> None:
    """The values of an ensemble are log-probabilities, so that twice the same model would not be the model."""
    with pytest.raises(RegardError, match=r"decode\.repetition_penalty divides the logits of one model"):
        decode(mixed(), [[5]], DecodeConfig(beam=1, repetition_penalty=1.2), 64, CPU)


def test_an_ensemble_is_not_captured_and_says_so() -> None:
    assert why_not_captured(mixed(), None) == "an ensemble of 3 models"
    assert why_not_captured(tiny_transformer(1), DecodeConfig(prune=3.0)) == "decode.prune"
    assert not why_not_captured(tiny_transformer(1), DecodeConfig())
    assert not uses_cuda_graphs(mixed())


# --- folders -----------------------------------------------------------------------------------------------------------

LINES = ["ein Haus steht im Garten.", "a house is in the garden.", "der Hund, the dog! 0123456789"] * 3


def package(
    name: str, seed: int, source_kind: str = "byte-bpe", lines: list[str] = LINES, directions: tuple[str, ...] = ()
) -> ModelPackage:
    """Return an untrained translator with a vocabulary for each side."""
    tokens = tuple(direction.split(">")[1] for direction in directions)
    target = Tokenizer.train(lines, TokenizerConfig(kind="char", vocab_size=280))
    source = Tokenizer.train(LINES, TokenizerConfig(kind=source_kind, vocab_size=290, language_tokens=tokens))
    model = random_model(name, seed, len(source), len(target))
    options = DecodeConfig(beam=2, max_len_a=1.0, max_len_b=5)
    return ModelPackage(model, Tokenizers(source, target), "translation", options, "en", "de", directions)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a Transformer and an RNNsearch with one vocabulary, and a Transformer that reads characters."""
    place = tmp_path_factory.mktemp("ensemble")
    made = [package("transformer-base", 1), package("rnnsearch-small", 2), package("transformer-base", 3, "char")]
    for i, one in enumerate(made):
        model_folder.save(place / str(i), one, "card")
    return [place / str(i) for i in range(len(made))]


def test_members_read_the_text_in_their_own_tokens(folders: list[Path]) -> None:
    """The third model, alone with its own vocabulary, gives what it contributes to the ensemble."""
    packages = [model_folder.load(folder, CPU) for folder in folders]
    joined = join_packages(packages, ["a", "b", "c"])
    ensemble: Any = joined.model
    assert [reader is None for reader in ensemble.readers] == [True, True, False]
    assert len(ensemble.same_source) == 2
    text = "a house is in the garden."
    tokenizers: Any = [each.tokenizers for each in packages]
    first = torch.tensor([joined.token_template.wrap(tokenizers[0].source.encode(text))])
    own = torch.tensor([packages[2].token_template.wrap(tokenizers[2].source.encode(text))])
    assert torch.equal(ensemble.sources(first)[2], own)
    target = torch.tensor([[SOS, 9, 12]])
    with torch.no_grad():
        p = [
            model(source, target).double().softmax(-1)
            for model, source in zip(ensemble.members, (first, first, own), strict=True)
        ]
        found = ensemble(first, target).double().exp()
    torch.testing.assert_close(found, sum(p) / 3, atol=1e-6, rtol=1e-5)


LONG = "a house is in the garden. " * 4  # few tokens for the first model, and more characters than the other reads


def test_a_sentence_that_one_member_cannot_read_is_refused_by_its_number(folders: list[Path], tmp_path: Path) -> None:
    translator = Translator.load([folders[0], folders[2]], "cpu")
    most = translator.model.config.max_len  # type: ignore[union-attr]
    assert len(translator.tokenizers.source.encode(LONG)) + 1 <= most < len(LONG)
    message = rf"sentence 3 has 1\d\d tokens in the vocabulary of another member .* at most {most} \(model\.max_len\)"
    for options in ({}, {"force_words": [["Haus"], [], []]}, {"force_words": [[], [], ["Haus"]]}):
        with pytest.raises(RegardError, match=message):
            translator.translate_sentences(["a house", "the dog", LONG], **options)  # type: ignore[arg-type]
    (tmp_path / "test.tsv").write_text(f"a house\tein Haus\nthe dog\tder Hund\n{LONG}\tein Haus\n")
    corpus = ParallelCorpus(("test.tsv",), "en", "de", tmp_path, "test")
    with pytest.raises(RegardError, match=message):
        evaluate(translator, corpus)
    assert evaluate(Translator.load([folders[0], folders[1]], "cpu"), corpus).scored == 3


def test_texts_are_split_so_that_every_member_can_read_the_sentences() -> None:
    both = [
        package("transformer-base", i, kind, directions=("en>de", "de>en"))
        for i, kind in enumerate(("byte-bpe", "char"))
    ]
    alone, ensemble = Translator(both[0]), Translator(join_packages(both, ["a", "b"]))
    text = LONG.replace(".", "").strip()  # one sentence
    assert alone.fits(text)
    assert not ensemble.fits(text)
    assert ensemble.fits("a house is in the garden.")
    assert ensemble.translate(["a house.", text], to="de", source="en")[1].target == "de"


def test_an_ensemble_translates_aligns_and_streams(folders: list[Path]) -> None:
    translator = regard.load([str(folder) for folder in folders], device="cpu")
    assert isinstance(translator, Translator)
    assert isinstance(translator.model, TranslationModel)
    texts = ["a house", "the dog, the garden.", ""]
    found = translator.translate(texts, nbest=2, alignment=True)
    assert [each.text for each in found] == [
        translator.translate(text).text if text else "" for text in texts
    ]  # whatever the batch
    assert all(len(each.nbest) == 2 for each in found[:2])
    assert all(0 < each.confidence <= 1 for each in found[:2])
    words = translator.translate_sentences(["a house"], force_words=[["Garten"]])
    assert "Garten" in words[0].text
    quantized = Translator.load(folders, "cpu", "int8")
    assert len(quantized.translate(texts)) == 3


def test_ensembles_on_the_command_line(folders: list[Path], tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    both = ["-m", str(folders[0]), "-m", str(folders[1]), "--device", "cpu"]
    code, one, _ = call(capfd, monkeypatch, "translate", "a house", *both)
    assert code == 0
    assert one == Translator.load(folders[:2], "cpu").translate("a house").text + "\n"
    text, target = tmp_path / "in.txt", tmp_path / "out.txt"
    text.write_text("a house\nthe dog\n")
    assert call(capfd, monkeypatch, "translate", *both, "-i", str(text), "-o", str(target))[0] == 0
    assert target.read_text().startswith(one)
    pairs, output = tmp_path / "test.tsv", tmp_path / "hypotheses"
    pairs.write_text("a house\tein Haus\nthe dog\tder Hund\n")
    words = ["evaluate", *map(str, folders[:2]), "--data", str(pairs), "-o", str(output), "--device", "cpu"]
    code, scores, error = call(capfd, monkeypatch, *words)
    assert code == 0, error
    assert "perplexity" in scores
    assert output.read_text().startswith(one)


def test_models_that_do_not_fit_are_refused_by_name() -> None:
    first = package("transformer-base", 1)
    with pytest.raises(RegardError, match=r"A and B have .* pieces only in A .*tokenizer.file"):
        join_packages([first, package("transformer-base", 1, lines=["ein Haus."] * 4)], ["A", "B"])
    with pytest.raises(RegardError, match="pieces only in B"):
        join_packages([first, package("transformer-base", 1, lines=[*LINES, "+"])], ["A", "B"])
    other = ModelPackage(first.model, first.tokenizers, "translation", source="de", target="en")
    with pytest.raises(RegardError, match="A has en>de, B de>en"):
        join_packages([first, other], ["A", "B"])
    nameless = ModelPackage(first.model, None, "translation", source="en", target="de")
    with pytest.raises(RegardError, match="B is none"):
        join_packages([first, nameless], ["A", "B"])
    with pytest.raises(RegardError, match="no model given"):
        Translator.load([])
    with pytest.raises(TypeError, match="load takes a path"):
        regard.load([1, 2])  # type: ignore[list-item]
