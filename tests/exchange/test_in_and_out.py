"""Import and export of every family with random weights: equal logits, and bit-exact weights after a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from configured import replaced
from peers import (
    BARE,
    BARE_DECODERS,
    CPU,
    DECODERS,
    ENCODERS,
    EVERY,
    PAIRS,
    deberta,
    deberta3,
    imported,
    logits,
    make,
    stirred,
    texts,
    transformers,
)
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from regard import model_folder as folders
from regard.config.recipes import to_dict
from regard.exchange.families import FAMILIES
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.exchange.loader import load_model, model_settings
from regard.exchange.model_family import list_rules
from regard.models.architectures import preset, resolve

every = pytest.mark.parametrize("name", EVERY)
close: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


@every
def test_logits_are_theirs(name: str, tmp_path: Path) -> None:
    peer, package, _ = imported(name, tmp_path)
    with torch.no_grad():
        theirs, ours = logits(name, peer, package)
    torch.testing.assert_close(ours, theirs, **close)


PRESETS = {
    "gpt2": "gpt2", "llama": "llama-7b", "bloom": "bloom", "bert": "bert-base", "roberta": "roberta-base",
    "roformer": "roformer-base", "deberta-1": "deberta-base", "deberta-3": "deberta-v3-base", "t5": "t5-small",
    "t5-1.1": "t5-v1.1-small", "mixtral": "mixtral-8x7b", "switch": "switch-base-8", "bart": "bart-base",
    "vit": "vit-base-16", "mamba": "mamba-130m", "mamba2": "mamba2-130m", "rwkv": "rwkv-169m",
}  # fmt: skip
SIZES = {
    *(
        "preset",
        "n_encoder_layers",
        "n_decoder_layers",
        "d_model",
        "n_heads",
        "n_kv_heads",
        "d_head",
        "d_ff",
        "max_len",
    ),
    *("t5", "switch", "mixtral", "disentangled", "vit", "sinusoidal", "n_classes", "mamba", "mamba2"),
    *("source_vocab", "target_vocab", "eos_token_id", "suppress_tokens", "dropout"),
}
UNUSED = {"vit": {"scale_embeddings"}, "deberta-1": {"positions"}, "deberta-3": {"positions"}}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_architectures_that_have_their_logits(name: str, tmp_path: Path) -> None:
    """A preset's settings other than sizes are those of an imported model, whose logits are compared above."""
    _, package, _ = imported(name, tmp_path)
    found, expected = to_dict(resolve(preset(PRESETS[name]))), to_dict(package.config)
    ignored = SIZES | UNUSED.get(name, set())
    assert {k: v for k, v in found.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }


@pytest.mark.parametrize("name", ["t5", "switch"])
def test_one_rate_of_dropout_there_is_three_here(name: str, tmp_path: Path) -> None:
    """transformers drops attention weights and numbers inside feed-forward layers with the rate of the residual path."""
    peer = stirred(name)
    peer.config.dropout_rate = 0.3
    peer.save_pretrained(tmp_path / "in")
    package, _ = read_huggingface(tmp_path / "in", CPU)
    config = package.config
    assert (config.dropout, config.attention_dropout, config.ff_dropout) == (0.3, 0.3, 0.3)
    # Inference has no dropout: a model with three rates can be exported, and that of the residual path is written.
    package.model.config = replaced(config, dropout=0.2, attention_dropout=0.0)  # type: ignore[assignment]
    write_huggingface(tmp_path / "out", package)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dropout_rate"] == 0.2


@every
def test_there_and_back_nothing_has_changed(name: str, tmp_path: Path) -> None:
    """The round trip passes through a folder of ours. Only position rows that nothing reads come back as zeros."""
    peer, package, report = imported(name, tmp_path)
    folders.save(tmp_path / "ours", package, "")
    package = folders.load(tmp_path / "ours", CPU)
    out = write_huggingface(tmp_path / "back", package)
    back = getattr(transformers, out.kind).from_pretrained(tmp_path / "back").eval()
    before, after = peer.state_dict(), back.state_dict()
    lost = {key for key in before if key.startswith("cls.seq_relationship.")}
    assert before.keys() - lost == after.keys() | (
        {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} if lost else set()
    )
    for key, expected in after.items():
        first = 2 if "position" in key and name.split("-")[0] in ("roberta", "bart") else 0
        assert torch.equal(expected[first:], before[key][first:]), key
    ignored = ["transformers_version", "architectures"]
    if name in BARE_DECODERS:  # the head of ours is the embedding
        ignored += ["tie_word_embeddings"]
        assert back.config.tie_word_embeddings
    old, new = (json.loads((tmp_path / at / "config.json").read_text()) for at in (name, "back"))
    assert {k: v for k, v in old.items() if k not in ignored} == {k: new[k] for k in old if k not in ignored}
    assert report.kind == out.kind or lost


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *PAIRS])
def test_the_embedding_and_the_special_tokens_are_theirs(name: str, tmp_path: Path) -> None:
    """Embedding rows, the end token and the tokens that are never generated keep their ids."""
    peer, package, _ = imported(name, tmp_path)
    ours: Any = package.model
    mine = ours.source_embedding if name in PAIRS else ours.embedding
    assert len(mine.weight) == peer.config.vocab_size
    if not name.startswith("marian"):  # whose channels change places
        assert torch.equal(mine.weight, peer.get_input_embeddings().weight)
    config = peer.config
    eos = -1 if name.startswith(("bert", "roformer", "deberta")) else config.eos_token_id
    known = {getattr(config, f"{role}_token_id", None) for role in ("bos", "pad")} - {None, eos}
    assert (package.config.eos_token_id, package.config.suppress_tokens) == (eos, tuple(sorted(known)))


# ---- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_continuations_are_theirs(name: str, tmp_path: Path) -> None:
    peer, package, _ = imported(name, tmp_path)
    theirs, ours, _ = texts(peer, (5,))
    expected = peer.generate(theirs, attention_mask=torch.ones_like(theirs), do_sample=False, max_new_tokens=12)
    with torch.no_grad():
        scores, state = package.model.begin(ours)  # type: ignore[operator]
        said: list[int] = []
        while len(said) < 12 and package.config.eos_token_id not in said:
            said.append(int(scores.argmax(-1)))
            scores = package.model.step(torch.tensor(said[-1:]), state)  # type: ignore[operator]
    assert said == expected[0, 5:].tolist()


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_translations_are_theirs(name: str, tmp_path: Path) -> None:
    """Decoding starts with the token template's start: for BART its end token, then the forced <s>."""
    peer, package, _ = imported(name, tmp_path)
    theirs, ours, _ = texts(peer, (7,))
    padding = peer.config.pad_token_id
    settings = {
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": 12,
        "suppress_tokens": [padding],
        "use_cache": name == "switch",  # without a cache its experts drop tokens of the decoder
    }
    expected = peer.generate(theirs, attention_mask=torch.ones_like(theirs), **settings)[0]
    assert package.token_template.start == ((2, 0) if name == "bart" else (peer.config.decoder_start_token_id,))
    with torch.no_grad():
        state, said = package.model.begin(ours), []  # type: ignore[operator]
        for token in package.token_template.start:
            scores = package.model.step(torch.tensor([token]), state)  # type: ignore[operator]
        while len(said) < 13 - len(package.token_template.start) and package.config.eos_token_id not in said:
            scores[:, padding] = -torch.inf
            said.append(int(scores.argmax(-1)))
            scores = package.model.step(torch.tensor(said[-1:]), state)  # type: ignore[operator]
    assert said == expected[len(package.token_template.start) :].tolist()


# ---- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "t5-1.1", "switch"])
def test_loss_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    """The rules are differentiable, so that our loss has gradients with respect to their weights.

    Both models run in fp64: sums in another order then differ by about 1e-15, far less than any missing term. T5 alone
    computes its norms and softmaxes in fp32 (some 20 of them, each wrong by a few eps); an error in an unscaled score
    is multiplied by the size of the score, here about ten: a thousand eps in all, of each gradient's own norm.
    """
    peer, package, _ = imported(name, tmp_path)
    model = package.model.double()
    peer = peer.double()
    rules = list_rules(FAMILIES[package.origin["family"]], package.config)
    leaves = {k: p.detach().clone().requires_grad_() for k, p in peer.named_parameters() if p.requires_grad}
    rules = [rule for rule in rules if all(source.name in leaves for source in rule.sources)]
    theirs, ours, real = texts(peer)
    weights = {rule.ours: rule.to_ours(leaves) for rule in rules}
    if name in PAIRS:
        start = torch.full((3, 1), peer.config.decoder_start_token_id)
        target, first = torch.cat([start, theirs[:, :3]], 1), torch.cat([start, ours[:, :3]], 1)
        said = peer(input_ids=theirs, attention_mask=real.long(), decoder_input_ids=target).logits.flatten(0, 1)
        found = functional_call(model, weights, (ours, first)).flatten(0, 1)
        wanted = theirs[:, :4].flatten(), ours[:, :4].flatten()
    else:
        said = peer(input_ids=theirs, attention_mask=real.long()).logits[real]
        found = functional_call(model, weights, (ours,))[real]
        wanted = (theirs.roll(1, 1)[real],) * 2
    losses = F.cross_entropy(said, wanted[0]), F.cross_entropy(found, wanted[1])
    rounding = 1024 * torch.finfo(torch.float32).eps if name.startswith(("t5", "switch")) else 0.0
    torch.testing.assert_close(losses[1], losses[0], atol=1e-12, rtol=rounding)
    for loss in losses:
        loss.backward()
    whole = torch.cat([p.grad.flatten() for p in peer.parameters() if p.requires_grad]).norm()
    for key, p in peer.named_parameters():
        if p.requires_grad:
            tolerance = rounding * p.grad.norm() + 1e-12 * whole
            assert (leaves[key].grad - p.grad).norm() < tolerance, key


# ---- forms of files ---------------------------------------------------------------------------------------------------


def test_shards_and_half_precision_are_read(tmp_path: Path) -> None:
    peer = stirred("llama").to(torch.bfloat16)
    peer.save_pretrained(tmp_path / "peer", max_shard_size="8KB")
    assert len(list((tmp_path / "peer").glob("*.safetensors"))) > 2
    peer = type(peer).from_pretrained(tmp_path / "peer", dtype=torch.float32).eval()
    package, _ = read_huggingface(tmp_path / "peer", CPU)
    assert {p.dtype for p in package.model.parameters()} == {torch.float32}
    with torch.no_grad():
        theirs, ours = logits("llama", peer, package)
    torch.testing.assert_close(ours, theirs, **close)


def test_older_names_and_written_out_copies_are_read(tmp_path: Path) -> None:
    """bert-base-uncased has gamma and beta, the tied matrix twice, and some names without the prefix."""
    _, package, _ = imported("bert", tmp_path)
    path = tmp_path / "bert" / "model.safetensors"
    tensors = load_file(path)
    words = tensors["bert.embeddings.word_embeddings.weight"]
    new = {"cls.predictions.decoder.weight": words.clone(), "bert.embeddings.position_ids": torch.arange(512)[None]}
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for k, x in tensors.items()
    }
    save_file({k.removeprefix("bert.") if "layer.0" in k else k: x for k, x in {**old, **new}.items()}, path)
    again, report = read_huggingface(tmp_path / "bert", CPU)
    for (key, p), (_, q) in zip(package.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(p, q) or key.startswith("pooler."), key
    assert report.ignored["cls.predictions.decoder.weight"] == "the same as bert.embeddings.word_embeddings.weight"
    assert report.fresh == ["pooler.inner.weight", "pooler.inner.bias"]


@pytest.mark.parametrize("version", ["DebertaV2", "Deberta"])
def test_microsofts_names_of_debertas_head_are_read(version: str, tmp_path: Path) -> None:
    settings = deberta3 if version == "DebertaV2" else deberta
    peer = make(f"{version}ForMaskedLM", f"{version}Config", **settings, legacy=False)().eval()
    peer.save_pretrained(tmp_path / "in")
    package, report = read_huggingface(tmp_path / "in", CPU)
    assert all(key.startswith("pooler.") for key in report.fresh)
    with torch.no_grad():
        theirs, ours = logits("deberta-3", peer, package)
        torch.testing.assert_close(ours, theirs, **close)
        write_huggingface(tmp_path / "out", package)
        back = type(peer).from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(logits("deberta-3", back, package)[0], theirs, **close)


def test_the_report_accounts_for_every_tensor(tmp_path: Path) -> None:
    _, package, report = imported("bert-pretraining", tmp_path)
    there = set(load_file(tmp_path / "bert-pretraining" / "model.safetensors"))
    mapped = {name for row in report.mapped for name in row.theirs}
    assert mapped | report.ignored.keys() == there
    assert {row.ours for row in report.mapped} | set(report.fresh) == dict(package.model.named_parameters()).keys()
    qkv = next(row for row in report.mapped if row.ours == "encoder.blocks.1.sublayers.self.qkv.weight")
    assert (qkv.shape, qkv.how, len(qkv.theirs)) == ((96, 32), "joined, by head of keys", 3)
    assert "cls.seq_relationship.weight: ignored" in report.table()


def test_a_model_without_a_head_starts_one_and_says_so(tmp_path: Path) -> None:
    for name in BARE.keys() - BARE_DECODERS.keys():
        _, package, report = imported(name, tmp_path)
        assert {key.split(".")[0] for key in report.fresh} == {"head"}
        assert package.task == "masked-lm"


@pytest.mark.parametrize("name", BARE_DECODERS)
def test_a_decoder_without_a_head_generates_with_its_embedding(name: str, tmp_path: Path) -> None:
    """In Regard, and in transformers after an export, where the class with a head loads the folder."""
    _, package, report = imported(name, tmp_path)
    assert (package.task, package.config.tie, report.fresh) == ("causal-lm", "all", [])
    write_huggingface(tmp_path / "out", package)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    theirs, ours, real = texts(peer)
    with torch.no_grad():
        said = peer(input_ids=theirs, attention_mask=real.long()).logits[real]
        torch.testing.assert_close(package.model(ours)[real], said, **close)


@pytest.mark.parametrize("name", ["gpt2-own-head", "rwkv", "mamba2-biased"])
def test_a_folder_with_a_head_that_does_not_name_its_class_keeps_the_head(name: str, tmp_path: Path) -> None:
    peer = stirred(name)
    assert not peer.config.tie_word_embeddings
    peer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != "architectures"}))
    package, _ = read_huggingface(tmp_path, CPU)
    theirs, ours, real = texts(peer)
    with torch.no_grad():
        said = peer(input_ids=theirs, attention_mask=real.long()).logits[real]
        torch.testing.assert_close(package.model(ours)[real], said, **close)
    assert package.config.tie == "none"


def test_a_folder_of_theirs_can_be_used_and_tuned_as_it_is(tmp_path: Path) -> None:
    _, package, _ = imported("bert", tmp_path)
    assert load_model(tmp_path / "bert", CPU).config == package.config
    assert model_settings(tmp_path / "bert") == to_dict(package.config)
