"""Export of models trained here to folders that transformers loads, and refusal of models that no family has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from configured import model_config
from fused_rows import qkv_rows
from peers import transformers
from safetensors.torch import load_file
from tokens import BERT_TEMPLATE, EOS, SOS
from torch import Tensor, nn

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.special_tokens import PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers

V = 60
GPT: dict[str, Any] = {"preset": "gpt-tiny", "n_decoder_layers": 2, "target_vocab": V, "max_len": 20}
BERT: dict[str, Any] = {"preset": "bert-tiny", "n_encoder_layers": 2, "source_vocab": V, "max_len": 20, "norm": "post"}
BERT |= {"positions": "learned", "activation": "gelu", "embedding_norm": True, "token_types": 2}
UNSCALED_BERT = {**BERT, "scale_embeddings": False}
PAIR: dict[str, Any] = {"preset": "transformer-tiny", "n_encoder_layers": 2, "n_decoder_layers": 1, "max_len": 20}
PAIR |= {"source_vocab": V, "target_vocab": V, "norm": "post"}
T5: dict[str, Any] = {"norm": "pre", "norm_kind": "rms", "bias": False, "positions": "t5", "scale_embeddings": False}
SWITCH: dict[str, Any] = {**T5, "norm_eps": 1e-6, "n_decoder_layers": 2, "feedforward": ("dense", "switch")}
SWITCH |= {"switch.capacity_factor": 0.0, "switch.eval_capacity_factor": 0.0}
LLAMA: dict[str, Any] = {
    "norm_kind": "rms",
    "bias": False,
    "feedforward": "gated",
    "activation": "silu",
    "positions": "rope",
}

DEBERTA: dict[str, Any] = {**BERT, "encoder_positions": "disentangled", "scale_embeddings": False, "token_types": 0}
DEBERTA |= {"disentangled.reach": 10}

STATE: dict[str, Any] = {"n_decoder_layers": 2, "d_model": 64, "target_vocab": V, "max_len": 20}

HOME: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT, "positions": "learned", "activation": "gelu-tanh", "scale_embeddings": False}),
    "gpt2-own-head": (
        "GPT2LMHeadModel",
        {**GPT, "positions": "learned", "activation": "relu", "scale_embeddings": False, "tie": "inputs"},
    ),
    "gpt2-row": (
        "GPT2ForSequenceClassification",
        {**GPT, "positions": "learned", "scale_embeddings": False, "prediction_head": "sequence", "n_classes": 3},
    ),
    "llama": ("LlamaForCausalLM", {**GPT, **LLAMA, "n_kv_heads": 2, "tie": "none", "scale_embeddings": False}),
    "mamba": ("MambaForCausalLM", {**STATE, "preset": "mamba-tiny", "mamba.d_state": 6, "mamba.dt_rank": 3}),
    "mamba-own-head": ("MambaForCausalLM", {**STATE, "preset": "mamba-tiny", "tie": "none", "bias": True}),
    "mamba2": ("Mamba2ForCausalLM", {**STATE, "preset": "mamba2-tiny", "mamba2.d_head": 32, "mamba2.d_state": 12}),
    "rwkv": ("RwkvForCausalLM", {**STATE, "preset": "rwkv-tiny", "d_ff": 96}),
    "rwkv-tied": ("RwkvForCausalLM", {**STATE, "preset": "rwkv-tiny", "tie": "all"}),
    "bloom": (
        "BloomForCausalLM",
        {**GPT, "positions": "alibi", "activation": "gelu-tanh", "scale_embeddings": False, "embedding_norm": True},
    ),
    "bert": ("BertForMaskedLM", {**BERT, "scale_embeddings": False}),
    "roformer": ("RoFormerForMaskedLM", {**BERT, "positions": "rope", "scale_embeddings": False}),
    "deberta-3": ("DebertaV2ForMaskedLM", {**DEBERTA, "disentangled.buckets": 6}),
    "deberta-1": ("DebertaForMaskedLM", {**DEBERTA, "disentangled.buckets": 0}),
    "bert-row": ("BertForSequenceClassification", {**UNSCALED_BERT, "prediction_head": "sequence", "n_classes": 3}),
    "bert-token": ("BertForTokenClassification", {**UNSCALED_BERT, "prediction_head": "token", "n_classes": 3}),
    "marian": ("MarianMTModel", {**PAIR, "activation": "silu"}),
    "marian-decoder": ("MarianMTModel", {**PAIR, "tie": "decoder", "scale_embeddings": False}),
    "bart": ("BartForConditionalGeneration", {**PAIR, "positions": "learned", "embedding_norm": True}),
    "t5": ("T5ForConditionalGeneration", {**PAIR, **T5, "scale_logits": True}),
    "t5-1.1": (
        "T5ForConditionalGeneration",
        {**PAIR, **T5, "d_head": 16, "feedforward": "gated", "activation": "gelu-tanh", "tie": "inputs"},
    ),
    "switch": ("SwitchTransformersForConditionalGeneration", {**PAIR, **SWITCH, "scale_logits": True}),
    "switch-own-head": ("SwitchTransformersForConditionalGeneration", {**PAIR, **SWITCH, "tie": "inputs"}),
    "vit": (
        "ViTForImageClassification",
        {"preset": "vit-tiny", "n_encoder_layers": 2, "positions": "learned", "activation": "gelu", "max_len": 10,
         "n_classes": 4, "scale_embeddings": False},
    ),
}  # fmt: skip


def model_of(settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    own = {name: value for name, value in settings.items() if name != "preset"}
    uses_preset = settings["preset"].split("-")[0] in ("mamba", "mamba2", "rwkv")  # the others begin with the defaults
    model = make_model(preset(settings["preset"], **own) if uses_preset else model_config(**settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def make_keys_safe(model: Any) -> None:
    """Make the key matrices orthogonal: a random one may be nearly singular, and DeBERTa's export solves with it."""
    for block in model.encoder.blocks:
        attention = block.sublayers["self"]
        heads, width = attention.n_heads, model.config.d_model
        keys = qkv_rows(heads, heads, attention.d_head)[width : 2 * width]
        with torch.no_grad():
            attention.qkv.weight[keys] = nn.init.orthogonal_(torch.empty(width, width))


def package_of(name: str, **more: Any) -> ModelPackage:
    model = model_of(HOME[name][1])
    if name == "deberta-1":
        make_keys_safe(model)
    config: Any = model.config
    task = {"sequence": "classification", "token": "tagging"}.get(config.prediction_head, "causal-lm")
    labels = tuple("abc") if config.prediction_head != "none" else ()
    return ModelPackage(
        model,
        None,
        task,
        labels=labels,
        token_template=BERT_TEMPLATE if name.startswith("bert") else SpecialTokenTemplate(),
        **more,
    )


def both(name: str, model: nn.Module, peer: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    if name == "vit":
        images = torch.randn(2, 1, 12, 12)
        return model(images), peer(pixel_values=images).logits
    ids, target = torch.randint(5, V, (3, 9)), torch.randint(5, V, (3, 6))
    ids[1, 5:] = PAD
    real, theirs = ids != PAD, ids.clamp(min=0)
    if "encoder_layers" in peer.config or "num_decoder_layers" in peer.config:
        target[:, 0] = SOS
        return model(ids, target), peer(input_ids=theirs, attention_mask=real.long(), decoder_input_ids=target).logits
    said = peer(input_ids=theirs, attention_mask=real.long()).logits
    if name.endswith(("-row", "-token")):
        found = model(ids, torch.zeros_like(ids))
        return (found, said) if name.endswith("-row") else (found[real], said[real])
    return model(ids)[real], said[real]


@pytest.mark.parametrize("name", HOME)
def test_a_model_made_here_says_the_same_there(name: str, tmp_path: Path) -> None:
    package = package_of(name)
    report = write_huggingface(tmp_path / "out", package)
    assert report.kind == HOME[name][0]
    peer, info = getattr(transformers, report.kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    peer.config.pad_token_id = 0  # a model without a tokenizer says none
    with torch.no_grad():
        ours, theirs = both(name, package.model, peer.eval())
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HOME)
def test_what_went_out_comes_in_and_goes_out_again(name: str, tmp_path: Path) -> None:
    write_huggingface(tmp_path / "out", package_of(name))
    back, _ = read_huggingface(tmp_path / "out", torch.device("cpu"))
    write_huggingface(tmp_path / "again", back)
    first, second = (load_file(tmp_path / at / "model.safetensors") for at in ("out", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(x, second[key]) for key, x in first.items() if "EncDecAttention.q" not in key)
    assert back.labels == {"vit": ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")}.get(name, package_of(name).labels)


def test_a_tokenizer_goes_with_its_model(tmp_path: Path) -> None:
    lines = ["the cat sat on the mat", "a dog and a cat", "no one is there"]
    tokenizer = Tokenizer.train(lines, TokenizerConfig(kind="bpe", vocab_size=V))
    name, token_template = "bert", BERT_TEMPLATE
    package = dataclasses.replace(
        package_of(name), tokenizers=Tokenizers(tokenizer, tokenizer), token_template=token_template
    )
    write_huggingface(tmp_path / "out", package)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in lines:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == token_template.wrap(ids)
        pair = theirs(text, lines[0])
        assert (pair["input_ids"], pair["token_type_ids"]) == token_template.wrap_pair(ids, tokenizer.encode(lines[0]))
        assert theirs.decode(ids) == text
    assert (theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id) == (0, SOS, EOS)
    again, _ = read_huggingface(tmp_path / "out", torch.device("cpu"))
    assert again.token_template == token_template
    assert again.tokenizers is not None
    assert again.tokenizers.source.encode(lines[1]) == tokenizer.encode(lines[1])


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt2", {"positions": "fire"}, r"nearest is GPT-2, but positions is 'fire', not 'learned'"),
        ("gpt2", {"attention.window": 8}, r"attention.window is 8, not 0"),
        ("llama", {"rope.scaling": "ntk", "rope.factor": 2.0}, r"nearest is LLaMA, but rope\.scaling is 'ntk'"),
        ("rwkv", {"mixer": ("rwkv", "mamba")}, r"nearest is RWKV, but mixer is"),
        ("llama", {"scale_embeddings": True}, r"nearest is LLaMA, but scale_embeddings is True, not False"),
        ("marian", {"norm": "pre"}, r"nearest is Marian, but norm is 'pre', not 'post'"),
        ("bert", {"parallel": True, "norm": "pre"}, r"nearest is BERT"),
        ("bloom", {"d_ff": 100}, r"nearest is BLOOM, but d_ff is 100, not 512"),
        ("t5", {"cross_positions": "t5"}, r"nearest is T5, but cross_positions is 't5'"),
        ("t5", {"tie": "decoder"}, r"nearest is T5, but tie is 'decoder', not 'all' or 'inputs'"),
        ("t5", {"tie": "none"}, r"nearest is T5, but tie is 'none'"),
        ("marian", {"tie": "none"}, r"nearest is Marian, but tie is 'none', not 'all' or 'decoder'"),
        ("marian", {"tie": "inputs"}, r"nearest is Marian, but tie is 'inputs'"),
        ("bart", {"tie": "none"}, r"nearest is BART, but tie is 'none', not 'all'"),
    ],
)
def test_settings_that_no_family_has_are_refused_by_name(
    name: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    package = ModelPackage(model_of({**HOME[name][1], **change}), None, "causal-lm")
    with pytest.raises(RegardError, match=said):
        write_huggingface(tmp_path / "out", package)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gru-small", "rnnsearch-small"])
def test_an_architecture_that_no_family_has_is_refused(name: str, tmp_path: Path) -> None:
    sizes = {"source_vocab": 9 * (name != "gru-small"), "target_vocab": 9, "d_model": 8, "recurrent.d_hidden": 8}
    package = ModelPackage(make_model(preset(name, **sizes)), None, "translation")
    with pytest.raises(RegardError, match=r"no family of models elsewhere is a (rnn|seq2seq)"):
        write_huggingface(tmp_path / "out", package)
    assert not list(tmp_path.iterdir())


def test_a_model_that_left_its_family_is_refused(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "out", package_of("gpt2"))
    package, _ = read_huggingface(tmp_path / "out", torch.device("cpu"))
    config = dataclasses.replace(package.config, positions="rope", preset="gpt-tiny")
    changed = dataclasses.replace(package, model=make_model(config))
    with pytest.raises(RegardError, match=r"came from GPT-2 but is none any more: positions is 'rope'"):
        write_huggingface(tmp_path / "again", changed)


def test_what_a_decoder_starts_with_may_be_token_0(tmp_path: Path) -> None:
    """T5 starts with its padding token, which is an ordinary token here: it is read and trained."""
    write_huggingface(
        tmp_path / "out", dataclasses.replace(package_of("t5"), token_template=SpecialTokenTemplate(start=(0,)))
    )
    package, _ = read_huggingface(tmp_path / "out", torch.device("cpu"))
    assert package.token_template.start == (0,)
    words: Any = package.model.source_embedding.weight  # type: ignore[union-attr]
    source = torch.tensor([[5, 6]])
    before = package.model(source, torch.tensor([[0]]))
    with torch.no_grad():
        words[0] += torch.randn(words.shape[1])
    assert not torch.allclose(package.model(source, torch.tensor([[0]])), before)
    write_huggingface(tmp_path / "again", package)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["shared.weight"], words)


def test_a_bias_that_nothing_can_take_over_is_refused(tmp_path: Path) -> None:
    package = package_of("deberta-1")
    with torch.no_grad():
        package.model.encoder.blocks[1].sublayers["self"].qkv.weight.zero_()  # type: ignore[union-attr,index]
    with pytest.raises(
        RegardError, match=r"blocks\.1\..*qkv\.bias cannot be exported: the non-zero parameter has no counterpart"
    ):
        write_huggingface(tmp_path / "out", package)
    assert not list(tmp_path.iterdir())


def test_what_no_rule_takes_out_is_refused(tmp_path: Path) -> None:
    """A parameter that the family has no tensor for is not dropped silently."""
    package = package_of("gpt2")
    package.model.register_parameter("more", nn.Parameter(torch.ones(3)))
    with pytest.raises(RegardError, match=r"a GPT2LMHeadModel has no place for more"):
        write_huggingface(tmp_path / "out", package)


def test_only_known_files_are_written_beside_a_model(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "a" / "out", package_of("gpt2"))
    package, _ = read_huggingface(tmp_path / "a" / "out", torch.device("cpu"))
    files = {"../../escaped.json": {}, "config.json": {}, "generation_config.json": {"num_beams": 2}}
    origin = {**package.origin, "files": files}
    write_huggingface(tmp_path / "a" / "again", dataclasses.replace(package, origin=origin))
    written = {path.name for path in (tmp_path / "a" / "again").iterdir()}
    assert written >= {"config.json", "model.safetensors", "generation_config.json"}
    assert not list(tmp_path.rglob("escaped.json"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "a" / "again").model_type == "gpt2"


def test_images_that_are_not_square_are_refused(tmp_path: Path) -> None:
    for size in ([8, 18], [12, 12]):
        package = dataclasses.replace(package_of("vit"), pixels={"mean": [0.1], "std": [0.3], "size": size})
        if size == [12, 12]:
            write_huggingface(tmp_path / "out", package)
            back, report = read_huggingface(tmp_path / "out", torch.device("cpu"))
            assert (back.pixels, report.notes) == (package.pixels, [])
        else:
            with pytest.raises(RegardError, match="square images"):
                write_huggingface(tmp_path / "out", package)


def test_a_classifier_grown_on_an_imported_model_goes_out_as_one(tmp_path: Path) -> None:
    write_huggingface(tmp_path / "out", package_of("bert"))
    package, _ = read_huggingface(tmp_path / "out", torch.device("cpu"))
    config = dataclasses.replace(package.config, prediction_head="sequence", n_classes=2)
    grown = dataclasses.replace(package, model=make_model(config).eval(), labels=("no", "yes"), task="classification")
    report = write_huggingface(tmp_path / "grown", grown)
    peer = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "grown")
    assert report.kind == "BertForSequenceClassification"
    assert peer.config.id2label == {0: "no", 1: "yes"}
