"""Unknown words: positional tokens in training data, replacement by attention or position, and names that are learned."""

from __future__ import annotations

import os
import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call

import regard
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.pair_store import prepare_pair_store
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import Filters
from regard.decode import unknown_words
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis
from regard.decode.unknown_words import allow_unknown, attended_word, load_dictionary, replace_unknown
from regard.errors import RegardError
from regard.inference import translator as translator_module
from regard.inference.document_translation import work_identity
from regard.inference.translator import Translator, without_repetitions
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.tasks import prepare_job
from regard.tasks.run import train_config
from regard.tasks.run_config import make_config
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS_TEMPLATE
from regard.text.tokenizer import Tokenizer, Tokenizers

UNK, EOS = DEFAULT_SPECIAL_TOKENS.unk, DEFAULT_SPECIAL_TOKENS.eos
LINES = ["the man sees the dog.", "der Mann sieht den Hund."]
CPU = torch.device("cpu")


def make_tokenizers(window: int = 0, kind: str = "word", **settings: Any) -> Tokenizers:
    config = TokenizerConfig(kind, 100, positional_unknown=window, **settings)
    joint = Tokenizer.train(LINES, config)
    return Tokenizers(joint, joint)


# ---- positional tokens --------------------------------------------------------------------------------------------------


def test_the_vocabulary_has_a_token_for_each_distance() -> None:
    tokenizer = make_tokenizers(2).target
    found = tokenizer.positional_unknown()
    assert list(found.values()) == [-2, -1, 0, 1, 2, None]
    assert [tokenizer.token(id) for id in found] == [*(f"<unk:{d}>" for d in ("-2", "-1", "+0", "+1", "+2", "null"))]
    assert tokenizer.decode(found) == ""
    assert UNK not in found
    assert not set(tokenizer.encode("<unk:+1> dog")) & found.keys()
    assert not make_tokenizers().target.positional_unknown()


def test_unknown_target_words_say_how_far_their_source_words_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are on both sides: Zorbl is at 1 and 0, Krax at 4 and 4, Quuv at 0 and 4, which is farther than two places."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    rows = ["the Zorbl sees the Krax.\tZorbl sieht der den Krax.", "Quuv sees the dog.\tder Hund sieht den Quuv."]
    (tmp_path / "pairs.tsv").write_text("".join(f"{row}\n" for row in rows))
    tokenizers = make_tokenizers(2)
    for direction in ("", "@en>de"):
        if direction:
            tokenizers = make_tokenizers(2, language_tokens=("de",))
        corpus = ParallelCorpus((f"pairs.tsv{direction}",), "en", "de", tmp_path)
        store = prepare_pair_store(corpus, tokenizers, Filters())
        names = [tokenizers.target.pieces(store.target[i]) for i in range(2)]
        assert names[0] == ["<unk:-1>", "▁sieht", "▁der", "▁den", "<unk:+0>", "."]
        assert names[1] == ["▁der", "▁Hund", "▁sieht", "▁den", "<unk:null>", "."]
        assert [id for id in store.source[0] if id == UNK] == [UNK, UNK]


@pytest.mark.parametrize("direction", ["", "@en>de"])
def test_validation_data_are_aligned_by_what_the_training_pairs_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    """Two of four words and their translations in any order; the validation pair, in reverse order, says nothing."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    words, rng = [("eins", "uno"), ("zwei", "due"), ("drei", "tre"), ("vier", "quattro")], random.Random(0)
    chosen = [rng.sample(words, 2) for _ in range(200)]
    rows = [[" ".join(pair[i] for pair in rng.sample(own, 2)) for i in (0, 1)] for own in chosen]
    (tmp_path / "train.tsv").write_text("".join(f"{source}.\t{target}.\n" for source, target in rows))
    (tmp_path / "valid.tsv").write_text("eins zwei drei vier.\tquattro tre due uno.\n")
    values: dict[str, Any] = {
        "data": {"root": str(tmp_path), "train": [f"train.tsv{direction}"], "valid": [f"valid.tsv{direction}"]},
        "tokenizer": {"kind": "word", "vocab_size": 5 + bool(direction) + 8 + 1, "positional_unknown": 3},
        "model": {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16},
        "decode": {"replace_unknown": "copy"},
    }
    job: Any = prepare_job(tmp_path / "run", make_config(values, {}), quiet=True)
    target = job.tokenizers.target
    assert target.pieces(job.valid.target[0]) == ["<unk:-3>", "<unk:-1>", "<unk:+1>", "<unk:+3>", "."]
    again: Any = prepare_job(tmp_path / "run", make_config(values, {}), quiet=True)  # from the cache
    assert again.valid.key == job.valid.key
    corpus = ParallelCorpus((f"valid.tsv{direction}",), "en", "de", tmp_path, "valid")
    alone = prepare_pair_store(corpus, job.tokenizers, Filters(job.config.model.max_len))
    assert alone.key != job.valid.key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "causal-lm", "model": {"preset": "gpt-tiny"}}, "is for translation"),
        ({"tokenizer": {"kind": "bpe", "positional_unknown": 7}}, "kind word or split"),
    ],
)
def test_positional_tokens_are_refused_where_they_make_no_sense(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n" * 5)
    data = {"root": str(tmp_path), "train": ["pairs.tsv"], "valid": ["pairs.tsv"]}
    tokenizer = {"kind": "word", "positional_unknown": 7}
    values = {"data": data, "tokenizer": tokenizer, "model": {"preset": "transformer-tiny"}, **settings}
    with pytest.raises(RegardError, match=message):
        train_config(make_config(values, {}), tmp_path / "run", quiet=True)


# ---- replacement ---------------------------------------------------------------------------------------------------------


class Attentive:
    """Stands in place of a model: attention weights by hand, (T, S) with the end token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *weights: Sequence[Sequence[float]]) -> None:
        self.given = list(weights)
        monkeypatch.setattr(unknown_words, "has_cross_attention", lambda model: True)
        monkeypatch.setattr(unknown_words, "forced_attention", self.forced_attention)

    def forced_attention(self, model: Any, sources: Any, targets: Any, template: Any) -> list[np.ndarray]:
        assert len(sources) == len(targets) == len(self.given)
        return [np.array(each) for each in self.given]


COPY = DecodeConfig(replace_unknown="copy")


def test_an_unknown_word_is_the_source_word_with_the_largest_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end token, with more weight than any word, is none. The target is: der <unk> sieht."""
    tokenizers = make_tokenizers()
    model: Any = Attentive(monkeypatch, [[1, 0, 0, 0], [0.1, 0.3, 0.1, 0.5], [0, 0, 1, 0]])
    source, target = "the dog sees", [*tokenizers.target.encode("der"), UNK, *tokenizers.target.encode("sieht")]
    given = [source, "the man"], [tokenizers.source.encode(t) for t in (source, "the man")], [target, target[:1]]
    found = replace_unknown(model, tokenizers, EOS_TEMPLATE, COPY, *given)
    assert found == ["der dog sieht", "der"]


def test_translations_come_from_the_dictionary_in_any_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "words.tsv"
    file.write_text("# a comment\ndog\tHündchen\nMunich\tMünchen\n")
    assert load_dictionary(str(file)) == {"dog": "Hündchen", "munich": "München"}
    tokenizers, options = make_tokenizers(), replace(COPY, unknown_dictionary=str(file))
    model: Any = Attentive(monkeypatch, [[0.9, 0.1], [0.1, 0.9]])
    ids = tokenizers.source.encode("MUNICH Dog")
    found = replace_unknown(model, tokenizers, EOS_TEMPLATE, options, ["MUNICH Dog"], [ids], [[UNK, UNK]])
    assert found == ["München Hündchen"]
    file.write_text("dog\tHund\nJose\u0301\tJosef\nAndré\tAndreas\n")
    names = "José Andre\u0301"  # accents may be characters of their own in either
    given = [names], [tokenizers.source.encode(names)], [[UNK, UNK]]
    assert replace_unknown(model, tokenizers, EOS_TEMPLATE, options, *given) == ["Josef Andreas"]
    file.write_text("dog\tHund\n")
    os.utime(file, ns=(1, 1))  # a change is noticed
    assert load_dictionary(str(file)) == {"dog": "Hund"}
    before = work_identity("x", None, unknown_dictionary=str(file))
    file.write_text("dog\tDackel\n")
    assert work_identity("x", None, unknown_dictionary=str(file)) != before  # kept results are of the old file


def test_a_dictionary_is_found_from_any_folder_and_a_missing_one_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pairs.tsv").write_text("the dog\tder Hund\n" * 5)
    (tmp_path / "words.tsv").write_text("Zorbl\tZorblisch\n")
    (tmp_path / "elsewhere").mkdir()
    data = {"root": str(tmp_path), "train": ["pairs.tsv"], "valid": ["pairs.tsv"]}
    values: dict[str, Any] = {
        **{"data": data, "tokenizer": {"kind": "word", "positional_unknown": 7}},
        "model": {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16},
        "train": {"steps": 1, "warmup": 0, "device": "cpu", "threads": 1},
        "decode": {"replace_unknown": "copy", "unknown_dictionary": "words.tsv"},
    }
    monkeypatch.chdir(tmp_path)
    run = train_config(make_config(values, {}), tmp_path / "run", quiet=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Translator.load(run, "cpu").translate("the dog").source == "en"
    assert Path(Translator.load(run, "cpu").options.unknown_dictionary) == tmp_path / "words.tsv"
    message = r"^cannot read decode\.unknown_dictionary .*words\.tsv: No such file"
    with pytest.raises(RegardError, match=message):  # before training, whatever the model will write
        train_config(make_config(values, {}), tmp_path / "refused", quiet=True)
    (tmp_path / "words.tsv").unlink()
    with pytest.raises(RegardError, match=message):
        Translator.load(run, "cpu").translate("the dog")


def test_training_warns_where_unknown_words_will_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.tsv").write_text("the dog\tder Hund\n" * 5)
    data = {"root": str(tmp_path), "train": ["pairs.tsv"], "valid": ["pairs.tsv"]}
    model = {"preset": "transformer-tiny", "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16}
    train = {"steps": 1, "warmup": 0, "samples": 0, "device": "cpu", "threads": 1}
    first: dict[str, Any] = {"name": "first", "data": data, "model": model, "train": train}
    first |= {"tokenizer": {"kind": "word", "positional_unknown": 7}, "decode": {"replace_unknown": "copy"}}
    train_config(make_config(first, {}), tmp_path / "first")
    assert "replace_unknown" not in capsys.readouterr().err
    second = {"name": "second", "data": data, "train": {**train, "init_from": str(tmp_path / "first")}}
    train_config(make_config(second, {}), tmp_path / "second")
    assert "warning: the vocabulary has tokens for unknown words (<unk:+1>, ...)" in capsys.readouterr().err
    cards = [next((tmp_path / name).rglob("README.md")).read_text() for name in ("first", "second")]
    pieces = [re.search(r"\| vocabulary \| (.*) \|", card)[1] for card in cards]  # type: ignore[index]
    assert pieces[0].startswith("word, ")  # the second does not know what kind the first had
    assert pieces[1] == f"{pieces[0].removeprefix('word, ')} of {tmp_path / 'first'}"
    train_config(make_config({**second, "tokenizer": {"positional_unknown": 7}}, {}), tmp_path / "third", quiet=True)
    with pytest.raises(
        RegardError, match=r"positional_unknown 2 would do nothing: .* has tokens <unk:-7> to <unk:\+7>"
    ):
        train_config(
            make_config({**second, "tokenizer": {"positional_unknown": 2}}, {}), tmp_path / "fourth", quiet=True
        )
    with pytest.raises(RegardError, match=r"language_tokens would do nothing: .* directions of corpora"):
        train_config(
            make_config({**second, "tokenizer": {"language_tokens": ["fr"]}}, {}), tmp_path / "fifth", quiet=True
        )


def test_spaces_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = make_tokenizers()
    text = "Zorbl-Krax sees"  # four words: Zorbl, -, Krax, sees
    model: Any = Attentive(monkeypatch, np.eye(4)[:3])
    target = [UNK, UNK, UNK]
    ids = tokenizers.source.encode(text)
    assert len(ids) == 4
    assert replace_unknown(model, tokenizers, EOS_TEMPLATE, COPY, [text], [ids], [target]) == ["Zorbl-Krax"]
    split = make_tokenizers(kind="split")
    given = ["Zorbl sees"], [split.source.encode("Zorbl sees")], [[UNK, *split.target.encode("sieht")]]
    model = Attentive(monkeypatch, [[1, 0], [0, 1]])
    assert replace_unknown(model, split, EOS_TEMPLATE, COPY, *given) == ["Zorbl sieht"]


def test_positions_need_no_attention_and_those_outside_of_the_source_are_left_out() -> None:
    tokenizers = make_tokenizers(2)
    ids = {distance: id for id, distance in tokenizers.target.positional_unknown().items()}
    sizes = {"source_vocab": 30, "target_vocab": 30, "d_model": 4, "recurrent.d_hidden": 4}
    model: Any = make_model(preset("sutskever-small", **sizes))
    text = "Zorbl sees Krax ."
    target = [ids[0], ids[-1], ids[2], ids[-2], ids[None], UNK]  # of 0, 2, 0, outside, nothing, nothing
    given = [text], [tokenizers.source.encode(text)], [target]
    assert replace_unknown(model, tokenizers, EOS_TEMPLATE, COPY, *given) == ["Zorbl Krax Zorbl"]


def test_a_translation_that_was_cut_off_at_the_longest_length_is_not_read_to_its_end() -> None:
    """A model of 8 positions writes 8 tokens after the start token, the last of which it never reads."""
    tokenizers = make_tokenizers()
    sizes = {"source_vocab": 30, "target_vocab": 30, "d_model": 8, "max_len": 8, "positions": "sinusoidal"}
    model: Any = make_model(preset("transformer-tiny", **sizes)).eval()
    text = "the Zorbl sees"
    given = [text], [tokenizers.source.encode(text)], [[UNK] * 8]
    (found,) = replace_unknown(model, tokenizers, EOS_TEMPLATE, COPY, *given)
    assert found == " ".join(["Zorbl"] * 8)


def test_marks_that_are_characters_of_their_own_are_copied_with_their_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = make_tokenizers()
    text = unicodedata.normalize("NFD", "José Nguyễ 한국 sees")
    ids = tokenizers.source.encode(text)
    assert ids == tokenizers.source.encode(unicodedata.normalize("NFC", text))
    model: Any = Attentive(monkeypatch, np.eye(4)[:3])
    given = [text], [ids], [[UNK, UNK, UNK]]
    assert replace_unknown(model, tokenizers, EOS_TEMPLATE, COPY, *given) == [text.removesuffix(" sees")]
    assert tokenizers.source.split_words([text])[0][1] == ["José", "Nguyễ", "한국", "sees"]


def test_attended_words_are_unknown_ones_if_there_are_any() -> None:
    known = np.array([True, False, True, True, False])
    assert attended_word(np.array([0.1, 0.2, 0.5, 0.1, 0.1]), np.ones(5, bool)) == 2
    assert attended_word(np.array([0.1, 0.2, 0.5, 0.1, 0.1]), known) == 1
    # Beside the unknown words: 0.9 at 3 is one step from 4 and two from 1.
    assert attended_word(np.array([0.05, 0.0, 0.05, 0.9, 0.0]), known) == 4


# ---- generation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{"beam": 1}, {"beam": 3}, {"beam": 1, "temperature": 1.0}])
def test_the_unknown_token_is_generated_where_it_is_allowed_and_nowhere_else(way: dict[str, Any]) -> None:
    sizes = {"source_vocab": 12, "target_vocab": 12, "d_model": 8, "recurrent.d_hidden": 8, "head_bias": True}
    special = DEFAULT_SPECIAL_TOKENS.model_settings()
    model: Any = make_model(preset("rnnsearch-small", **sizes, **special)).eval()
    with torch.no_grad():
        model.head.bias[UNK] = 30.0  # by far the likeliest
    options = DecodeConfig(max_len_a=0.0, max_len_b=3, **way)
    tokenizers = make_tokenizers()
    allowed = allow_unknown(replace(options, replace_unknown="copy"), model, tokenizers)
    assert allowed.allow_tokens == (UNK,)
    assert allow_unknown(options, model, tokenizers) == options
    for chosen, expected in ((options, False), (allowed, True)):
        (found,) = decode(model, [[5, 6]], chosen, 20, CPU)
        assert (UNK in found[0].tokens) == expected
    assert model.config.suppress_tokens == special["suppress_tokens"]


def test_replacement_is_refused_where_it_cannot_work() -> None:
    sizes = {"source_vocab": 12, "target_vocab": 12, "d_model": 8, "recurrent.d_hidden": 8}
    model: Any = make_model(preset("sutskever-small", **sizes))
    with pytest.raises(RegardError, match="use a model with attention"):
        allow_unknown(COPY, model, make_tokenizers())
    assert allow_unknown(COPY, model, make_tokenizers(7)) == COPY
    with pytest.raises(RegardError, match=r"is for decode\.replace_unknown copy"):
        decode(model, [[5]], DecodeConfig(unknown_dictionary="words.tsv"), 20, CPU)


def test_hypotheses_that_are_one_text_count_once() -> None:
    found = {i: [Hypothesis([n], float(-n), float(-n), True) for n in range(3)] for i in range(2)}
    kept, texts = without_repetitions(found, [["a", "b", "a"], ["c", "c", "c"]])
    assert [[h.tokens for h in own] for own in kept.values()] == [[[0], [1]], [[0]]]
    assert texts == [["a", "b"], ["c"]]
    assert without_repetitions(found, [["a", "b", "a"], ["c", "c", "c"]], {1})[1] == [["a", "b"], ["c", "c", "c"]]


@pytest.mark.parametrize("way", [{"beam": 2}, {"temperature": 1.0}, {"mbr": 3}])
def test_sentences_with_required_words_are_searched_and_have_each_text_once(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the others are decoded, and also with a repetition penalty, which is for them alone."""
    tokenizers = make_tokenizers()
    n = len(tokenizers.target)
    sizes = {"source_vocab": n, "target_vocab": n, "d_model": 4, "recurrent.d_hidden": 4}
    model: Any = make_model(preset("rnnsearch-small", **sizes, **DEFAULT_SPECIAL_TOKENS.model_settings()))
    options = replace(COPY, max_len_a=0.0, max_len_b=4)
    translator = Translator(ModelPackage(model.eval(), tokenizers, "translation", options, source="en", target="de"))
    asked = []

    def search(model: Any, sources: Any, constraints: Any, how: DecodeConfig, *rest: Any) -> list[list[Hypothesis]]:
        asked.append(how)
        return [[Hypothesis([UNK], -1.0, -1.0, True), Hypothesis([UNK], -2.0, -2.0, True)] for _ in sources]

    monkeypatch.setattr(translator_module, "decode_constrained", search)
    if "beam" not in way:
        way = {**way, "repetition_penalty": 1.2}
    given: Any = {"force_words": [[], ["Hund"]], "nbest": 2, **way}
    plain, forced = translator.translate_sentences(["the man", "Zorbl"], **given)
    assert (forced.text, len(forced.nbest)) == ("Zorbl", 0)
    assert (asked[0].repetition_penalty, asked[0].temperature, asked[0].mbr) == (1.0, 0.0, 0)
    assert len(plain.nbest) in (0, 2)


# ---- learning -----------------------------------------------------------------------------------------------------------

SYLLABLES = ["ka", "lo", "mi", "ru", "ten", "sha", "vor", "bel", "qui", "dax", "pim", "zo"]
MODELS: dict[str, dict[str, Any]] = {
    "rnnsearch": {"preset": "rnnsearch-small", "d_model": 48, "recurrent": {"d_hidden": 64}},
    "deep-att": {
        **{"preset": "deep-att-small", "d_model": 48, "recurrent": {"d_hidden": 48}},
        **{"n_encoder_layers": 2, "n_decoder_layers": 2},
    },
    "transformer": {
        **{"preset": "transformer-tiny", "d_model": 64, "d_ff": 128},
        **{"n_encoder_layers": 2, "n_decoder_layers": 2},
    },
}


def draw_pair(rng: random.Random) -> tuple[str, str, list[str]]:
    """Two or three phrases of known nouns and adjectives, which swap places; a noun may be a new name, which stays."""
    source, target, names = [], [], []
    for _ in range(rng.randint(2, 3)):
        adjective, noun = rng.randrange(8), rng.randrange(8)
        if rng.random() < 0.3:
            names.append("".join(rng.choices(SYLLABLES, k=4)).capitalize())
            words = names[-1], names[-1]
        else:
            words = f"n{noun}", f"N{noun}"
        if rng.random() < 0.5:
            source += [f"a{adjective}", words[0]]
            target += [words[1], f"A{adjective}"]
        else:
            source.append(words[0])
            target += ["le", words[1]]
    return " ".join(source), " ".join(target), names


def count_names(found: list[str], tests: list[tuple[str, str, list[str]]]) -> tuple[int, int]:
    """How many names stand where they should, and how many there are."""
    right = n = 0
    for text, (_, reference, names) in zip(found, tests, strict=True):
        words = [*text.split(), *[""] * 20]
        places = [i for i, word in enumerate(reference.split()) if word in names]
        right, n = right + sum(words[i] == reference.split()[i] for i in places), n + len(places)
    return right, n


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("model", ["rnnsearch", "deep-att", "transformer"])
def test_names_that_were_never_seen_are_written_where_they_belong(
    model: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """At least 95 of 100 by replacement, none without."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    rng = random.Random(0)
    rows = [draw_pair(rng) for _ in range(2000)]
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target, _ in rows))
    (tmp_path / "valid.tsv").write_text("".join(f"{source}\t{target}\n" for source, target, _ in rows[:20]))
    steps = 350 if model == "transformer" else 280
    values = {
        "data": {"root": str(tmp_path), "train": ["train.tsv"], "valid": ["valid.tsv"]},
        "tokenizer": {"kind": "word", "vocab_size": 38 + (2 * window + 2) * bool(window), "positional_unknown": window},
        "model": {**MODELS[model], "dropout": 0.0, "max_len": 32},
        "train": {
            **{"steps": steps, "batch_tokens": 1024, "lr": 4e-3, "warmup": 30, "valid_every": steps, "samples": 0},
            **{"save_every": steps, "device": "cpu", "threads": 1},
        },
        "decode": {"replace_unknown": "copy", "beam": 2},
    }
    run = train_config(make_config(values, {}), tmp_path / "run", quiet=True)
    translator: Any = regard.load(run, device="cpu")
    tests = [draw_pair(rng) for _ in range(120)]
    sources = [source for source, _, _ in tests]
    right, n = count_names([each.text for each in translator.translate(sources)], tests)
    assert n > 60
    assert right >= 0.95 * n
    assert count_names([each.text for each in translator.translate(sources, replace_unknown="none")], tests)[0] == 0
    for each in translator.translate(sources[:10], beam=6, nbest=6):
        texts = [hypothesis.text for hypothesis in each.nbest or (each,)]
        assert len(set(texts)) == len(texts)
    (tmp_path / "words.tsv").write_text("Rutenkapim\tTranslated\n")
    options = ("--device", "cpu", "--decode.unknown_dictionary", str(tmp_path / "words.tsv"))
    code, out, _ = call(capfd, monkeypatch, "translate", "--model", str(run), *options, "n1 Rutenkapim")
    assert code == 0
    assert "Translated" in out
