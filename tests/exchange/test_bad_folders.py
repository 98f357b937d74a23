"""Folders that cannot be imported are refused in one line, and nothing is written; the commands `import` and `export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from peers import CPU, stirred, transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from regard import model_folder as folders
from regard.cli import exchange_commands
from regard.errors import RegardError
from regard.exchange.huggingface import read_huggingface
from regard.exchange.loader import load_model
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator


@pytest.fixture
def peer_folder(tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        stirred(name).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path) -> str:
    with pytest.raises(RegardError) as error:
        read_huggingface(folder, CPU)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_everything_that_does_not_fit_is_listed_at_once(peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert")
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.1.attention.self.key.weight"], tensors["cls.predictions.bias"]
    tensors["bert.encoder.layer.0.output.dense.weight"] = torch.zeros(3, 4)
    tensors["bert.encoder.layer.2.output.dense.bias"] = torch.zeros(5)
    tensors["cls.predictions.decoder.weight"] = torch.zeros(41, 32)
    save_file(tensors, folder / "model.safetensors")
    said = refused(folder)
    assert "bert.encoder.layer.1.attention.self.key.weight [32, 32] is missing" in said
    assert "cls.predictions.bias [41] is missing" in said
    assert "bert.encoder.layer.0.output.dense.weight is [3, 4], not [32, 48]" in said
    assert "bert.encoder.layer.2.output.dense.bias [5] is not part of a BERT model" in said
    assert "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight" in said


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "bert",
            {"model_type": "mpt"},
            r"'mpt' model: Regard reads GPT-2, LLaMA, Mixtral, BLOOM, BERT, .*BART, Marian",
        ),
        ("bert", {"model_type": None}, r"Regard reads"),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, r"a BertForQuestionAnswering: of BERT, Regard reads"),
        ("bert", {"is_decoder": True}, r"is_decoder True"),
        ("bert", {"position_embedding_type": "relative_key"}, r"position_embedding_type 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, r"hidden_act 'mish': Regard has gelu"),
        ("bert", {"hidden_size": None}, r"no 'hidden_size'"),
        ("bert", {"hidden_size": "wide"}, r"hidden_size 'wide', which must be a whole number of at least 1"),
        ("bert", {"intermediate_size": 0}, r"intermediate_size 0, which must be"),
        ("bert", {"architectures": "BertForMaskedLM"}, r"architectures 'BertForMaskedLM', which must be a list"),
        ("bert", {"layer_norm_eps": "small"}, r"model.norm_eps' must be of type float"),
        ("bert", {"hidden_act": ["gelu"]}, r"config.json has a value that cannot be"),
        ("bert-row", {"id2label": {"first": "a"}}, r"config.json has a value that cannot be"),
        ("gpt2", {"n_embd": "wide"}, r"n_embd 'wide', which must be"),
        ("gpt2", {"n_head": 0}, r"n_head 0, which must be"),
        ("gpt2", {"n_layer": True}, r"n_layer True, which must be"),
        ("bloom", {"n_head": None}, r"no 'n_head'"),
        ("bloom", {"hidden_size": None}, r"no 'hidden_size'"),
        ("bloom", {"n_layer": 0}, r"n_layer 0, which must be"),
        ("llama", {"num_attention_heads": 0}, r"num_attention_heads 0, which must be"),
        ("llama", {"num_key_value_heads": 0}, r"num_key_value_heads 0, which must be"),
        ("llama", {"rope_parameters": "x"}, r"rope_parameters 'x', which must be an object"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, r"'linear' without a factor"),
        ("t5", {"num_layers": 0}, r"num_layers 0, which must be"),
        ("bart", {"decoder_start_token_id": 400}, r"config.json does not say what its decoder starts with"),
        ("vit", {"image_size": [12, 16]}, r"image_size \[12, 16\], which must be"),
        ("vit", {"image_size": 13}, r"image_size 13, which patches of patch_size 4 do not fill"),
        ("bert", {"vocab_size": 40}, r"word_embeddings.weight is \[41, 32\], not \[40, 32\]"),
        ("bert", {"vocab_size": "all"}, r"vocab_size"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx True"),
        ("gpt2", {"tie_word_embeddings": False}, r"lm_head.weight \[41, 32\] is missing"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, r"rope_type 'llama3'"),
        ("llama", {"mlp_bias": True}, r"attention_bias and mlp_bias apart"),
        ("roformer", {"rotary_value": True}, r"rotary_value True"),
        ("roformer", {"embedding_size": 16}, r"embedding_size"),
        ("deberta-3", {"share_att_key": False}, r"share_att_key False"),
        ("deberta-3", {"pos_att_type": "c2p"}, r"pos_att_type \['c2p'\]"),
        ("t5", {"feed_forward_proj": "gated-mish"}, r"feed_forward_proj 'gated-mish'"),
        ("bart", {"decoder_ffn_dim": 64}, r"48 encoder_ffn_dim and 64 decoder_ffn_dim"),
        ("marian", {"decoder_vocab_size": 50}, r"decoder_vocab_size of 50"),
        ("bert-row", {"problem_type": "multi_label_classification"}, r"multi_label_classification"),
        ("vit", {"qkv_bias": False}, r"qkv_bias False"),
    ],
)
def test_settings_that_we_cannot_honour_are_refused_by_name(
    name: str, change: dict[str, Any], said: str, peer_folder: Callable[[str], Path]
) -> None:
    folder = peer_folder(name)
    set_config(folder, **change)
    with pytest.raises(RegardError, match=said):
        read_huggingface(folder, CPU)


def test_pickles_are_refused_with_the_reason(peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled (pytorch_model.bin), and loading a pickle can run any code in it" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no weights in" in refused(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", b"{"), ("config.json", b"[1]"), ("model.safetensors", None), ("tokenizer.json", b"{}")],
)
def test_broken_files_are_named(file: str, content: bytes | None, peer_folder: Callable[[str], Path]) -> None:
    path = peer_folder("bert") / file
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert file in refused(path.parent)


def test_an_index_cannot_name_files_elsewhere(peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert")
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../other.safetensors", "weights.bin", 3):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        assert "which is not a file of safetensors in its folder" in refused(folder)
    index.write_text("{}")
    assert "cannot read" in refused(folder)


def test_numbers_that_are_not_finite_are_refused(peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert "decoder.norm.bias would hold numbers that are not finite" in refused(folder)


@pytest.mark.parametrize(("task", "name"), [("generate", "gpt2"), ("embed", "bert"), ("embed", "gpt2")])
def test_a_model_without_a_tokenizer_says_so_when_it_is_given_texts(
    task: str, name: str, peer_folder: Callable[[str], Path]
) -> None:
    use: Any = Generator.load if task == "generate" else Embedder.load
    with pytest.raises(RegardError, match=r"no tokenizer, so it can read no text: import it with its tokenizer\.json"):
        use(peer_folder(name), "cpu")


# ---- the verbs --------------------------------------------------------------------------------------------------------

app = typer.Typer()
app.command("import")(exchange_commands.import_model)
app.command("export")(exchange_commands.export_model)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_import_and_export_from_the_command_line(
    peer_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = peer_folder("gpt2")
    monkeypatch.chdir(tmp_path)
    assert run("import", str(folder)).endswith("\ngpt2-regard\n")
    assert folders.load(Path("gpt2-regard"), CPU).task == "causal-lm"
    table = run("import", str(folder), "-o", "two", "--verbose", "--report", "report.json")
    assert (
        "transformer.h.1.attn.c_attn.weight -> decoder.blocks.1.sublayers.self.qkv.weight [96, 32], transposed" in table
    )
    assert len(json.loads(Path("report.json").read_text())["mapped"]) == 28
    found = json.loads(run("export", "two", "-o", "back", "--json"))
    assert (found["folder"], found["family"], found["kind"]) == ("back", "GPT-2", "GPT2LMHeadModel")
    first, second = (load_file(at / "model.safetensors") for at in (folder, Path("back")))
    assert all(torch.equal(x, second[key]) for key, x in first.items())


def test_nothing_is_overwritten_or_half_written(
    peer_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = peer_folder("bert")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RegardError, match="already there"):
        run("import", str(folder), "-o", str(folder))
    set_config(folder, hidden_act="mish")
    with pytest.raises(RegardError, match="mish"):
        run("import", str(folder), "-o", "out")
    with pytest.raises(RegardError, match="unknown format 'onnx'"):
        run("export", str(folder), "-o", "out", "--format", "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


# ---- what transformers assumes ----------------------------------------------------------------------------------------


def test_a_configuration_without_model_type_is_told_what_to_add(peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    assert 'add "model_type", one of "gpt2", "llama"' in refused(folder)
    with pytest.raises(RegardError, match='add "model_type"'):
        load_model(folder, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 3, "id2label": {"0": "a", "1": "b"}},
        {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c"}},
        {"num_labels": 3, "id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}},
        {"num_labels": 3, "id2label": None},
        {"num_labels": 3, "id2label": {}},
        {"id2label": {"0": "a", "1": "b", "2": "c"}},
    ],
)
def test_labels_are_those_of_transformers(changes: dict[str, Any], peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert-row")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    package, _ = read_huggingface(folder, CPU)
    assert package.labels == tuple(theirs.id2label[i] for i in range(theirs.num_labels))
    assert package.config.n_classes == theirs.num_labels == 3


@pytest.mark.parametrize("change", [{"num_labels": 50}, {"num_labels": 10**9}, {"num_labels": "3"}, {"num_labels": -1}])
def test_labels_that_no_tensor_has_are_refused(change: dict[str, Any], peer_folder: Callable[[str], Path]) -> None:
    folder = peer_folder("bert-row")
    set_config(folder, **change)
    assert "num_labels" in refused(folder) or "classifier.weight is [3, 32], not [50, 32]" in refused(folder)
