"""Validation data that is held out of the training data where a recipe names none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import regard
from regard.data.held_out import MOST_EXAMPLES, hold_out
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.text_corpus import TextCorpus
from regard.errors import RegardError

SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 64}
TRAIN = {"steps": 2, "batch_tokens": 256, "samples": 0, "device": "cpu", "log_every": 1}


# ---- the choice ------------------------------------------------------------------------------------------------------


@given(st.sets(st.text(max_size=8), min_size=2, max_size=60), st.floats(0.01, 0.9), st.integers(0, 2**62))
def test_a_share_is_held_out_and_something_is_left(texts: set[str], share: float, seed: int) -> None:
    held = hold_out(texts, share, seed)
    chosen = {text for text in texts if held.holds(text)}
    assert len(chosen) == held.count == min(max(1, round(share * len(texts))), len(texts) - 1)
    assert hold_out(sorted(texts, reverse=True), share, seed) == held  # whatever the order


def test_the_seed_decides_and_there_is_a_limit() -> None:
    texts = [str(i) for i in range(100_000)]
    one, two = hold_out(texts, 0.05, 1), hold_out(texts, 0.05, 2)
    chosen = [{text for text in texts if held.holds(text)} for held in (one, two)]
    assert [len(part) for part in chosen] == [MOST_EXAMPLES] * 2
    assert len(chosen[0] & chosen[1]) < 4 * MOST_EXAMPLES**2 / len(texts)  # 40 are expected by chance


def test_copies_are_on_one_side() -> None:
    texts = ["a"] * 50 + ["b"] * 50 + ["c"]
    held = hold_out(texts, 0.5, 0)
    assert {text: held.holds(text) for text in "abc"} in [
        dict(zip("abc", kept, strict=True)) for kept in np.ndindex(2, 2, 2) if 0 < sum(kept) < 3
    ]
    with pytest.raises(RegardError, match="nothing can be held out of 100 training examples"):
        hold_out(["a"] * 100, 0.5, 0)


@given(st.integers(0, 2**62))
def test_an_example_with_many_copies_stays_in_the_training_data(seed: int) -> None:
    texts = ["Yes."] * 900 + [f"text {i}" for i in range(100)]
    held = hold_out(texts, 0.05, seed)
    assert (held.count, held.holds("Yes.")) == (50, False)


def test_where_all_have_many_copies_the_fewest_are_held_out() -> None:
    held = hold_out(["a"] * 90 + ["b"] * 40 + ["c"] * 60, 0.05, 0)
    assert (held.count, held.holds("b")) == (40, True)


# ---- corpora ---------------------------------------------------------------------------------------------------------


def write_pairs(folder: Path, n: int = 200) -> None:
    (folder / "x.en").write_text("".join(f"sentence {i % 150}\n" for i in range(n)))
    (folder / "x.de").write_text("".join(f"Satz {i}\n" for i in range(n)))


def test_pairs_of_a_sentence_and_both_directions_are_on_one_side(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    whole = ParallelCorpus(("x.{lang}@en>fr", "x.{lang}@fr>en"), "en", "fr", tmp_path)
    (tmp_path / "x.fr").write_text((tmp_path / "x.de").read_text())
    train, valid = whole.hold_out(0.1, 0)
    kept, held = list(train.directed_rows()), list(valid.directed_rows())
    assert sorted(kept + held) == sorted(whole.directed_rows())
    english = [{row[1] if row[0] == "en>fr" else row[2] for row in rows} for rows in (kept, held)]
    assert not english[0] & english[1]
    assert len(held) in (38, 40)  # 400 rows, of which a tenth; a sentence has two or four of them
    assert len({whole.fingerprint(), train.fingerprint(), valid.fingerprint()}) == 3
    assert {f"{row[1]}|{row[2]}" for row in held if row[0] == "en>fr"} == {
        f"{row[2]}|{row[1]}" for row in held if row[0] == "fr>en"
    }


def test_translations_of_a_sentence_are_on_one_side_in_one_direction(tmp_path: Path) -> None:
    write_pairs(tmp_path, 500)
    train, valid = ParallelCorpus(("x.{lang}",), "en", "de", tmp_path).hold_out(0.1, 0)
    kept, held = ({source for source, _ in corpus.rows()} for corpus in (train, valid))
    assert held
    assert not kept & held


def test_a_sentence_is_on_one_side_whatever_the_language_it_is_translated_to(tmp_path: Path) -> None:
    write_pairs(tmp_path, 400)
    (tmp_path / "x.fr").write_text("".join(f"phrase {i}\n" for i in range(400)))
    specs = ("x.{lang}@en>de", "x.{lang}@en>fr", "x.{lang}@fr>en")
    train, valid = ParallelCorpus(specs, "en", "de", tmp_path).hold_out(0.1, 0)
    english = [
        {source if direction.startswith("en") else target for direction, source, target in corpus.directed_rows()}
        for corpus in (train, valid)
    ]
    assert {direction for direction, _, _ in valid.directed_rows()} == {"en>de", "en>fr", "fr>en"}
    assert not english[0] & english[1]


def test_empty_rows_are_not_held_out(tmp_path: Path) -> None:
    (tmp_path / "blank.tsv").write_text("a b\t\ne f\tg h\ni\t\n\tx\nk\tl\n")
    train, valid = ParallelCorpus(("blank.tsv",), "en", "de", tmp_path).hold_out(0.5, 0)
    assert (len(list(train.rows())), len(list(valid.rows()))) == (4, 1)
    assert all(valid.rows())
    (tmp_path / "t.txt").write_text("a\n \n \nb\n")
    _, valid, message = TextCorpus(("t.txt",), tmp_path, "line").hold_out(0.5, 0)
    assert "1 of 2 training documents" in message
    assert all(text.strip() for (text,) in valid.rows())


def test_the_end_of_a_text_or_some_of_its_documents(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("".join(f"line {i:03}\n" for i in range(100)))
    train, valid, message = TextCorpus(("t.txt",), tmp_path, "file").hold_out(0.1, 0)
    texts = ["".join(text for (text,) in corpus.rows()) for corpus in (train, valid)]
    assert "".join(texts) == (tmp_path / "t.txt").read_text()
    assert len(texts[1]) == 90
    assert "last 10% of the training text" in message
    train, valid, message = TextCorpus(("t.txt",), tmp_path, "line").hold_out(0.1, 0)
    kept, held = ({text for (text,) in corpus.rows()} for corpus in (train, valid))
    assert (len(kept), len(held), kept & held) == (90, 10, set())
    assert "10 of 100 training documents are held out" in message


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_translator_says_so_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path)
    (tmp_path / "pairs.toml").write_text(
        'data.train = "x.{lang}"\ntokenizer.kind = "word"\nmodel.preset = "transformer-tiny"\n'
    )
    own = {"data": {"root": str(tmp_path)}, "model": SMALL | {"n_encoder_layers": 1, "n_decoder_layers": 1}}
    run = regard.train(tmp_path / "pairs.toml", tmp_path / "run", **own, train=TRAIN)
    said = capfd.readouterr().err
    assert "data.valid is not given: 10 of 200 training pairs are held out for validation" in said
    longer = regard.resume(run, train={"steps": 3})
    assert [json.loads(line)["step"] for line in (longer / "metrics.jsonl").read_text().splitlines()][-1] == 3


@pytest.mark.parametrize("task", ["classification", "tagging", "causal-lm", "masked-lm", "image-classification"])
def test_other_tasks_hold_something_out_too(task: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    preset = {"causal-lm": "gpt-tiny", "image-classification": "vit-tiny"}.get(task, "bert-tiny")
    file = {"classification": "d.tsv", "tagging": "d.conll", "image-classification": "pictures"}.get(task, "d.txt")
    (tmp_path / "d.tsv").write_text("text\tlabel\n" + "".join(f"word {i}\t{i % 3}\n" for i in range(60)))
    (tmp_path / "d.conll").write_text("".join(f"word\tA\nw{i}\tB\n\n" for i in range(60)))
    (tmp_path / "d.txt").write_text("a text of some words\n" * 60)
    for i in range(12):
        folder = tmp_path / "pictures" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 10 * i, np.uint8)).save(folder / f"{i}.png")
    (tmp_path / "r.toml").write_text(
        f'task = "{task}"\ndata.train = ["{file}"]\ntokenizer.kind = "word"\nmodel.preset = "{preset}"\n'
    )
    model = SMALL | ({} if task == "causal-lm" else {"n_encoder_layers": 1})
    model = {k: v for k, v in model.items() if task != "image-classification" or k != "max_len"}
    regard.train(tmp_path / "r.toml", tmp_path / "run", data={"root": str(tmp_path)}, model=model, train=TRAIN)
    said = capfd.readouterr().err
    assert "data.valid is not given" in said
    units = {"causal-lm": "tokens", "masked-lm": "scored tokens", "image-classification": "images"}
    assert f" {units.get(task, 'labels')}/s" in said  # what its speed counts
