"""Folders of Hugging Face's transformers: reading one as a `ModelPackage`, writing a `ModelPackage` as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange import vocabulary
from regard.exchange.beside import Watched, answers, decoding, frame_of, image_side, pixels, pooling, well_formed
from regard.exchange.checkpoint import SINGLE, Checkpoint
from regard.exchange.families import FAMILIES, find, fitting, kind_for
from regard.exchange.family import Family, Kind, rules_of, whole
from regard.exchange.matching import account, fill, match, theirs_of
from regard.exchange.report import Report
from regard.exchange.rules import Rule
from regard.files import atomic_folder, exists, read_json_object
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of, make_model
from regard.models.weights import SizeLimit
from regard.text.special_tokens import SpecialTokens

# Small files beside the model that go out again as they came in.
KEPT = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")


# ---- in ---------------------------------------------------------------------------------------------------------------


def read_huggingface(folder: Path, device: torch.device) -> tuple[ModelPackage, Report]:
    """A folder that transformers saved, as a model of ours; all that does not fit is listed in one error."""
    if not exists(folder / "config.json"):
        raise RegardError(f"no config.json in {folder}: give a folder that transformers' save_pretrained has written")
    raw = read_json_object(folder / "config.json")
    family, name = find(raw)
    checkpoint, said = Checkpoint(folder), {name: value for name, value in raw.items() if value is not None}
    their = Watched({**read_json_object(folder / "generation_config.json"), **said})
    words = not family.model.sees_images
    foreign = vocabulary.read(folder) if words else None
    with well_formed(folder / "config.json"):
        pieces, special, size = foreign.pieces if foreign else {}, SpecialTokens(), 0
        if words:
            size = whole(their, "vocab_size")
            checkpoint.check_rows(size, "vocab_size")
            special = vocabulary.special_tokens(their, folder, pieces, family.model)
        labels, task = answers(family, family.kinds[name], their, checkpoint)
        sizes = vocabulary_sizes(family, size) | ({"n_classes": len(labels)} if labels else {})
        sizes |= special.model_settings()
        config = family.to_ours(their, family.kinds[name], **sizes, **head_of(family, checkpoint))
        token_template, decode = frame_of(family, foreign, their, special), decoding(their)
    report = Report(family.name, name)
    model, groups = filled(family, family.kinds[name], config, checkpoint, report)
    if words and foreign is None:
        report.notes.append("no tokenizer in the folder: this model reads and writes ids alone")
    package = ModelPackage(
        model.to(device).eval(),
        foreign.ours(special, size) if foreign else None,
        task,
        decode=decode,
        labels=labels,
        token_template=token_template,
        pooling=pooling(folder),
        pixels={} if words else pixels(folder, model.config, report.notes),  # type: ignore[arg-type]
        origin={
            "family": family.model_type,
            "kind": name,
            "groups": groups,
            "config": raw,
            "files": {file: read_json_object(folder / file) for file in KEPT if exists(folder / file)},
        },
    )
    report.unread = sorted(raw.keys() - their.asked)
    return package, report


def filled(
    family: Family, kind: Kind, config: ModelConfig, checkpoint: Checkpoint, report: Report
) -> tuple[torch.nn.Module, list[str]]:
    with SizeLimit(config, checkpoint.shapes, checkpoint.folder):
        model = make_model(config)
    own_config: ModelConfig = model.config  # type: ignore[assignment]
    found = match(family, kind, rules_of(family, own_config), model, checkpoint)
    account(family, found, model, checkpoint, report)
    fill(model, found, checkpoint, report, checkpoint.folder)
    return model, found.groups


def vocabulary_sizes(family: Family, size: int) -> dict[str, Any]:
    return {f"{side}_vocab": size for side in family.model.vocabularies}


BIAS = "final_logits_bias"


def head_of(family: Family, checkpoint: Checkpoint) -> dict[str, Any]:
    """Whether T5's head is its own stands in no setting: newer versions call it tied whatever it is. Nor does it whether the
    bias of BART's and Marian's logits is more than zeros."""
    names = checkpoint.files.keys()
    if BIAS in names:
        return {"head_bias": bool(checkpoint.tensor(BIAS).any())}
    if family.model_type != "t5":
        return {}
    tied = "lm_head.weight" not in names or torch.equal(
        checkpoint.tensor("lm_head.weight"), checkpoint.tensor("shared.weight")
    )
    return {"tie": "all" if tied else "inputs"}


# ---- out --------------------------------------------------------------------------------------------------------------


def write_huggingface(folder: Path, package: ModelPackage) -> Report:
    """A folder that transformers loads: of the family a model came from, or of the one that its settings are."""
    config, origin = package.config, package.origin
    family = FAMILIES[origin["family"]] if origin else fitting(config)
    wrong = family.differences(config)
    if wrong:
        raise RegardError(f"this model came from {family.name} but is none any more: {'; '.join(wrong)}")
    refuse_oblong(package)
    name, kind = kind_for(family, config, origin.get("kind", ""))
    groups = {*kind.groups, *(origin.get("groups", ()) if config.answer == came_as(origin) else ())}
    every = list(rules_of(family, config))
    rules = [rule for rule in every if rule.group in groups]
    report = written_report(family, name, rules, every, package.model)
    own_tensors = {n: p.detach().cpu() for n, p in package.model.named_parameters()}
    tensors = theirs_of(rules, own_tensors | family.settle(config, own_tensors)) | family.constants(config)
    if kind.bare:
        tensors = {n.removeprefix(family.prefix): x for n, x in tensors.items()}
    if family.model.generates and kind.answer == "row":
        report.notes.append(
            "it answers at the end of a text: end each with the end token, and set pad_token_id for batches"
        )
    with atomic_folder(folder) as draft:
        save_file(tensors, draft / SINGLE, metadata={"format": "pt"})
        write_json(draft / "config.json", their_config(family, name, package))
        files = {file: values for file, values in origin.get("files", {}).items() if file in KEPT}
        if package.tokenizers and package.tokenizers.source is not package.tokenizers.target:
            report.notes.append("without tokenizers: transformers has no form for two of them but Marian's own files")
        elif package.tokenizers:
            files = {**vocabulary.write(draft, package), **files}
        if package.pixels:
            files = {"preprocessor_config.json": their_pixels(package), **files}
        for file, values in files.items():
            write_json(draft / file, values)
    return report


def refuse_oblong(package: ModelPackage) -> None:
    side, (height, width) = image_side(package.config), map(int, package.pixels.get("size", (1, 1)))
    images = architecture_of(package.config).sees_images
    if images and (
        height != width or (side // package.config.value("vit.patch_size")) ** 2 + 1 != package.config.max_len
    ):
        raise RegardError(
            "a ViT elsewhere reads square images, and this model learned others: train with data.image_size"
        )


def came_as(origin: Mapping[str, Any]) -> str:
    """What a model answered when it came in."""
    return FAMILIES[origin["family"]].kinds[origin["kind"]].answer if origin else ""


def written_report(family: Family, name: str, rules: list[Rule], every: list[Rule], model: torch.nn.Module) -> Report:
    """What goes out by `rules`. Only a head may stay: one of the family's other classes, or one that none of them has."""
    report, own_shapes = Report(family.name, name), {n: tuple(p.shape) for n, p in model.named_parameters()}
    for rule in rules:
        report.add(rule, own_shapes.pop(rule.ours))
    heads = {rule.ours for rule in every if rule.group != "body"}
    lost = [n for n in own_shapes if n not in heads and not n.startswith(("pooler.", "body.pooler.", "body.head."))]
    if lost:
        raise RegardError(f"a {name} has no place for {', '.join(lost)}: this model can be used in Regard alone")
    report.ignored = dict.fromkeys(own_shapes, f"a {name} has no such tensor")
    return report


def their_config(family: Family, kind: str, package: ModelPackage) -> dict[str, Any]:
    theirs = family.to_theirs(package.config, package.origin.get("config", {}))
    theirs |= {"architectures": [kind], "dtype": "float32"}
    theirs.pop("torch_dtype", None)
    if not family.model.sees_images:
        theirs["vocab_size"] = package.config.source_vocab or package.config.target_vocab
        if not package.origin:
            theirs |= own_ids(package)
    labels = package.labels or [f"LABEL_{i}" for i in range(package.config.n_classes)]
    if labels:
        theirs["id2label"] = {str(i): name for i, name in enumerate(labels)}
        theirs["label2id"] = {name: i for i, name in enumerate(labels)}
    if package.task == "regression":
        theirs["problem_type"] = "regression"
    return theirs


def their_pixels(package: ModelPackage) -> dict[str, Any]:
    side = image_side(package.config)
    said = {"image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_rescale": True, "do_resize": True}
    said |= {"image_mean": package.pixels["mean"], "image_std": package.pixels["std"], "rescale_factor": 1 / 255}
    return said | {"size": {"height": side, "width": side}}


def own_ids(package: ModelPackage) -> dict[str, Any]:
    """Those of the special tokens; of a model without a tokenizer the end token alone is known."""
    eos = package.config.eos_token_id
    special = package.tokenizers.source.special if package.tokenizers else SpecialTokens(eos=None if eos < 0 else eos)
    ids: dict[str, Any] = {f"{role}_token_id": getattr(special, role) for role in ("pad", "bos", "eos")}
    if not architecture_of(package.config).translates:
        return ids
    start = package.token_template.start
    ids |= {"decoder_start_token_id": start[0], "is_encoder_decoder": True, "forced_eos_token_id": None}
    return ids | ({"forced_bos_token_id": start[1]} if len(start) > 1 else {})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
