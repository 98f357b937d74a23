"""All stages in order, with an untrained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import card
import check
import pack
import pytest
import score
import synthesise
import torch

from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.parallel_corpus import read_lines
from regard.files import find_damage, sha256
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}
Run = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directions = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))
    tags = ("de", "en", "fr", "zh", "zh-Hant")
    tokenizer = Tokenizer.train(
        ["Number is what Tom told me"], TokenizerConfig(kind="char", vocab_size=60, language_tokens=tags)
    )
    network = make_model(preset("transformer-tiny", source_vocab=len(tokenizer), target_vocab=len(tokenizer), **SIZES))
    decode = DecodeConfig(max_len_a=0.0, max_len_b=4)
    both, profiles = Tokenizers(tokenizer, tokenizer), {lang: {" th": -1.0} for lang in ("en", "de", "fr")}
    own = model_folder.ModelPackage(network, both, "translation", decode, "en", "de", directions, languages=profiles)
    model_folder.save(tmp_path / "model", own, "")
    return tmp_path / "model"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(script: object, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        script.main()  # type: ignore[attr-defined]
        return capsys.readouterr().out

    return run


def test_all_stages(
    data: Path, work: Path, model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesise, "find_fault", lambda *given: "")  # this model says nothing that is right
    monkeypatch.setattr(synthesise, "collect_words", lambda lines: set())
    few = (model, data, work, "--limit", 3, "--device", "cpu", "--back", 0)
    halves = [run(synthesise, *few, "--part", f"{i}/2") for i in (0, 1)]
    assert sum(half.count("'read': 3, 'kept': 3") for half in halves) == len(synthesise.list_jobs())
    assert run(synthesise, *few).count("there already") == len(synthesise.list_jobs())
    assert run(synthesise, *few, "--beam", 2, "--part", "5/23").count("there already") == 0  # other options
    assert json.loads((work / "made-en-de-zh" / "made.json").read_text())["counts"] == {"read": 3, "kept": 3}
    real = list(read_lines(work / "en-de.train.en.xz"))[:3]
    assert list(read_lines(work / "made-en-de-zh" / "train.en.xz")) == real
    assert check.main(data, work) == 0

    out, scores = tmp_path / "en-de-fr-zh", tmp_path / "scores.json"
    assert "MB" in run(pack, model, out)
    assert "Not scored yet" in (out / "README.md").read_text()
    assert "tok:zh" in run(score, out, data, "--beam", 2, "--out", scores, "--device", "cpu")
    weights = sha256(out / "model.safetensors")
    assert "scores" in run(card, out, "--work", work, "--scores", scores, "--flops", "4.2e17", "--minutes", "21")
    text = (out / "README.md").read_text()
    words = " ".join(text.split())
    for said in (
        "4.2e+17 FLOPs, 21 minutes of one H200",
        "CC-BY 2.0 FR",
        "tatoeba.org",
        "manythings.org/anki",
        "Its source states no licence",
        "57 pairs of English that someone wrote (9 from Europarl)",  # three of each of 19 jobs
        "12 pairs of its own English",  # of four
        "| en-zh | 100 | ",
        "Weaknesses",
    ):
        assert said in words
    assert text.count("| en>zh | tatoeba") == 6
    assert set(json.loads((out / "languages.json").read_text())) == {"en", "de", "fr"}
    assert sha256(out / "model.safetensors") == weights
    assert find_damage(out) is None
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}


def test_a_card_wants_scores_of_the_model_it_is_for(tmp_path: Path, model: Path, run: Run) -> None:
    for rows in ([], [{"weights": "of another"}]):
        (tmp_path / "scores.json").write_text(json.dumps(rows))
        with pytest.raises(SystemExit, match="does not hold scores of"):
            run(card, model, "--work", tmp_path, "--scores", tmp_path / "scores.json", "--flops", 1, "--minutes", 1)


def test_a_model_without_a_test_is_not_scored(tmp_path: Path, data: Path, model: Path, run: Run) -> None:
    package = model_folder.load(model, torch.device("cpu"), "fp32")
    model_folder.save(tmp_path / "other", replace(package, directions=(), source="en", target="it"), "")
    with pytest.raises(SystemExit, match="nothing was scored"):
        run(score, tmp_path / "other", data, "--device", "cpu")


def test_the_share_of_what_was_made() -> None:
    """Prepared sets have one pair each, synthetic ones two, and count as often as train_synthetic.toml reads them."""
    everyday = tuple(synthesise.STEMS)
    ones = {f"{name}{kind}.train": 1 for name in (*everyday, "europarl") for kind in ("", ".copies")}
    ones |= {f"{kind}-{name}.train": 1 for name in everyday for kind in ("words", "formal", "titled")}
    twos = {job.name: 2 for job in synthesise.list_jobs()}
    prepared = (
        2 * (2 * (2 + 2 + 4 + 4 + 1) + 4 * 2 + 4) + 4
    )  # both ways: sets and copies, words, formal; titled one way
    own = 2 * (2 * 16 + 3 + 4)  # both ways: everyday English; one way: speeches, and to English
    assert card.get_synthetic_share(ones, twos) == pytest.approx(own / (prepared + own))
