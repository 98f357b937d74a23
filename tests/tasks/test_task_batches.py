"""Labelled rows and pictures in batches, and rows that are too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokens import BERT_TEMPLATE, EOS, SOS

from regard.config import DataConfig, TokenizerConfig
from regard.data.batches import Cursor
from regard.data.image_files import normalize, to_floats
from regard.data.labelled_text import CONTINUES, Example
from regard.tasks.image_classification import ImageBatches, LabelledImages
from regard.tasks.text_classification import (
    EncodedExamples,
    ExampleBatches,
    encode_examples,
    encode_texts,
    read_split,
    truncate_texts,
)
from regard.text.special_tokens import PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["a b c"], TokenizerConfig(kind="word", vocab_size=20))
A, B, C = TOKENIZER.encode("a b c")


def rows_of(lengths: list[int], task: str) -> EncodedExamples:
    """Row i holds i + 10 again and again; its label is i, or i for each token but the first."""
    ids = [[i + 10] * n for i, n in enumerate(lengths)]
    types = [[0] * (n // 2) + [1] * (n - n // 2) for n in lengths]
    if task == "tagging":
        return EncodedExamples(ids, types, [[CONTINUES, *[i] * (n - 1)] for i, n in enumerate(lengths)])
    return EncodedExamples(ids, types, [float(i) if task == "regression" else i for i in range(len(lengths))])


@given(
    st.lists(st.integers(2, 21), min_size=1, max_size=30),
    st.sampled_from(["classification", "regression", "tagging"]),
    st.integers(1, 90),
)
def test_every_row_is_answered_once_an_epoch_whole_and_padded(lengths: list[int], task: str, tokens: int) -> None:
    batches = ExampleBatches(rows_of(lengths, task), task, tokens, seed=3)
    seen = []
    for batch in batches.iterate_once():
        ids, types, labels = (x.numpy() for x in batch.inputs)
        assert ids.shape == types.shape
        assert ids.shape[1] <= max(lengths)  # a model that reads just the longest row reads every batch
        scored = ~np.isnan(labels) if task == "regression" else labels != -1
        assert batch.tokens == scored.sum()
        for i in np.flatnonzero(scored.reshape(len(ids), -1).any(1)):
            row = int(ids[i, 0]) - 10
            n = lengths[row]
            assert ids[i].tolist() == [row + 10] * n + [PAD] * (ids.shape[1] - n)
            assert types[i, :n].tolist() == [0] * (n // 2) + [1] * (n - n // 2)
            assert (labels[i][scored[i]] == row).all() if task == "tagging" else labels[i] == row
            assert task != "tagging" or scored[i].sum() == n - 1
            seen.append(row)
    assert sorted(seen) == list(range(len(lengths)))


def test_the_epochs_have_orders_of_their_own_and_a_cursor_finds_its_place() -> None:
    batches = ExampleBatches(rows_of([5] * 12, "classification"), "classification", 15, seed=0)
    stream = batches.iterate_from(Cursor())
    firsts = [next(stream) for _ in range(8)]  # four an epoch
    labels = [batch.labels.tolist() for batch, _ in firsts]
    for epoch in (labels[:4], labels[4:]):
        assert sorted(label for batch in epoch for label in batch) == list(range(12))
    assert labels[:4] != labels[4:]
    again, _ = next(ExampleBatches(batches.rows, "classification", 15, seed=0).iterate_from(firsts[5][1]))
    assert again.labels.tolist() == labels[6]


def test_two_parts_of_a_file_are_its_examples(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("text\tlabel\n" + "".join(f"{i}\tok\n" for i in range(7)))
    data = DataConfig(root=str(tmp_path), train=("x.tsv[:40%]",), valid=("x.tsv[40%:]",), test=("x.tsv", "x.tsv[:20%]"))
    train, valid, test = (
        [example.texts[0] for example in read_split("classification", data, split)]
        for split in ("train", "valid", "test")
    )
    assert (train, valid, test) == (["0", "1"], ["2", "3", "4", "5", "6"], [*map(str, range(7)), "0"])


# ---- texts to rows ---------------------------------------------------------------------------------------------------


def test_single_texts_and_pairs_may_stand_side_by_side() -> None:
    ids, types = encode_texts([("a",), ("b", "c"), ("a b",)], TOKENIZER, BERT_TEMPLATE)
    assert ids == [[SOS, A, EOS], [SOS, B, EOS, C, EOS], [SOS, A, B, EOS]]
    assert types == [[0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0]]


def test_a_text_that_is_too_long_still_ends_as_every_text_does(capsys: pytest.CaptureFixture[str]) -> None:
    examples = [Example(("a b c a b c",), "x"), Example(("a b",), "y")]
    rows = encode_examples(examples, TOKENIZER, BERT_TEMPLATE, "classification", ("x", "y"), 5, "some.tsv")
    assert rows.ids == [[SOS, A, B, C, EOS], [SOS, A, B, EOS]]
    assert rows.types == [[0] * 5, [0] * 4]
    assert rows.labels == [0, 1]
    assert "some.tsv: 1 of 2 texts are longer than model.max_len 5 and cut there" in capsys.readouterr().err


def test_the_end_of_a_cut_sentence_has_no_tag() -> None:
    """Words of one piece each: five of them, where the model reads four tokens with what stands around."""
    words = tuple("abcab")
    example = Example((" ".join(words),), words=words, tags=("O", "X", "O", "X", "O"))
    rows = encode_examples(
        [example],
        TOKENIZER,
        SpecialTokenTemplate(before=(SOS,), after=(EOS,)),
        "tagging",
        ("O", "X"),
        4,
        "x",
        quiet=True,
    )
    assert rows.ids[0][-1] == EOS
    assert len(rows.ids[0]) == 4
    assert rows.labels == [[CONTINUES, 0, 1, CONTINUES]]


# ---- pictures --------------------------------------------------------------------------------------------------------

PIXELS = {"mean": [0.25], "std": [0.5]}


def pictures(n: int) -> LabelledImages:
    """Picture i is all of brightness 10 i."""
    images = np.repeat(np.arange(n, dtype=np.uint8) * 10, 16).reshape(n, 4, 4, 1)
    return LabelledImages(images, np.arange(n))


def test_every_picture_is_seen_once_an_epoch_and_what_fills_a_batch_is_not_scored() -> None:
    seen: list[int] = []
    for batch in ImageBatches(pictures(7), PIXELS, 3, seed=1).iterate_once():
        images, labels = batch.inputs
        assert images.shape == (3, 1, 4, 4)
        assert images.dtype == torch.float32
        assert batch.tokens == (labels >= 0).sum()
        for image, label in zip(images, labels.tolist(), strict=True):
            if label >= 0:
                torch.testing.assert_close(image, torch.full((1, 4, 4), (label * 10 / 255 - 0.25) / 0.5))
                seen.append(label)
    assert sorted(seen) == list(range(7))


def test_pictures_move_anew_in_each_epoch_and_alike_after_a_resume() -> None:
    bright = LabelledImages(np.full((6, 4, 4, 1), 255, np.uint8), np.arange(6))
    batches = ImageBatches(bright, PIXELS, 6, 0, DataConfig(shift=2))
    first, second, again = (batches.batch(epoch, 0) for epoch in (0, 1, 1))
    still = normalize(to_floats(torch.from_numpy(bright.images)), PIXELS["mean"], PIXELS["std"])
    assert not torch.equal(first.inputs[0], still)
    assert not torch.equal(first.inputs[0], second.inputs[0])
    assert torch.equal(second.inputs[0], again.inputs[0])


def test_the_key_of_pictures_is_that_of_their_content() -> None:
    a, b = pictures(3), pictures(3)
    assert a.key() == b.key()
    assert a.key() != LabelledImages(a.images, a.classes[::-1].copy()).key()
    assert a.key() != pictures(4).key()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 12))
def test_of_two_texts_the_longer_gives_way_first(first: int, second: int, room: int) -> None:
    a, b = truncate_texts([[7] * first, [8] * second], room)
    assert len(a) + len(b) == min(room, first + second)
    if first + second > room:
        assert abs(len(a) - len(b)) <= 1 or len(a) == first < len(b) or len(b) == second < len(a)


def test_a_long_first_text_leaves_room_for_the_second() -> None:
    examples = [Example(("a " * 30, "b b"), "x")]
    rows = encode_examples(examples, TOKENIZER, BERT_TEMPLATE, "classification", ("x",), 12, "here", quiet=True)
    assert rows.ids == [[SOS, *[A] * 7, EOS, B, B, EOS]]
    assert rows.types == [[0] * 9 + [1] * 3]


def test_a_single_row_is_not_filled_up_to_a_batch_outside_training() -> None:
    rows = rows_of([5], "classification")
    assert ExampleBatches(rows, "classification", 64, 0).batch(0, 0).inputs[0].shape[0] > 1
    assert ExampleBatches(rows, "classification", 64, 0, filling=False).batch(0, 0).inputs[0].shape == (1, 5)
