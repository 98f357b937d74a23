"""All stages in order, with an untrained model, and the model card at the end."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import card
import check
import judge
import pack
import prepare
import pytest
import score
import shrink
import synthesise
import torch

from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.parallel_corpus import read_lines
from regard.files import find_damage, sha256
from regard.models.architectures import make_model, preset
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 3, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}
FORMS = tuple(f"{lang}-{form}" for lang in ("de", "fr") for form in ("formal", "familiar"))
Run = Callable[..., str]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    plain = tuple(d for lang in prepare.LANGUAGES for d in (f"en>{lang}", f"{lang}>en"))
    tags = ("en", *prepare.LANGUAGES, *FORMS)
    tokenizer = Tokenizer.train(
        ["Number is what Tom told me"], TokenizerConfig(kind="char", vocab_size=60, language_tokens=tags)
    )
    network = make_model(preset("transformer-tiny", source_vocab=len(tokenizer), target_vocab=len(tokenizer), **SIZES))
    own = model_folder.ModelPackage(
        model=network,
        tokenizers=Tokenizers(tokenizer, tokenizer),
        task="translation",
        decode=DecodeConfig(max_len_a=0.0, max_len_b=4),
        source="en",
        target="de",
        directions=(*plain, *(f"en>{form}" for form in FORMS)),
        languages={lang: {" th": -1.0} for lang in ("en", "de", "fr")},
    )
    model_folder.save(tmp_path / "teacher", own, "")
    return tmp_path / "teacher"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(script: object, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
        script.main()  # type: ignore[attr-defined]
        return capsys.readouterr().out

    return run


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the name of a model whose hundred sentences are judged with 4 points, but for the first with 2."""
    entries = [
        f'[[judgement]]\nmodel = "new"\nid = "{key}"\noutput = ""\npoints = {4 if i else 2}\n'
        for i, key in enumerate(judge.read_sentences())
    ]
    (tmp_path / "judgements.toml").write_text("\n".join(entries))
    monkeypatch.setattr(judge, "JUDGEMENTS", tmp_path / "judgements.toml")
    return "new"


def test_all_stages(
    data: Path, work: Path, teacher: Path, judged: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesise, "find_fault", lambda *given: "")  # this model makes nothing that is right
    few = (teacher, data, work, "--scale", 5e-5, "--device", "cpu")
    jobs = synthesise.list_jobs()
    halves = [run(synthesise, *few, "--part", f"{i}/2") for i in (0, 1)]
    assert sum(half.count("'read': ") for half in halves) == len(jobs)
    assert run(synthesise, *few).count("there already") == len(jobs)
    assert run(synthesise, *few, "--beam", 2, "--part", "13/14").count("there already") == 0  # other options
    made = {job.name: json.loads((work / job.name / "made.json").read_text())["counts"] for job in jobs}
    assert all(counts["read"] == counts["kept"] > 0 for counts in made.values())
    assert made["made-fr-en"]["read"] == 3 + 4 + 3 + 4  # 60,000, 90,000, 60,000 and 70,000 times the scale
    assert set(read_lines(work / "made-fr-en" / "train.fr.xz")) <= {
        line for path in work.glob("*-en-fr.train.fr.xz") for line in read_lines(path)
    }
    assert check.main(data, work) == 0

    assert "parameters" in run(shrink, teacher, tmp_path / "student", "--layers", "0,2")
    out = tmp_path / "en-de-fr-zh"
    assert "MB" in run(pack, tmp_path / "student", out)
    assert "Not scored yet" in (out / "README.md").read_text()
    files = [tmp_path / f"{name}.json" for name in ("tests", "valid", "teacher")]
    options = ("--beams", "2", "--device", "cpu", "--out")
    assert "tok:zh" in run(score, out, data, "--sets", "ntrex,tatoeba", "--weights", "int8", *options, files[0])
    run(score, out, data, "--sets", "valid", "--lines", 2, "--weights", "int8", *options, files[1])
    run(score, teacher, data, "--sets", "ntrex", *options, files[2])

    weights = sha256(out / "model.safetensors")
    given = ("--work", work, "--teacher", teacher, "--judged", judged, "--flops", "4.2e17", "--minutes", "21")
    assert "README.md" in run(card, out, *given, "--scores", *files)
    text = (out / "README.md").read_text()
    check_card(text, made)
    rows = {tuple(cells[:2]): cells[2:] for cells in map(split_row, text.splitlines()) if len(cells) == 6}
    assert rows["direction", "test"] == ["sentences", "int8, beam 2", "teacher, fp32, beam 2", "OPUS-MT"]
    assert rows["en>zh-Hant", "ntrex"][0] == "3"
    assert all(rows["de>en", "ntrex"][1:3])  # the student and the teacher
    assert rows["en>fr", "tatoeba"][0] == "5"
    assert rows["en>fr", "tatoeba"][2:] == ["", "53.1 / 69.5"]
    assert rows["en>de", "europarl val"][0] == "2"
    assert set(json.loads((out / "languages.json").read_text())) == {"en", "de", "fr"}
    assert sha256(out / "model.safetensors") == weights
    assert find_damage(out) is None
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def check_card(text: str, made: dict[str, dict[str, int]]) -> None:
    words = " ".join(text.split())
    to_english = sum(counts["kept"] for name, counts in made.items() if name.endswith("-en"))
    everything = sum(counts["kept"] for counts in made.values())
    for said in (
        "language: [en, de, fr, zh, zh-Hant]",
        "license: cc-by-sa-4.0",
        "The target languages de-formal, de-familiar, fr-formal, fr-familiar ask for a form of address.",
        "1 encoder and 2 decoder layers of width 16",
        "1 encoder and 3 decoder layers of width 16",
        "4.2e+17 FLOPs, 21 minutes of one H200",
        f"translates {everything:,} sentences: {everything - to_english:,} from English",
        f"and {to_english:,} to English",
        "| everyday sentences (Tatoeba) | 200 | 200 | 100 | 100 |",
        "| speeches (European Parliament) | 130 | 30 | | |",
        "2 English sentences of an encyclopedia",
        "| **new** (this one) | 3.98 | 1 |",  # (99 * 4 + 2) / 100
        "## Weaknesses - News",
    ):
        assert said in words


# ---- the card --------------------------------------------------------------------------------------------------------


def write_scores(path: Path, *rows: dict[str, Any]) -> Path:
    common = {"direction": "en>de", "test": "ntrex", "sentences": 3, "beam": 4, "precision": "int8"}
    common |= {"bleu": 1.0, "chrf": 2.0, "bleu_signature": "b", "chrf_signature": "c"}
    path.write_text(json.dumps([common | row for row in rows]))
    return path


@pytest.fixture
def two_models(tmp_path: Path) -> dict[str, Path]:
    """Return folders of two models with different weights, by the checksums of these."""
    folders = [tmp_path / name for name in ("own", "larger")]
    for folder in folders:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(folder.name)
    return {sha256(folder / "model.safetensors"): folder for folder in folders}


def test_a_card_wants_scores_of_the_model_and_of_no_others(tmp_path: Path, two_models: dict[str, Path]) -> None:
    own, larger = two_models

    def describe(*weights: str) -> str:
        scores = write_scores(tmp_path / "scores.json", *({"weights": each} for each in weights))
        return card.describe_scores([scores], *two_models.values())["scores"]

    assert "| en>de | ntrex | 3 | 1.0 / 2.0 | 1.0 / 2.0 |  |" in describe(own, larger)
    with pytest.raises(SystemExit, match="scores of other weights"):
        describe(own, "of a third one")
    with pytest.raises(SystemExit, match="no scores of"):
        describe(larger)


def test_scores_of_fewer_lines_have_a_row_of_their_own(tmp_path: Path, two_models: dict[str, Path]) -> None:
    rows = [{"weights": next(iter(two_models)), "beam": beam, "sentences": n} for beam, n in ((1, 9), (4, 9), (1, 2))]
    found = card.describe_scores([write_scores(tmp_path / "s.json", *rows)], *two_models.values())["scores"]
    assert [split_row(line)[2:5] for line in found.splitlines()[2:]] == [
        ["9", "1.0 / 2.0", "1.0 / 2.0"],
        ["2", "1.0 / 2.0", ""],
    ]


def test_a_card_wants_all_sentences_judged(judged: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert card.format_judgements(judged) == "| **new** (this one) | 3.98 | 1 |"
    with pytest.raises(SystemExit, match="has no model 'newer'; it has new"):
        card.format_judgements("newer")
    text = judge.JUDGEMENTS.read_text().replace('model = "new"', 'model = "newer"')
    judge.JUDGEMENTS.write_text(judge.JUDGEMENTS.read_text() + text.replace("points = 4\n", ""))
    assert card.format_judgements(judged) == "| **new** (this one) | 3.98 | 1 |"  # unfinished ones are left out
    with pytest.raises(SystemExit, match="99 sentences of newer are not judged"):
        card.format_judgements("newer")


@pytest.mark.parametrize(
    ("spec", "name", "kind", "language"),
    [
        ("tatoeba-en-de.train.{lang}.xz@de>en", "tatoeba-en-de.train", "tatoeba", "de"),
        ("docs-en-zh-Hant.train.{lang}.xz@en>zh-Hant", "docs-en-zh-Hant.train", "docs", "zh-Hant"),
        ("formality-en-fr.train.en-formal.xz|b.xz@en>fr-formal", "formality-en-fr-formal.train", "formality", "fr"),
        ("made-en-zh-1/train.{lang}.xz@en>zh", "made-en-zh-1", "distillation", "zh"),
        ("made-en-zh-1/train.{lang}.xz@zh>en", "made-en-zh-1", "back-translation", "zh"),
        ("made-zh-Hant-en/train.{lang}.xz@zh-Hant>en", "made-zh-Hant-en", "distillation", "zh-Hant"),
        ("made-zh-Hant-en/train.{lang}.xz@en>zh-Hant", "made-zh-Hant-en", "back-translation", "zh-Hant"),
    ],
)
def test_sets_by_name_kind_and_language(spec: str, name: str, kind: str, language: str) -> None:
    assert card.classify_corpus(spec) == (name, kind, language)


def test_the_share_of_the_teachers_translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = [
        {"corpus": "docs-en-de.train.{lang}.xz@en<>de", "weight": 0.5},
        "made-en-de-0/train.{lang}.xz@en>de",
        {"corpus": "made-en-de-0/train.{lang}.xz@de>en", "weight": 2},
    ]
    monkeypatch.setattr(card.recipes, "load", lambda path: {"data": {"train": train}})
    report = {"docs-en-de.train": {"kept": 40}, "encyclopedia.train": {"kept": 3}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit, match=r"has no made-en-de-0, which student\.toml reads"):
        card.describe_data(tmp_path, with_teacher=True)
    (tmp_path / "made-en-de-0").mkdir()
    (tmp_path / "made-en-de-0" / "made.json").write_text(json.dumps({"counts": {"read": 11, "kept": 10}}))
    found = card.describe_data(tmp_path, with_teacher=True)
    # 40 / 2 in both directions, 10 once one way and twice the other
    assert "43% of the pairs" in found["trained"]  # 30 of 70
    assert "| software documentation | 40 |  |  |  | 57% |" in found["sets"]
    assert "translates 10 sentences:\n10 from English" in found["trained"]
    monkeypatch.setattr(card.recipes, "load", lambda path: {"data": {"train": train[:1]}})
    alone = card.describe_data(tmp_path, with_teacher=False)
    assert "no teacher" in alone["trained"]
    assert alone["recipe"] == "teacher.toml"


def test_every_source_has_a_license_and_an_attribution() -> None:
    sources = tomllib.loads((card.HERE / "sources.toml").read_text(encoding="utf-8"))["source"]
    assert len({source["name"] for source in sources}) == len(sources) == 41
    assert set(prepare.PROSE) < {source["name"] for source in sources}
    for source in sources:
        assert source["license"]
        assert source["attribution"]
        named = any(mark in source["license"] for mark in ("-SA", "GPL", "MPL", "GFDL", "of each package"))
        assert source["copyleft"] == named, source["name"]
    found = card.describe_sources()
    assert found["sources"].count("\n") + 1 == len(sources)
    assert "| GIMP user manual, SA | 8,140 | 10,373 | 1,518 | GFDL 1.2+ | GIMP Documentation Team |" in found["sources"]
    assert 0 < found["copyleft"] < 1


def test_a_model_without_a_test_is_not_scored(tmp_path: Path, data: Path, teacher: Path, run: Run) -> None:
    package = model_folder.load(teacher, torch.device("cpu"), "fp32")
    model_folder.save(tmp_path / "other", replace(package, directions=(), source="en", target="it"), "")
    with pytest.raises(SystemExit, match="nothing was scored"):
        run(score, tmp_path / "other", data, "--device", "cpu")
