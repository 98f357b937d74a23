"""What is computed of a folder of transformers, once by exchange_make.py with the old code and then by the test.

A folder is made of its small files, which data/exchange.json holds, and of weights that follow from the names and shapes of
the tensors: whole numbers of a generator whose stream numpy guarantees, times a power of two, so exact on every machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import convert
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import model_folder as folders
from regard.exchange.huggingface import read_huggingface, write_huggingface
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset

CPU = torch.device("cpu")
SPARE = 40  # the id of theirs that stands on padding
LENGTHS = (11, 4, 8)


def drawn(name: str, shape: list[int], scale: int = 1) -> Tensor:
    """Return the tensor of a name and a shape: multiples of 2^-17 between -scale/4 and scale/4, for gains around 1."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).randint(-(2**15), 2**15, shape)
    x = torch.from_numpy(numbers.astype(np.float32)) * scale / 2**17
    return x + 1 if len(shape) < 2 and not name.endswith("bias") else x


def make_folder(folder: Path, case: Mapping[str, Any]) -> dict[str, Tensor]:
    """Write the folder of a case, and return its tensors."""
    folder.mkdir(parents=True)
    for name, content in case["files"].items():
        if name.endswith(".spm"):
            (folder / name).write_bytes(base64.b64decode(content))
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    tensors = {name: drawn(f"{case['seed']} {name}", shape, case["scale"]) for name, shape in case["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def digest(x: Tensor) -> str:
    """Return what identifies a tensor: dtype, shape and the beginning of the SHA-256 of its bytes."""
    return f"{x.dtype} {list(x.shape)} {hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:24]}"


def exported(folder: Path, out: Path) -> tuple[ModelPackage, dict[str, Tensor], dict[str, Any]]:
    """Import a folder, save it as a folder of Regard's, load and export that: the imported model, the tensors and the small
    files that went out."""
    package, _ = read_huggingface(folder, CPU)
    folders.save(out / "ours", package, "")
    write_huggingface(out / "back", folders.load(out / "ours", CPU))
    return package, *contents(out / "back")


def contents(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the small files of a folder, without the list of their checksums."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != "manifest.json"]
    return load_file(folder / "model.safetensors"), {path.name: json.loads(path.read_text("utf-8")) for path in paths}


# ---- logits -----------------------------------------------------------------------------------------------------------


def renumbered(package: ModelPackage) -> Tensor | None:
    """Return the id here of each id of theirs, if they differ."""
    numbering = package.origin.get("numbering")
    if numbering is None:
        return None
    from regard.exchange.numbering import Numbering

    return torch.tensor(Numbering.from_dict(numbering).ours)


def logits(package: ModelPackage, bare: bool) -> Tensor:
    """Return the logits of fixed inputs, real tokens alone, in the order of their vocabulary.

    Of a `bare` model, which came without a head, they are the vectors that a head would read."""
    config, model = package.config, package.model
    with torch.no_grad():
        if config.architecture == "vit":
            return model(drawn("images", [2, 3, 12, 12]))
        ids = torch.from_numpy(np.random.RandomState(1).randint(10, SPARE, (3, max(LENGTHS))))
        real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        order = renumbered(package)
        ours = (ids if order is None else order[ids]).where(real, torch.tensor(convert.PADDING))
        if config.architecture == "transformer":
            first = torch.tensor([package.token_template.start[:1]] * len(ids))
            found = model(ours, torch.cat([first, ours[:, :3]], 1)).flatten(0, 1)
        else:
            types = (torch.arange(max(LENGTHS)) > 5).long().expand_as(ids) * (config.token_types > 1)
            if bare:
                return model.hidden(ours, types)[real]  # type: ignore[operator]
            found = model(ours, *([types] if config.architecture == "bert" or config.prediction_head != "none" else []))
            found = found[real] if found.dim() == 3 else found
        return found if order is None or config.prediction_head != "none" else found[:, order]


# ---- texts ------------------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat on the mat", "the cat", "a cat sat"]


def answers(package: ModelPackage) -> list[dict[str, Any]]:
    """Return what a model with a tokenizer makes of texts: translations, continuations and their scores, or vectors."""
    if package.config.architecture == "transformer":
        several = Translator(package).translate(TEXTS, beam=4, nbest=2, max_len_a=1.0, max_len_b=4)
        return [
            {"text": found.text, "tokens": list(found.tokens), "score": found.score, "ended": found.ended}
            for best in several
            for found in best.nbest
        ]
    if package.config.architecture == "gpt":
        writer = Generator(package)
        written = [
            {"text": found.text, "tokens": list(found.tokens), "log_prob": found.log_prob, "end": found.end}
            for found in writer.generate(TEXTS, max_new_tokens=8, temperature=0.0)
        ]
        scored = [{"tokens": list(found.tokens), "log_probs": list(found.log_probs)} for found in writer.score(TEXTS)]
        return written + scored
    return [{"vector": row.tolist()} for row in Embedder(package).embed(TEXTS)]


# ---- models that were made here -------------------------------------------------------------------------------------------


def home(case: Mapping[str, Any], out: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Export a model of Regard's own, whose weights follow from their names in commit 0802df8."""
    model = made_here(case)
    old = {name: drawn(f"home {name}", shape) for name, shape in case["weights"].items()}
    fill(model, convert.weights(old, case["sizes"]))
    task = {"row": "classification", "token": "tagging"}.get(case["settings"].get("answer"), "causal-lm")
    labels = tuple("abc") if case["settings"].get("answer") else ()
    write_huggingface(out, ModelPackage(model.eval(), None, task, labels=labels))
    return contents(out)


def made_here(case: Mapping[str, Any]) -> nn.Module:
    settings = convert.settings(case["settings"])
    return make_model(preset(settings.pop("preset"), **settings))


def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])
