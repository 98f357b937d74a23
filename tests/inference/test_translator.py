"""Text in, translations out; and the whole way from a file of pairs to a model that has learned them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import regard
from regard import model_folder
from regard.config import DecodeConfig
from regard.errors import RegardError
from regard.inference.arguments import decode_config
from regard.inference.translator import Translation, Translator, translate

RECIPE = """
[data]
train = ["train.tsv"]
valid = ["valid.tsv"]
[tokenizer]
kind = "char"
vocab_size = 40
[model]
n_encoder_layers = 1
n_decoder_layers = 1
d_model = 64
n_heads = 4
d_ff = 128
max_len = 16
dropout = 0.0
[train]
steps = 250
batch_tokens = 512
lr = 5e-3
warmup = 50
schedule = "cosine"
label_smoothing = 0.0
log_every = 100
valid_every = 125
save_every = 125
samples = 1
threads = 1
device = "cpu"
[decode]
beam = 2
max_len_b = 4
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A recipe to reverse words of 3 to 5 letters, and words it is never shown."""
    folder = tmp_path_factory.mktemp("reverse")
    words = ["".join(w) for k in (3, 4, 5) for w in itertools.product("abcde", repeat=k)]
    random.Random(1).shuffle(words)
    train, valid, test = words[:2500], words[2500:2550], words[2550:2750]
    for name, part in (("train", train), ("valid", valid)):
        (folder / f"{name}.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in part))
    (folder / "reverse.toml").write_text(RECIPE)
    return folder, test


@pytest.fixture(scope="module")
def run(task: tuple[Path, list[str]]) -> Path:
    recipe, _ = task
    return regard.train(recipe / "reverse.toml", run=recipe / "run", quiet=True, data={"root": str(recipe)})


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return Translator.load(run, "cpu")


def test_a_tiny_transformer_learns_to_reverse(translator: Translator, task: tuple[Path, list[str]]) -> None:
    _, words = task
    right = sum(t.text == word[::-1] for word, t in zip(words, translator.translate(words), strict=True))
    assert right / len(words) >= 0.95


def test_a_finished_run_says_what_comes_next(
    run: Path, task: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model" / "manifest.json").unlink()  # a model that is not whole is written again
    regard.resume(run)
    said = capsys.readouterr().err
    assert f"regard translate --model {run}" in said
    assert "bleu" in said
    assert "CPU, 1 threads, fp32" in said
    assert "2,500 training pairs" in said
    card = (run / "model" / "README.md").read_text()
    assert "language: [en, de]" in card
    assert f"{sum(p.numel() for p in Translator.load(run, 'cpu').model.parameters()):,}" in card


# ---- what translate takes and gives ------------------------------------------------------------------------------


def test_one_or_many(translator: Translator) -> None:
    one = translator.translate("abcd")
    assert isinstance(one, Translation)
    assert str(one) == one.text == "dcba"
    assert one.ended
    many = translator.translate(["abcd", "ade"])
    assert [t.text for t in many] == ["dcba", "eda"]
    assert many[0].log_prob == pytest.approx(one.log_prob, abs=1e-4)
    assert translator.translate([]) == []
    assert translator.translate(("ade",))[0].text == "eda"


def test_scores_are_log_probabilities(translator: Translator) -> None:
    t = translator.translate("abcde", length_penalty=0.5)
    assert -0.7 < t.log_prob < 0
    assert t.score == pytest.approx(t.log_prob / math.sqrt(len(t.tokens) + 1))


def test_empty_lines_have_empty_translations(translator: Translator) -> None:
    texts = ["", "abc", "  ", "\t", "bca", ""]
    translations = translator.translate(texts)
    assert [t.text for t in translations] == ["", "cba", "", "", "acb", ""]
    assert translations[0] == Translation("", 0.0, 0.0, (), source="en", target="de")
    assert translator.translate("").text == ""


def test_empty_lines_change_nothing_about_the_others(translator: Translator) -> None:
    """Sentence i of the input draws with seed + i, blank lines or not."""
    texts = ["", "abcde", "", "edcab"]
    with_blanks = translator.translate(texts, temperature=2.0, seed=3)
    for i in (1, 3):
        alone = translator.translate(texts[i], temperature=2.0, seed=3 + i)
        assert with_blanks[i].tokens == alone.tokens
        assert with_blanks[i].log_prob == pytest.approx(alone.log_prob, abs=1e-4)


def test_nbest(translator: Translator) -> None:
    best = translator.translate("abcd", beam=4, nbest=3)
    assert len(best.nbest) == 3
    assert best.nbest[0].text == best.text
    assert len({t.text for t in best.nbest}) == 3
    assert [t.score for t in best.nbest] == sorted((t.score for t in best.nbest), reverse=True)
    assert translator.translate("abcd").nbest == ()
    with pytest.raises(RegardError, match=r"nbest 5 is more than decode\.beam 4"):
        translator.translate("abcd", beam=4, nbest=5)


def test_options(translator: Translator) -> None:
    assert translator.options.beam == 2  # the recipe's
    assert decode_config(translator.options, {"beam": 7, "seed": None}) == DecodeConfig(beam=7, max_len_b=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beem': did you mean 'beam'"):
        translator.translate("abcd", beem=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"beam must be a whole number, not 'wide' \(str\)"):
        translator.translate("abcd", beam="wide")  # type: ignore[call-overload]
    with pytest.raises(RegardError, match=r"decode\.length_penalty"):
        translator.translate("abcd", length_penalty=float("nan"))


def test_progress_counts_every_line(translator: Translator) -> None:
    counted: list[int] = []
    translator.translate(["abc", "", "abcd"], progress=counted.append)
    assert sum(counted) == 3


@pytest.mark.parametrize("blank_lines", [0, 3])
def test_too_long_is_refused_and_named(translator: Translator, blank_lines: int) -> None:
    """16 positions: 15 tokens (the mark of the beginning is one) and the end."""
    assert translator.translate("a" * 14).text
    with pytest.raises(RegardError, match=rf"sentence {blank_lines + 2} has 16 tokens, .* at most 15"):
        translator.translate(["abc", *[""] * blank_lines, "a" * 15])


def test_cut_off_translations_say_so(translator: Translator) -> None:
    cut = translator.translate("abcde", max_len_a=0.0, max_len_b=2)
    assert not cut.ended
    assert len(cut.tokens) == 2


@pytest.mark.parametrize(
    "load_it", [Translator.load, regard.load, lambda path, device: Translator.load(str(path), device)]
)
def test_load_takes_runs_and_model_folders(run: Path, load_it: Callable[..., Translator]) -> None:
    for path in (run, run / "model"):
        assert load_it(path, "cpu").translate("abc").text == "cba"


def test_translate_in_one_call(run: Path) -> None:
    assert translate("abc", model=run, device="cpu").text == "cba"
    assert [t.text for t in regard.translate(["abc", "bcd"], model=run, device="cpu")] == ["cba", "dcb"]
    with pytest.raises(TypeError, match="a string or a list of strings, but item 1 is a int"):
        translate(["abc", 3], model=run)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a string or a list of strings, not int"):
        translate(5, model=run)  # type: ignore[call-overload]


def test_unknown_device(run: Path) -> None:
    with pytest.raises(RegardError, match="unknown device 'abacus'"):
        Translator.load(run, "abacus")


def test_saving_again_translates_the_same(translator: Translator, tmp_path: Path) -> None:
    languages = (translator.source, translator.target)
    package = model_folder.ModelPackage(
        translator.model, translator.tokenizers, "translation", translator.options, *languages
    )
    model_folder.save(tmp_path / "copy", package, "")
    words = ["abc", "edcba", "aabb"]
    again = Translator.load(tmp_path / "copy", "cpu").translate(words, beam=4, nbest=2)
    assert again == translator.translate(words, beam=4, nbest=2)
