"""Vocabularies from elsewhere with our ids: the same pieces as transformers finds, frames, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers import CPU, make, transformers
from regard.exchange.numbering import Numbering, own
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokens import EOS, MASK, SOS, UNK

from regard.exchange import renumber
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.exchange.vocabulary import Foreign, read, template
from regard.text.frame import CLASSIC, Frame
from regard.text.special import PAD
from regard.text.vocabulary import SPECIALS

TEXTS = [
    "the cat sat on the mat",
    "Ünïcödé naïve café",
    "日本 漢字",
    "emoji 😀👍🏽",
    "don't  stop\tnow",
    "<eos> </s> [SEP] <pad>",
    "x",
]


def bpe(size: int, specials: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def gpt2() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    backend = bpe(290, [])
    backend.add_special_tokens(["<|endoftext|>"])
    return backend, dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")


def roberta() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    backend = bpe(300, ["<s>", "<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return backend, {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
                     "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}  # fmt: skip


def t5() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁c", -4.0), ("at", -4.5)]
    pieces += [(char, -6.0 - i / 10) for i, char in enumerate("abcdehimnostx<>/")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.add_special_tokens([f"<extra_id_{i}>" for i in (2, 1, 0)])
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


FORMS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "gpt2": (gpt2, "GPT2LMHeadModel", "GPT2Config", {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}),
    "roberta": (
        roberta, "RobertaForMaskedLM", "RobertaConfig",
        {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "pad_token_id": 1},
    ),
    "t5": (
        t5, "T5ForConditionalGeneration", "T5Config",
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def folder_of(form: str, path: Path, spare: int = 3) -> Any:
    """A model and its tokenizer, with some rows that no piece stands for."""
    maker, kind, config, settings = FORMS[form]
    backend, names = maker()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    theirs.save_pretrained(path)
    rows = backend.get_vocab_size() + spare
    if form == "gpt2":
        settings = settings | {"bos_token_id": 290, "eos_token_id": 290}
    make(kind, config, vocab_size=rows, **settings)().save_pretrained(path)
    return theirs


@pytest.mark.parametrize("form", FORMS)
def test_the_pieces_are_theirs(form: str, tmp_path: Path) -> None:
    theirs = folder_of(form, tmp_path)
    bundle, _ = read_huggingface(tmp_path, CPU)
    numbering, ours = Numbering.from_dict(bundle.origin["numbering"]), bundle.tokenizers
    assert ours is not None
    assert len(ours.source) == len(numbering) == max(bundle.config.source_vocab, bundle.config.target_vocab)
    for text in TEXTS[:5] + TEXTS[6:]:
        ids = ours.source.encode(text)
        assert [numbering.theirs[i] for i in ids] == theirs(text, add_special_tokens=False)["input_ids"]
        assert [numbering.theirs[i] for i in bundle.frame.one(ids)] == theirs(text)["input_ids"]
        pair, _ = bundle.frame.pair(ids, ids)
        assert [numbering.theirs[i] for i in pair] == theirs(text, text)["input_ids"]
        assert ours.source.decode(ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_is_a_special_token(form: str, tmp_path: Path) -> None:
    folder_of(form, tmp_path)
    tokenizers_of = read_huggingface(tmp_path, CPU)[0].tokenizers
    assert tokenizers_of is not None
    for text in [*SPECIALS, "</s>", "<s>", "<|endoftext|>", "a<eos>b </s>", "<extra_id_0>", "<unused-26>"]:
        said = set(tokenizers_of.source.encode(text)) & tokenizers_of.source.special_ids
        assert said <= {UNK}, text


@pytest.mark.parametrize("form", FORMS)
def test_the_file_comes_back_as_it_was(form: str, tmp_path: Path) -> None:
    theirs = folder_of(form, tmp_path / "in")
    bundle, _ = read_huggingface(tmp_path / "in", CPU)
    write_huggingface(tmp_path / "out", bundle)
    before, after = (json.loads((tmp_path / at / "tokenizer.json").read_text()) for at in ("in", "out"))
    assert before == after
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert again(text, text)["input_ids"] == theirs(text, text)["input_ids"]


def test_roles_and_frames(tmp_path: Path) -> None:
    for form in FORMS:
        folder_of(form, tmp_path / form)
    found = {form: read_huggingface(tmp_path / form, CPU)[0] for form in FORMS}
    assert found["gpt2"].frame == Frame((), (), (), (EOS,))
    assert found["gpt2"].config.absent == (PAD, SOS, UNK, MASK)
    assert found["roberta"].frame == Frame((SOS,), (EOS, EOS), (EOS,), (SOS,))
    assert found["roberta"].config.absent == ()
    assert found["t5"].frame == Frame((), (EOS,), (EOS,), (SOS,))
    assert found["t5"].config.absent == (SOS, MASK)
    words = found["t5"].model.source_embedding.weight  # type: ignore[union-attr]
    assert torch.equal(words[SOS], words[PAD])  # type: ignore[index]
    words = found["gpt2"].model.embedding.weight  # type: ignore[union-attr]
    assert torch.equal(words[SOS], words[EOS])  # type: ignore[index]
    pieces = found["t5"].tokenizers.target  # type: ignore[union-attr]
    assert [pieces.pieces([i]) for i in pieces.sentinels()] == [["<extra_id_0>"], ["<extra_id_1>"], ["<extra_id_2>"]]


def test_a_word_list_and_merges_are_tokenizers_too(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "cafe", ",", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    found = read(tmp_path)
    assert found is not None
    numbering = Numbering(11, (0, 2, 3, 1, 4))
    assert found.frame(numbering, ()) == Frame((SOS,), (EOS,), (EOS,), ())
    joint = found.ours(numbering).source
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    for text in ("The cats, a dog", "CAFÉ", "[MASK] a"):
        expected = theirs(text.replace("[MASK]", "[ MASK ]"))["input_ids"]
        assert [numbering.theirs[i] for i in CLASSIC.one(joint.encode(text))] == expected
    backend, names = roberta()
    folder = tmp_path / "merges"
    folder.mkdir()
    backend.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<mask>": len(vocab)}))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    merged = read(folder)
    assert merged is not None
    assert merged.pieces == backend.get_vocab()
    again = tokenizers.Tokenizer.from_str(json.dumps(merged.data))
    for text in TEXTS:
        assert again.encode(text, text).ids == backend.encode(text, text).ids


@given(size=st.integers(5, 12), data=st.data())
def test_every_row_has_one_place_and_comes_back(size: int, data: st.DataObject) -> None:
    special = data.draw(st.lists(st.none() | st.integers(0, size - 1), min_size=5, max_size=5).filter(distinct))
    numbering = Numbering(size, tuple(special))
    rows = torch.arange(size * 2.0).view(size, 2) + 1
    step = numbering.inputs()
    ours = step.to_ours(rows)
    assert len(ours) == len(numbering) == size + special.count(None)
    assert torch.equal(step.to_theirs(ours), rows)
    for i, old in enumerate(special):
        assert torch.equal(ours[i], torch.zeros(2) if old is None else rows[old])
    others = [numbering.theirs[i] for i in range(5, len(numbering))]
    assert others == sorted(others)  # type: ignore[type-var]
    assert [numbering.theirs[i] for i in numbering.ours] == list(range(size))
    assert Numbering.from_dict(json.loads(json.dumps(numbering.to_dict()))) == numbering


def distinct(ids: list[int | None]) -> bool:
    there = [i for i in ids if i is not None]
    return len(there) == len(set(there))


@pytest.mark.parametrize("frame", [Frame(), CLASSIC, Frame((SOS,), (EOS, EOS), (EOS,), (EOS, SOS))])
def test_a_frame_as_a_template_is_read_as_that_frame(frame: Frame) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({**{s: i for i, s in enumerate(SPECIALS)}, "a": 5}, "<unk>"))
    backend.add_special_tokens(list(SPECIALS))
    data = json.loads(backend.to_str()) | {"post_processor": template(frame)}
    assert Foreign(data).frame(own(6), frame.start) == frame


def test_a_hole_in_a_vocabulary_gets_a_piece_that_no_text_has() -> None:
    data = json.loads(tokenizers.Tokenizer(models.WordLevel({"[U]": 0, "a": 1, "b": 3}, "[U]")).to_str())
    numbering = Numbering(6, (None, None, None, 0, None))
    ours = renumber.to_ours(data, numbering)
    assert renumber.pieces_of(ours) == {
        **{name: i for i, name in enumerate(SPECIALS)}, "a": 5, "<unused-2>": 6, "b": 7, "<unused-4>": 8, "<unused-5>": 9,
    }  # fmt: skip
    assert renumber.to_theirs(ours, numbering, renumber.memory(data, numbering))["model"] == data["model"]


# ---- a list of words and nothing else ---------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "a", "mask", "[", "]", "sep"]
WITH_SPECIALS = ["the cat sat", "the [MASK] sat [SEP] a [PAD] [CLS] [UNK] dogs", "[mask]", "a[MASK]s", "[ MASK ] [SEP]"]


def test_a_word_list_alone_has_the_special_tokens_of_bert(tmp_path: Path) -> None:
    """As in transformers, whose tokenizer needs no file that names them."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = make("BertForMaskedLM", "BertConfig", vocab_size=len(WORDS), **sizes)()
    for place in ("words", "whole"):
        model.save_pretrained(tmp_path / place)
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path / "words")
    theirs.save_pretrained(tmp_path / "whole")  # with a tokenizer.json, and files that name them
    alone, whole = (read_huggingface(tmp_path / place, CPU)[0] for place in ("words", "whole"))
    numbering = Numbering.from_dict(alone.origin["numbering"])
    assert numbering.special == (0, 2, 3, 1, 4)  # of PAD, SOS, EOS, UNK and MASK
    assert alone.origin["numbering"] == whole.origin["numbering"]
    assert alone.frame == whole.frame == CLASSIC
    foreign = read(tmp_path / "words")
    assert foreign is not None
    backend = tokenizers.Tokenizer.from_str(json.dumps(foreign.data))
    assert alone.tokenizers is not None
    assert whole.tokenizers is not None
    for text in WITH_SPECIALS:
        assert backend.encode(text).ids == theirs(text)["input_ids"]
        ids = alone.tokenizers.source.encode(text)
        assert ids == whole.tokenizers.source.encode(text)
        assert not set(ids) & {PAD, SOS, EOS, MASK}  # in Regard no text is a special token, whatever it says
    ids = alone.frame.one(alone.tokenizers.source.encode("the cats sat"))
    assert [numbering.theirs[i] for i in ids] == theirs("the cats sat")["input_ids"]
