"""Import and export of Hugging Face transformers folders as a `ModelPackage`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.exchange import hf_tokenizer
from regard.exchange.families import FAMILIES, choose_class, find_family, match_family
from regard.exchange.hf_metadata import (
    TrackedConfig,
    get_image_side,
    read_decode_config,
    read_labels,
    read_pixels,
    read_pooling,
    read_token_template,
    refuse_malformed,
)
from regard.exchange.model_family import Family, ModelClass, list_rules, read_size
from regard.exchange.safetensors_folder import SINGLE, SafetensorsCheckpoint
from regard.exchange.tensor_rules import Rule, export_tensors
from regard.exchange.weight_conversion import ConversionReport, account_for_tensors, load_tensors, match_tensors
from regard.files import atomic_folder, exists, read_json_object
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of, make_model
from regard.models.weights import SizeLimit
from regard.text.special_tokens import SpecialTokens

# Small files that are kept on import and written unchanged on export.
KEPT = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "preprocessor_config.json")


# ---- import -----------------------------------------------------------------------------------------------------------


def read_huggingface(folder: Path, device: torch.device) -> tuple[ModelPackage, ConversionReport]:
    """Read a folder that transformers saved as a model of ours; everything that does not fit is listed in one error."""
    if not exists(folder / "config.json"):
        raise RegardError(f"no config.json in {folder}: give a folder that transformers' save_pretrained has written")
    raw = read_json_object(folder / "config.json")
    family, name = find_family(raw)
    checkpoint, model_class = SafetensorsCheckpoint(folder), family.classes[name]
    given = {key: value for key, value in raw.items() if value is not None}
    their = TrackedConfig({**read_json_object(folder / "generation_config.json"), **given})
    reads_text = not family.model.sees_images
    tokenizer = hf_tokenizer.read_tokenizer(folder) if reads_text else None
    with refuse_malformed(folder / "config.json"):
        pieces, special, size = tokenizer.pieces if tokenizer else {}, SpecialTokens(), 0
        if reads_text:
            size = read_size(their, "vocab_size")
            checkpoint.check_rows(size, "vocab_size")
            special = hf_tokenizer.read_special_tokens(their, folder, pieces, family.model)
        labels, task = read_labels(family, model_class, their, checkpoint)
        sizes = {f"{side}_vocab": size for side in family.model.vocabularies} | (
            {"n_classes": len(labels)} if labels else {}
        )
        sizes |= special.model_settings()
        config = family.to_ours(their, model_class, **sizes, **read_head_settings(family, model_class, checkpoint))
        token_template = read_token_template(family, tokenizer, their, special)
        decode = read_decode_config(their)
    report = ConversionReport(family.name, name)
    model, groups = build_model(family, model_class, config, checkpoint, report)
    if reads_text and tokenizer is None:
        report.notes.append("no tokenizer in the folder: this model reads and writes ids alone")
    package = ModelPackage(
        model.to(device).eval(),
        tokenizer.to_ours(special, size) if tokenizer else None,
        task,
        decode=decode,
        labels=labels,
        token_template=token_template,
        pooling=read_pooling(folder),
        pixels={} if reads_text else read_pixels(folder, model.config, report.notes),  # type: ignore[arg-type]
        origin={
            "family": family.model_type,
            "kind": name,
            "groups": groups,
            "config": raw,
            "files": {file: read_json_object(folder / file) for file in KEPT if exists(folder / file)},
        },
    )
    report.unread = sorted(raw.keys() - their.read_keys)
    return package, report


def build_model(
    family: Family,
    model_class: ModelClass,
    config: ModelConfig,
    checkpoint: SafetensorsCheckpoint,
    report: ConversionReport,
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model with the tensors of the file, and the groups of tensors that the file has."""
    with SizeLimit(config, checkpoint.shapes, checkpoint.folder):
        model = make_model(config)
    own_config: ModelConfig = model.config  # type: ignore[assignment]
    found = match_tensors(family, model_class, list_rules(family, own_config), model, checkpoint)
    account_for_tensors(family, found, model, checkpoint, report)
    load_tensors(model, found, checkpoint, report, checkpoint.folder)
    return model, found.groups


LOGITS_BIAS = "final_logits_bias"
OUTPUT_MATRICES = {"lm_head.weight", "head.weight"}  # of decoders


def read_head_settings(family: Family, model_class: ModelClass, checkpoint: SafetensorsCheckpoint) -> dict[str, Any]:
    """Return the settings of the head that only the tensors show.

    These are whether T5's head is tied, since newer versions of transformers write tie_word_embeddings true in any case;
    whether the logits' bias of BART and Marian is more than zeros; and that a bare decoder without an output matrix predicts
    with its embedding, whatever config.json says. A folder that does not name its class is taken for a bare one, and may
    have that matrix.
    """
    names = checkpoint.files.keys()
    if model_class.headless and family.model.generates:
        return {} if OUTPUT_MATRICES & names else {"tie": "all"}
    if LOGITS_BIAS in names:
        return {"head_bias": bool(checkpoint.tensor(LOGITS_BIAS).any())}
    if family.model_type != "t5":
        return {}
    tied = "lm_head.weight" not in names or torch.equal(
        checkpoint.tensor("lm_head.weight"), checkpoint.tensor("shared.weight")
    )
    return {"tie": "all" if tied else "inputs"}


# ---- export -----------------------------------------------------------------------------------------------------------


def write_huggingface(folder: Path, package: ModelPackage) -> ConversionReport:
    """Write a folder that transformers loads, of the family that the model came from or whose settings it has."""
    config, origin = package.config, package.origin
    family = FAMILIES[origin["family"]] if origin else match_family(config)
    wrong = family.list_differences(config)
    if wrong:
        raise RegardError(f"this model came from {family.name} but is none any more: {'; '.join(wrong)}")
    check_square_images(package)
    name, model_class = choose_class(family, config, origin.get("kind", ""))
    same_head = config.prediction_head == find_original_head(origin)
    groups = {*model_class.groups, *(origin.get("groups", ()) if same_head else ())}
    every = list(list_rules(family, config))
    rules = [rule for rule in every if rule.group in groups]
    report = make_export_report(family, name, rules, every, package.model)
    own_tensors = {n: p.detach().cpu() for n, p in package.model.named_parameters()}
    tensors = export_tensors(rules, own_tensors | family.absorb(config, own_tensors)) | family.constants(config)
    tensors |= {copy: tensors[of].clone() for copy, of in family.written_copies(config).items()}
    if model_class.headless:
        tensors = {n.removeprefix(family.prefix): x for n, x in tensors.items()}
    if family.model.generates and model_class.prediction_head == "sequence":
        report.notes.append(
            "it predicts at the end of a text: end each with the end token, and set pad_token_id for batches"
        )
    with atomic_folder(folder) as draft:
        save_file(tensors, draft / SINGLE, metadata={"format": "pt"})
        write_json(draft / "config.json", make_hf_config(family, name, package))
        files = {file: values for file, values in origin.get("files", {}).items() if file in KEPT}
        if package.tokenizers and package.tokenizers.source is not package.tokenizers.target:
            report.notes.append("without tokenizers: transformers has no form for two of them but Marian's own files")
        elif package.tokenizers:
            files = {**hf_tokenizer.write_tokenizer(draft, package), **files}
        if package.pixels:
            files = {"preprocessor_config.json": make_preprocessor_config(package), **files}
        for file, values in files.items():
            write_json(draft / file, values)
    return report


def check_square_images(package: ModelPackage) -> None:
    """Refuse a ViT of images that are not square, which theirs cannot be."""
    side, (height, width) = get_image_side(package.config), map(int, package.pixels.get("size", (1, 1)))
    images = architecture_of(package.config).sees_images
    if images and (
        height != width or (side // package.config.value("vit.patch_size")) ** 2 + 1 != package.config.max_len
    ):
        raise RegardError(
            "a ViT elsewhere reads square images, and this model learned others: train with data.image_size"
        )


def find_original_head(origin: Mapping[str, Any]) -> str:
    """Return the prediction head that a model had when it was imported."""
    return FAMILIES[origin["family"]].classes[origin["kind"]].prediction_head if origin else ""


def make_export_report(
    family: Family, name: str, rules: list[Rule], every: list[Rule], model: torch.nn.Module
) -> ConversionReport:
    """Report what is exported by `rules`.

    Only heads may be left out: those of the family's other classes, and those that no class of the family has.
    """
    report, own_shapes = ConversionReport(family.name, name), {n: tuple(p.shape) for n, p in model.named_parameters()}
    for rule in rules:
        report.add(rule, own_shapes.pop(rule.ours))
    heads = {rule.ours for rule in every if rule.group != "body"}
    lost = [n for n in own_shapes if n not in heads and not n.startswith(("pooler.", "body.pooler.", "body.head."))]
    if lost:
        raise RegardError(f"a {name} has no place for {', '.join(lost)}: this model can be used in Regard alone")
    report.ignored = dict.fromkeys(own_shapes, f"a {name} has no such tensor")
    return report


def make_hf_config(family: Family, class_name: str, package: ModelPackage) -> dict[str, Any]:
    """Return the config.json of a model: the one it came with where there is one, changed where the model has changed."""
    theirs = family.to_theirs(package.config, package.origin.get("config", {}))
    theirs |= {"architectures": [class_name], "dtype": "float32"}
    theirs.pop("torch_dtype", None)
    if not family.model.sees_images:
        theirs["vocab_size"] = package.config.source_vocab or package.config.target_vocab
        if not package.origin:
            theirs |= list_special_ids(package)
    labels = package.labels or [f"LABEL_{i}" for i in range(package.config.n_classes)]
    if labels:
        theirs["id2label"] = {str(i): name for i, name in enumerate(labels)}
        theirs["label2id"] = {name: i for i, name in enumerate(labels)}
    if package.task == "regression":
        theirs["problem_type"] = "regression"
    return theirs


def make_preprocessor_config(package: ModelPackage) -> dict[str, Any]:
    """Return the preprocessor_config.json of a ViT."""
    side = get_image_side(package.config)
    theirs = {"image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_rescale": True, "do_resize": True}
    theirs |= {"image_mean": package.pixels["mean"], "image_std": package.pixels["std"], "rescale_factor": 1 / 255}
    return theirs | {"size": {"height": side, "width": side}}


def list_special_ids(package: ModelPackage) -> dict[str, Any]:
    """Return the ids of special tokens for config.json; without a tokenizer only the end token is known."""
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
