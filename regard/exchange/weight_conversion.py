"""Conversion of a file's tensors by the rules of its family, and the report of what became of each tensor.

Names and shapes are compared before any tensor is copied, and everything that does not fit is listed in one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import RegardError
from regard.exchange.model_family import Family, ModelClass
from regard.exchange.safetensors_folder import SafetensorsCheckpoint
from regard.exchange.tensor_rules import Rule

# ---- report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mapped:
    """The report's entry for one tensor of ours."""

    theirs: tuple[str, ...]
    ours: str
    shape: tuple[int, ...]  # of ours
    how: str  # the steps in words


@dataclass
class ConversionReport:
    """What became of every tensor during import or export."""

    family: str
    kind: str  # the model class of theirs
    mapped: list[Mapped] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)  # their tensor -> why
    fresh: list[str] = field(default_factory=list)  # ours that the file lacks, as initialized
    unread: list[str] = field(default_factory=list)  # keys of config.json that Regard does not use
    notes: list[str] = field(default_factory=list)

    def add(self, rule: Rule, shape: tuple[int, ...]) -> None:
        self.mapped.append(Mapped(rule.names, rule.ours, shape, rule.description))

    def summary(self) -> str:
        lines = [f"{self.family} ({self.kind}): {len(self.mapped)} tensors mapped, {len(self.ignored)} ignored"]
        if self.fresh:
            lines.append(f"fresh, because they have none: {', '.join(self.fresh)}")
        lines += self.notes
        if self.unread:
            lines.append(f"settings without a meaning here: {', '.join(self.unread)}")
        return "\n".join(lines)

    def table(self) -> str:
        lines = [f"{' + '.join(m.theirs)} -> {m.ours} {list(m.shape)}, {m.how}" for m in self.mapped]
        lines += [f"{name}: ignored, {why}" for name, why in self.ignored.items()]
        return "\n".join(lines + [f"{name}: fresh" for name in self.fresh])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# ---- import -----------------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """The rules that apply to a file, and what is wrong with it."""

    rules: list[Rule]  # of the groups whose tensors are in the file
    names: dict[str, str]  # name in the rules -> name in the file
    groups: list[str]
    wrong: list[str] = field(default_factory=list)  # everything that does not fit, in words


def get_expected_shapes(rule: Rule, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """Return the shapes of theirs that make a tensor of ours of this shape."""
    return {name: tuple(x.shape) for name, x in rule.to_theirs(torch.empty(shape, device="meta")).items()}


def match_tensors(
    family: Family, model_class: ModelClass, rules: list[Rule], model: nn.Module, checkpoint: SafetensorsCheckpoint
) -> Match:
    """Return the rules whose tensors the file has or must have, with every missing tensor and wrong shape."""
    own = dict(model.named_parameters())
    copies = family.copies(model.config)  # type: ignore[arg-type]
    names = find_names(checkpoint.files, {n for rule in rules for n in rule.names} | copies.keys(), family)
    there = {rule.group for rule in rules if any(name in names for name in rule.names)}
    groups = [g for g in dict.fromkeys(rule.group for rule in rules) if g in there or g in model_class.groups]
    found = Match([rule for rule in rules if rule.group in groups], names, groups)
    for rule in found.rules:
        for name, shape in get_expected_shapes(rule, own[rule.ours].shape).items():
            if name not in names:
                found.wrong.append(f"{name} {list(shape)} is missing")
            elif checkpoint.shapes[names[name]] != shape:
                found.wrong.append(f"{name} is {list(checkpoint.shapes[names[name]])}, not {list(shape)}")
    return found


def find_names(stored: Iterable[str], known: set[str], family: Family) -> dict[str, str]:
    """Rename the keys of a file: return the names of the rules -> those in the file.

    Names in a file may be older than the rules, or lack the prefix of the body.
    """
    names = {}
    for name in stored:
        name_today = name
        for old, new in (
            *family.old_names,
            (r"LayerNorm\.gamma$", "LayerNorm.weight"),
            (r"LayerNorm\.beta$", "LayerNorm.bias"),
        ):
            name_today = re.sub(old, new, name_today)
        if name_today not in known and family.prefix + name_today in known:
            name_today = family.prefix + name_today
        if name_today in known:
            names[name_today] = name
    return names


def account_for_tensors(
    family: Family, found: Match, model: nn.Module, checkpoint: SafetensorsCheckpoint, report: ConversionReport
) -> None:
    """Check that every tensor of the file is mapped, a copy of a mapped one, or ignored for a reason."""
    copies = family.copies(model.config)  # type: ignore[arg-type]
    used = {name for rule in found.rules for name in rule.names}
    for name, stored in found.names.items():
        if name in used or name not in copies:
            continue
        of = copies[name]
        if of in found.names and not torch.equal(checkpoint.tensor(stored), checkpoint.tensor(found.names[of])):
            found.wrong.append(f"{stored} differs from {of}, though its settings tie them")
        report.ignored[stored] = f"the same as {of}"
    for name in sorted(checkpoint.files.keys() - found.names.values()):
        reasons = [why for pattern, why in family.ignored if re.search(pattern, name)]
        if reasons:
            report.ignored[name] = reasons[0]
        else:
            found.wrong.append(f"{name} {list(checkpoint.shapes[name])} is not part of a {family.name} model")


def load_tensors(
    model: nn.Module, found: Match, checkpoint: SafetensorsCheckpoint, report: ConversionReport, where: Path
) -> None:
    """Copy their tensors into the model unless names or shapes do not fit; raise if anything is wrong."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for rule in found.rules if not found.wrong else ():
            tensor = rule.to_ours({name: checkpoint.tensor(found.names[name]) for name in rule.names})
            if not tensor.isfinite().all():
                found.wrong.append(f"{rule.ours} would hold numbers that are not finite")
            own[rule.ours].copy_(tensor)
            report.add(rule, tuple(tensor.shape))
    if found.wrong:
        raise RegardError(f"the weights in {where} do not fit: {'; '.join(found.wrong)}")
    report.fresh = [name for name in own if name not in {rule.ours for rule in found.rules}]
