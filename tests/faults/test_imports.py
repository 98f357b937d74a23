"""A folder of Hugging Face's form with a fault is refused in one line or read as the very same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import EVERY, FLIPS, TYPES, WRONG, as_nobody, cases, change_json, content, copied, outcome
from safetensors.torch import load_file, save_file
from tiny_packages import FAMILIES, exported_package

from regard.exchange.families import FAMILIES as KNOWN
from regard.exchange.huggingface import make_hf_config, read_huggingface

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 2], [9, 8, 7, 2, 0, 0, 0]])
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def load(folder: Path) -> Any:
    """Return what an imported model answers, and all else that its folder tells about it."""
    package = read_huggingface(folder, CPU)[0]
    given = {"gpt": (IDS,), "bert": (IDS, torch.zeros_like(IDS))}.get(package.config.architecture, (IDS, IDS))
    with torch.inference_mode():
        answers = package.model(*given)
    pieces = package.tokenizers and package.tokenizers.source.fingerprint()
    return answers.tolist(), pieces, package.labels, package.token_template, package.task


@pytest.fixture(scope="module")
def expected(foreign: dict[str, Path]) -> dict[str, Any]:
    return {family: load(folder) for family, folder in foreign.items()}


@pytest.mark.parametrize(("file", "fault"), cases(FILES))
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_a_fault_in_a_file(
    family: str, file: str, fault: str, foreign: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    """These folders have no checksums that are verified: a bit that makes another valid file is another model."""
    folder = copied(foreign[family], place / "model")
    EVERY[fault](folder / file)
    before = content(folder)
    with as_nobody(fault):
        how, found = outcome(lambda: load(folder))
    without = fault in ("deleted", "link-to-itself") and file in ("tokenizer.json", "tokenizer_config.json")
    assert how == "line" or found == expected[family] or fault in FLIPS or without
    assert content(folder) == before


def sizes() -> list[tuple[str, str]]:
    """Return every whole number in the configurations of the families, and one that none of them writes."""
    found = []
    for family in FAMILIES:
        package = exported_package(family)
        known = KNOWN[family]
        values = make_hf_config(known, next(iter(known.classes)), package)
        found += [(family, name) for name, value in values.items() if type(value) is int and not name.endswith("_id")]
        found += [(family, f"{name}_token_id") for name in ("pad", "eos", "decoder_start")]
        found += [(family, "num_labels")]
    return found


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("family", "name"), sizes())
def test_a_size_in_config_json(
    family: str, name: str, wrong: str, foreign: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(foreign[family], place / "model")
    change_json(folder / "config.json", (name,), WRONG[wrong])
    before = content(folder)
    how, found = outcome(lambda: load(folder))
    # null is the family's default, and which token a decoder starts with is a setting
    chosen = (wrong == "null" and name == "relative_attention_max_distance") or name.endswith("_token_id")
    assert how == "line" or found == expected[family] or chosen
    assert content(folder) == before


@pytest.mark.parametrize("wrong", [*TYPES, "1e9"])
@pytest.mark.parametrize(
    "name",
    ["model_type", "architectures", "hidden_size", "id2label", "layer_norm_eps", "hidden_act", "tie_word_embeddings"],
)
def test_a_value_of_another_type(
    name: str, wrong: str, foreign: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(foreign["bert"], place / "model")
    change_json(folder / "config.json", (name,), (TYPES | WRONG)[wrong])
    how, found = outcome(lambda: load(folder))
    assert how == "line" or found == expected["bert"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "\xff", '{"pad_token": 3}'], ids=range(6)
)
def test_json_files_of_another_form(
    file: str, text: str, foreign: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(foreign["bert"], place / "model")
    (folder / file).write_bytes(text.encode("latin-1"))
    how, found = outcome(lambda: load(folder))
    assert how == "line" or found == expected["bert"] or file == "tokenizer_config.json"


@pytest.mark.parametrize("fault", [name for name in EVERY if name != "deleted"])
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "part.safetensors"])
def test_weights_in_parts(
    file: str, fault: str, foreign: dict[str, Path], expected: dict[str, Any], place: Path
) -> None:
    folder = copied(foreign["gpt2"], place / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "part.safetensors")
    (folder / "part.safetensors").chmod(0o644)
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert outcome(lambda: load(folder)) == ("result", expected["gpt2"])
    EVERY[fault](folder / file)
    with as_nobody(fault):
        how, found = outcome(lambda: load(folder))
    assert how == "line" or found == expected["gpt2"] or fault in FLIPS


@pytest.mark.parametrize("fault", EVERY)
@pytest.mark.parametrize("file", ["vocab.txt", "vocab.json", "merges.txt", "source.spm", "target.spm"])
def test_older_tokenizers(file: str, fault: str, foreign: dict[str, Path], place: Path) -> None:
    folder = copied(
        foreign["marian" if file.endswith("spm") else "bert" if file == "vocab.txt" else "gpt2"], place / "m"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "manifest.json"):
        (folder / name).unlink()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (folder / "vocab.txt" if file == "vocab.txt" else folder / "vocab.json").write_text(
        "\n".join(words) + "\n" if file == "vocab.txt" else json.dumps({word: i for i, word in enumerate(words)})
    )
    if file == "merges.txt":
        (folder / file).write_text("#version: 0.2\n")
    for name in ("source.spm", "target.spm") if file.endswith("spm") else ():
        (folder / name).write_bytes(b"\n\x05\n\x03abc")
    if file == "vocab.json":
        (folder / "merges.txt").write_text("#version: 0.2\n")
    EVERY[fault](folder / file)
    with as_nobody(fault):
        outcome(lambda: load(folder))
