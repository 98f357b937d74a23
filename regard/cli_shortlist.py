"""`regard shortlist`: learn which target pieces go with which source pieces, for faster decoding on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.data.shards import Store
    from regard.folder import Bundle


def shortlist(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder with a translator.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Corpus of pairs, as in a recipe; by default the run's data.train.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the corpora; by default the run's data.root.")] = None,
    best: Annotated[
        int,
        typer.Option("--best", "-n", min=1, help="Target pieces kept for each source piece, beside the frequent ones."),
    ] = 20,
    frequent: Annotated[int, typer.Option(min=1, help="Most frequent target pieces, kept for all.")] = 200,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Learn a short-list of the vocabulary for each source piece, and put it into the model folder.

    `regard translate --decode.shortlist true` then chooses among the pieces that go with a sentence: faster on a CPU.
    """
    import torch

    from regard import folder as folders
    from regard.cli import no_settings
    from regard.decode import shortlist as shortlists
    from regard.decode.model1 import learn
    from regard.progress import progress_bar
    from regard.translator import Translator

    no_settings(context)
    folder = folders.find(model)
    if folders.foreign(folder):
        raise RegardError(f"{folder} is a folder of another library: `regard import` makes one of ours of it first")
    bundle = folders.load(folder, torch.device("cpu"))
    tokenizers = Translator(bundle).tokenizers  # refuses what is none
    pairs = training_pairs(model, tuple(data or ()), root, bundle, quiet)
    with progress_bar("learning short-lists", quiet=quiet) as advance:
        found = learn(pairs, tokenizers, best, frequent, advance)
    shortlists.save(folder, found)
    print(folder / shortlists.FILE)


def training_pairs(run: Path, specs: tuple[str, ...], root: Path | None, bundle: Bundle, quiet: bool) -> Store:
    """The pairs that were given, or those that the run was trained on, in the pieces of the model."""
    from regard import recipes
    from regard.config import Config
    from regard.data.corpus import Corpus
    from regard.data.shards import Filters, cache_folder, prepare
    from regard.progress import progress_bar

    recipe = next((place / "config.toml" for place in (run, run.parent) if (place / "config.toml").exists()), None)
    config = recipes.build(recipes.load(recipe), Config) if recipe else Config()
    specs = specs or config.data.train
    if not specs:
        raise RegardError(f"{run} names no training data: give some with --data, as a recipe's data.train would")
    place = root or Path(config.data.root)
    corpus = Corpus(specs, bundle.source or config.data.source, bundle.target or config.data.target, place)
    assert bundle.tokenizers is not None
    sides = (bundle.tokenizers.source, bundle.tokenizers.target)
    with progress_bar("tokenising pairs", quiet=quiet) as advance:
        return prepare(corpus, sides, Filters(config.data.max_len, config.data.max_ratio), cache_folder(), advance)
