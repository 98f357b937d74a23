"""Tensors against rules: everything that does not fit is found before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.exchange.checkpoint import Checkpoint
from regard.exchange.family import Family, Kind
from regard.exchange.report import Report
from regard.exchange.rules import Rule


@dataclass
class Match:
    rules: list[Rule]  # those whose tensors are there
    names: dict[str, str]  # their name in the rules -> in the file
    groups: list[str]
    wrong: list[str] = field(default_factory=list)


def expected(rule: Rule, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """The shapes of theirs that make one of ours."""
    return {name: tuple(x.shape) for name, x in rule.to_theirs(torch.empty(shape, device="meta")).items()}


def match(family: Family, kind: Kind, rules: list[Rule], model: nn.Module, checkpoint: Checkpoint) -> Match:
    own = dict(model.named_parameters())
    copies = family.copies(model.config)  # type: ignore[arg-type]
    names = spelled(checkpoint.files, {n for rule in rules for n in rule.names} | copies.keys(), family)
    there = {rule.group for rule in rules if any(name in names for name in rule.names)}
    groups = [g for g in dict.fromkeys(rule.group for rule in rules) if g in there or g in kind.groups]
    found = Match([rule for rule in rules if rule.group in groups], names, groups)
    for rule in found.rules:
        for name, shape in expected(rule, own[rule.ours].shape).items():
            if name not in names:
                found.wrong.append(f"{name} {list(shape)} is missing")
            elif checkpoint.shapes[names[name]] != shape:
                found.wrong.append(f"{name} is {list(checkpoint.shapes[names[name]])}, not {list(shape)}")
    return found


def spelled(there: Iterable[str], known: set[str], family: Family) -> dict[str, str]:
    """The names of the rules -> those in the file, which may be older ones, or without the prefix of the body."""
    names = {}
    for name in there:
        today = name
        for old, new in (
            *family.older,
            (r"LayerNorm\.gamma$", "LayerNorm.weight"),
            (r"LayerNorm\.beta$", "LayerNorm.bias"),
        ):
            today = re.sub(old, new, today)
        if today not in known and family.prefix + today in known:
            today = family.prefix + today
        if today in known:
            names[today] = name
    return names


def account(family: Family, found: Match, model: nn.Module, checkpoint: Checkpoint, report: Report) -> None:
    """Every tensor of theirs is mapped, a copy of one that is, ignored for a reason, or wrong."""
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


def fill(model: nn.Module, found: Match, checkpoint: Checkpoint, report: Report, where: Path) -> None:
    """Their tensors into ours, one rule at a time; or all that is wrong, and nothing done."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for rule in found.rules if not found.wrong else ():
            made = rule.to_ours({name: checkpoint.tensor(found.names[name]) for name in rule.names})
            if not made.isfinite().all():
                found.wrong.append(f"{rule.ours} would hold numbers that are not finite")
            own[rule.ours].copy_(made)
            report.add(rule, tuple(made.shape))
    if found.wrong:
        raise RegardError(f"the weights in {where} do not fit: {'; '.join(found.wrong)}")
    report.fresh = [name for name in own if name not in {rule.ours for rule in found.rules}]


def theirs_of(rules: Iterable[Rule], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors as theirs."""
    return {name: x.contiguous() for rule in rules for name, x in rule.to_theirs(own[rule.ours]).items()}
