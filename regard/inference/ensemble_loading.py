"""Loading several translation models as one: an ensemble (models/ensemble.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.model_folder import ModelPackage
from regard.models.ensemble import Ensemble, SourceReader
from regard.models.model import TranslationModel
from regard.text.tokenizer import Tokenizer, Tokenizers

SHOWN = 5  # pieces that an error names


def load_ensemble(paths: Sequence[str | Path], device: torch.device, weights: str = "auto") -> ModelPackage:
    """Load translation models as one package: the model itself where there is one folder, else an ensemble."""
    if not paths:
        raise RegardError("no model given: name at least one run or model folder")
    packages = [load_model(Path(path), device, weights) for path in paths]
    return packages[0] if len(packages) == 1 else join_packages(packages, [str(path) for path in paths])


def join_packages(packages: Sequence[ModelPackage], names: Sequence[str]) -> ModelPackage:
    """Return an ensemble with the tokenizers, languages and decode settings of the first model.

    Models that cannot write together are refused, by their names."""
    first, members, readers = packages[0], [], []
    for package, name in zip(packages, names, strict=True):
        if not isinstance(package.model, TranslationModel) or package.tokenizers is None:
            raise RegardError(f"an ensemble is of translators with tokenizers, and {name} is none: leave it out")
        ours, theirs = languages_of(first), languages_of(package)
        if ours != theirs:
            raise RegardError(
                f"an ensemble translates between the same languages, but {names[0]} has {ours}, {name} {theirs}"
            )
        assert first.tokenizers is not None
        check_same_vocabulary(first.tokenizers.target, package.tokenizers.target, names[0], name)
        if first.token_template.start != package.token_template.start:
            raise RegardError(
                f"{names[0]} and {name} start a translation with different tokens: an ensemble needs the same"
            )
        members.append(package.model)
        readers.append(source_reader(first, first.tokenizers, package, package.tokenizers))
    return replace(first, model=Ensemble(members, readers))


def languages_of(package: ModelPackage) -> str:
    """Return the directions of a model in words."""
    return ", ".join(sorted(package.directions)) or f"{package.source}>{package.target}"


def source_reader(
    first: ModelPackage, first_tokenizers: Tokenizers, package: ModelPackage, tokenizers: Tokenizers
) -> SourceReader | None:
    """Return the conversion of sources for a model, or None where it reads the same tokens as the first."""
    ours, theirs = first_tokenizers.source, tokenizers.source
    templates = first.token_template, package.token_template
    same_around = (templates[0].before, templates[0].after) == (templates[1].before, templates[1].after)
    if same_around and (ours is theirs or ours.fingerprint() == theirs.fingerprint()):
        return None
    return SourceReader(ours, templates[0], theirs, templates[1])


def check_same_vocabulary(ours: Tokenizer, theirs: Tokenizer, our_name: str, their_name: str) -> None:
    """Refuse target vocabularies whose ids stand for different pieces, and say which."""
    both = [[vocabulary.token(i) for i in range(len(vocabulary))] for vocabulary in (ours, theirs)]
    if both[0] == both[1]:
        return
    differences = []
    for own, other, name in ((both[0], both[1], our_name), (both[1], both[0], their_name)):
        known = set(other)
        only = [piece for piece in own if piece not in known]
        if only:
            shown = ", ".join(map(repr, only[:SHOWN])) + (", ..." if len(only) > SHOWN else "")
            differences.append(f"{len(only):,} pieces only in {name} ({shown})")
    if not differences:
        i = next(i for i, (a, b) in enumerate(zip(*both, strict=True)) if a != b)
        differences.append(f"the same pieces with other ids: {i} is {both[0][i]!r} and {both[1][i]!r}")
    raise RegardError(
        f"an ensemble needs one target vocabulary, but {our_name} and {their_name} have {'; '.join(differences)}: train the "
        f"members with the tokenizer of one of them (tokenizer.file)"
    )
