"""Imported vocabularies keep their ids: the pieces that transformers finds, special tokens, token templates, and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from peers import CPU, make, transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokens import BERT_TEMPLATE, EOS, SOS

from regard import model_folder as folders
from regard.config import DecodeConfig
from regard.decode.generation import generate
from regard.errors import RegardError
from regard.exchange.hf_tokenizer import HFTokenizer, make_post_processor, read_tokenizer
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.text.special_tokens import SPECIAL_TOKEN_NAMES, SpecialTokens, SpecialTokenTemplate
from regard.text.tokenizer import VOCABULARY_FILE, Tokenizer, Tokenizers

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
    """Return the folder of a model and its tokenizer, with some rows that no piece stands for."""
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
    package, _ = read_huggingface(tmp_path, CPU)
    ours = package.tokenizers
    assert ours is not None
    assert len(ours.source) == len(theirs) + 3 == max(package.config.source_vocab, package.config.target_vocab)
    for text in TEXTS[:5] + TEXTS[6:]:
        ids = ours.source.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert package.token_template.wrap(ids) == theirs(text)["input_ids"]
        pair, _ = package.token_template.wrap_pair(ids, ids)
        assert pair == theirs(text, text)["input_ids"]
        assert ours.source.decode(ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)
    spare = range(len(theirs), len(ours.source))  # rows that no piece stands for say nothing
    assert ours.source.decode(spare) == ""
    assert ours.source.pieces(spare) == [""] * 3


@pytest.mark.parametrize("form", FORMS)
def test_no_text_is_a_special_token(form: str, tmp_path: Path) -> None:
    folder_of(form, tmp_path)
    tokenizers_of = read_huggingface(tmp_path, CPU)[0].tokenizers
    assert tokenizers_of is not None
    for text in [*SPECIAL_TOKEN_NAMES.values(), "</s>", "<s>", "<|endoftext|>", "a<eos>b </s>", "<extra_id_0>"]:
        said = set(tokenizers_of.source.encode(text)) & tokenizers_of.source.special_ids
        assert said <= {tokenizers_of.source.special.unk}, text


@pytest.mark.parametrize("form", FORMS)
def test_the_file_comes_back_as_it_was(form: str, tmp_path: Path) -> None:
    theirs = folder_of(form, tmp_path / "in")
    package, _ = read_huggingface(tmp_path / "in", CPU)
    write_huggingface(tmp_path / "out", package)
    before, after = (json.loads((tmp_path / at / "tokenizer.json").read_text()) for at in ("in", "out"))
    assert before == after
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert again(text, text)["input_ids"] == theirs(text, text)["input_ids"]


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_ours_keeps_the_tokenizer(form: str, tmp_path: Path) -> None:
    """Special tokens are data in our folder: the imported file is unchanged, and vocabulary.json names them."""
    folder_of(form, tmp_path / "in")
    package, _ = read_huggingface(tmp_path / "in", CPU)
    folders.save(tmp_path / "ours", package, "")
    again = folders.load(tmp_path / "ours", CPU)
    before, after = (json.loads((tmp_path / at / "tokenizer.json").read_text()) for at in ("in", "ours"))
    assert before == after
    assert again.tokenizers is not None
    assert package.tokenizers is not None
    assert again.tokenizers.source.special == package.tokenizers.source.special
    assert again.tokenizers.source.fingerprint() == package.tokenizers.source.fingerprint()
    assert [again.tokenizers.source.encode(text) for text in TEXTS] == [
        package.tokenizers.source.encode(text) for text in TEXTS
    ]


@pytest.mark.parametrize(
    "values",
    ["[]", "{}", '{"size": 290, "special_tokens": {"eos": 290}}', '{"size": 291, "special_tokens": {"eos": "x"}}',
     '{"size": 291, "special_tokens": {"end": 290}}', '{"size": 100, "special_tokens": {}}', '{"size": null}'],
)  # fmt: skip
def test_a_broken_vocabulary_json_is_refused(values: str, tmp_path: Path) -> None:
    backend, _ = gpt2()
    Tokenizer(backend, SpecialTokens(eos=290), 291).save(tmp_path / "tokenizer.json")
    (tmp_path / VOCABULARY_FILE).write_text(values)
    with pytest.raises(RegardError):
        Tokenizers.load(tmp_path)


def test_roles_and_frames(tmp_path: Path) -> None:
    for form in FORMS:
        folder_of(form, tmp_path / form)
    found = {form: read_huggingface(tmp_path / form, CPU)[0] for form in FORMS}
    special = {form: package.tokenizers.target.special for form, package in found.items() if package.tokenizers}
    assert special["gpt2"] == SpecialTokens(bos=290, eos=290, unk=290)
    assert found["gpt2"].token_template == SpecialTokenTemplate((), (), (), (290,), (290,))
    assert (found["gpt2"].config.eos_token_id, found["gpt2"].config.suppress_tokens) == (290, ())
    assert special["roberta"] == SpecialTokens(bos=0, eos=2, unk=3, mask=300, pad=1)
    assert found["roberta"].token_template == SpecialTokenTemplate((0,), (2, 2), (2,), (0,), (2,))
    assert found["roberta"].config.suppress_tokens == (0, 1, 3, 300)
    assert special["t5"] == SpecialTokens(eos=1, unk=2, pad=0)
    assert found["t5"].token_template == SpecialTokenTemplate((), (1,), (1,), (0,), (1,))
    assert (found["t5"].config.eos_token_id, found["t5"].config.suppress_tokens) == (1, (0, 2))
    pieces = found["t5"].tokenizers.target  # type: ignore[union-attr]
    assert [pieces.pieces([i]) for i in pieces.sentinels()] == [["<extra_id_0>"], ["<extra_id_1>"], ["<extra_id_2>"]]


def test_a_language_model_whose_token_0_is_a_piece_writes_and_ends(tmp_path: Path) -> None:
    """GPT-2's vocabulary has no padding and no mask; one token, the last, begins and ends texts."""
    folder_of("gpt2", tmp_path, spare=0)
    package, _ = read_huggingface(tmp_path, CPU)
    assert package.tokenizers is not None
    tokenizer = package.tokenizers.target
    assert tokenizer.encode("!") == [0]
    with pytest.raises(RegardError, match="no mask token"):
        tokenizer.special.require("mask", "a test")
    prompts = [[0, 5], [0, 0, 7, 0], [9]]
    together = generate(package.model, prompts, DecodeConfig(beam=1, max_new_tokens=3))  # type: ignore[arg-type]
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = generate(package.model, [prompt], DecodeConfig(beam=1, max_new_tokens=3))  # type: ignore[arg-type]
        assert (row.tokens, row.end) == (alone.tokens, alone.end)
    with torch.no_grad():  # every direction leads to the end
        package.model.decoder.norm.weight.zero_()  # type: ignore[union-attr]
        package.model.decoder.norm.bias.copy_(package.model.embedding.weight[290] * 100)  # type: ignore[union-attr]
    assert [row.end for row in generate(package.model, prompts, DecodeConfig(beam=1))] == ["end"] * 3  # type: ignore[arg-type]


def test_a_word_list_and_merges_are_tokenizers_too(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "cafe", ",", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    found = read_tokenizer(tmp_path)
    assert found is not None
    token_template = found.token_template((), ())
    assert token_template == SpecialTokenTemplate((2,), (3,), (3,), (), ())
    joint = found.to_ours(SpecialTokens(bos=2, eos=3, unk=1, mask=4, pad=0), 11).source
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    for text in ("The cats, a dog", "CAFÉ", "[MASK] a"):
        expected = theirs(text.replace("[MASK]", "[ MASK ]"))["input_ids"]
        assert token_template.wrap(joint.encode(text)) == expected
    backend, names = roberta()
    folder = tmp_path / "merges"
    folder.mkdir()
    backend.model.save(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<mask>": len(vocab)}))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    merged = read_tokenizer(folder)
    assert merged is not None
    assert merged.pieces == backend.get_vocab()
    again = tokenizers.Tokenizer.from_str(merged.text)
    for text in TEXTS:
        assert again.encode(text, text).ids == backend.encode(text, text).ids


@pytest.mark.parametrize(
    "token_template",
    [SpecialTokenTemplate(), BERT_TEMPLATE, SpecialTokenTemplate((SOS,), (EOS, EOS), (EOS,), (EOS, SOS))],
)
def test_a_frame_as_a_template_is_read_as_that_frame(token_template: SpecialTokenTemplate) -> None:
    names = list(SPECIAL_TOKEN_NAMES.values())
    backend = tokenizers.Tokenizer(models.WordLevel({**{s: i for i, s in enumerate(names)}, "a": 5}, "<unk>"))
    backend.add_special_tokens(names)
    data = json.loads(backend.to_str()) | {"post_processor": make_post_processor(token_template, Tokenizer(backend))}
    assert HFTokenizer(json.dumps(data)).token_template(token_template.start, token_template.end) == token_template


def test_a_hole_in_a_vocabulary_stands_for_nothing() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[U]": 0, "a": 1, "b": 3}, "[U]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="do not have the ids 0 to 2"):
        Tokenizer(backend, SpecialTokens(unk=0))
    ours = Tokenizer(backend, SpecialTokens(unk=0), 6)
    assert len(ours) == 6
    assert ours.encode("a b c") == [1, 3, 0]
    assert ours.pieces(range(6)) == ["[U]", "a", "", "b", "", ""]
    assert ours.decode([1, 2, 3, 5]) == "a b"
    with pytest.raises(RegardError, match="outside the vocabulary of 6"):
        ours.decode([6])


# ---- a list of words and nothing else ---------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "a", "mask", "[", "]", "sep"]
WITH_SPECIALS = ["the cat sat", "the [MASK] sat [SEP] a [PAD] [CLS] [UNK] dogs", "[mask]", "a[MASK]s", "[ MASK ] [SEP]"]


def test_a_word_list_alone_has_the_special_tokens_of_bert(tmp_path: Path) -> None:
    """As in transformers, vocab.txt needs no other file that names the special tokens."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = make("BertForMaskedLM", "BertConfig", vocab_size=len(WORDS), **sizes)()
    for place in ("words", "whole"):
        model.save_pretrained(tmp_path / place)
    (tmp_path / "words" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path / "words")
    theirs.save_pretrained(tmp_path / "whole")  # with a tokenizer.json, and files that name them
    alone, whole = (read_huggingface(tmp_path / place, CPU)[0] for place in ("words", "whole"))
    assert alone.token_template == whole.token_template == SpecialTokenTemplate((2,), (3,), (3,), (2,), (3,))
    foreign = read_tokenizer(tmp_path / "words")
    assert foreign is not None
    backend = tokenizers.Tokenizer.from_str(foreign.text)
    assert alone.tokenizers is not None
    assert whole.tokenizers is not None
    special = SpecialTokens(bos=2, eos=3, unk=1, mask=4, pad=0)
    assert alone.tokenizers.source.special == whole.tokenizers.source.special == special
    for text in WITH_SPECIALS:
        assert backend.encode(text).ids == theirs(text)["input_ids"]
        ids = alone.tokenizers.source.encode(text)
        assert ids == whole.tokenizers.source.encode(text)
        assert not set(ids) & {0, 2, 3, 4}  # in Regard no text is a special token, whatever it says
    ids = alone.token_template.wrap(alone.tokenizers.source.encode("the cats sat"))
    assert ids == theirs("the cats sat")["input_ids"]
