"""Translation: sentence pairs, label-smoothed cross-entropy of the target, BLEU of greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from regard.config import Config
from regard.data.batches import PairBatches
from regard.data.multilingual import language_profiles, language_token, target_languages
from regard.data.pair_store import align_unknown_words, prepare_pair_store
from regard.data.parallel_corpus import ParallelCorpus, parse_direction
from regard.data.positional_unknown import PositionalUnknownTokenizer
from regard.data.token_cache import Filters, Store
from regard.decode.batch_decoding import decode
from regard.decode.constraints import greedy
from regard.decode.source_attention import check_coverage
from regard.decode.unknown_words import allow_unknown, replace_unknown
from regard.device import autocast
from regard.errors import RegardError
from regard.metrics.translation_scores import corpus_bleu, perplexity
from regard.model_folder import ModelPackage
from regard.models.model import TranslationModel
from regard.tasks.initial_model import InitialModel
from regard.tasks.text_data import check_task
from regard.terminal import count_progress, progress_bar
from regard.text.bpe_dropout import BPEDropout
from regard.text.language_identification import Profiles
from regard.text.special_tokens import eos_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.metrics_log import print_message
from regard.training.objective import Objective, make_token_objective
from regard.training.reward_objective import RewardObjective, SentenceReward
from regard.training.validation import BATCH_TOKENS, total_loss


@dataclass(frozen=True)
class TranslationJob(Job):
    """A run of translation, in one direction or several."""

    train: Store
    valid: Store
    valid_pairs: list[tuple[str, str, str]]  # direction ("en>de", or ""), source and reference, to decode
    directions: tuple[str, ...] = ()  # "en>de", ... of a multilingual model, else empty
    languages: Profiles = field(default_factory=dict)  # for identifying the source language of a multilingual model
    weights: tuple[float, ...] = ()  # how often an epoch reads each corpus of data.train

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "bleu")

    def batches(self) -> PairBatches:
        train, chance = self.config.train, self.config.tokenizer.bpe_dropout
        assert self.tokenizers is not None
        dropout = BPEDropout.for_both_sides(self.tokenizers, chance) if chance else None
        longest = self.config.model.max_len
        return PairBatches(
            self.train, train.batch_tokens, train.seed, self.token_template, dropout, longest, self.weights
        )

    def objective(self) -> Objective:
        train = self.config.train
        if train.objective == "likelihood":
            return make_token_objective(self.model, train)
        assert self.tokenizers is not None
        assert isinstance(self.model, TranslationModel)
        languages = {id: name for name, id in self.tokenizers.source.language_tokens().items()}
        decoding = allow_unknown(self.config.decode, self.model, self.tokenizers)
        given = self.tokenizers.target, self.config.data.target, languages, decoding.allow_tokens
        reward = SentenceReward(train.reward.metric, *given)
        return RewardObjective(self.model, train, decoding, reward, self.token_template)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        batches = PairBatches(self.valid, BATCH_TOKENS, 0, self.token_template).iterate_once()
        total, tokens = total_loss(Objective(model), batches, device, dtype, poll)
        with autocast(device, dtype):
            scores, samples = self._translate(model, device, poll)
        return Validation(total / tokens, {"perplexity": perplexity(total, tokens), **scores}, samples)

    def _translate(self, model: nn.Module, device: torch.device, poll: Poll) -> tuple[dict[str, float], list[str]]:
        """Return BLEU of the validation sentences (for several directions the mean and each), and sample translations."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for direction, source, target in self.valid_pairs:
            groups.setdefault(direction, []).append((source, target))
        found = {name: self._translate_one(model, name, pairs, device, poll) for name, pairs in groups.items()}
        shown = [samples[: -(-self.config.train.samples // len(found))] for _, samples in found.values()]
        scores = {"bleu": sum(bleu for bleu, _ in found.values()) / len(found)}
        if len(found) > 1:
            scores |= {f"bleu {name}": bleu for name, (bleu, _) in found.items()}
        return scores, [line for lines in shown for line in lines]

    def _translate_one(
        self, model: nn.Module, direction: str, pairs: list[tuple[str, str]], device: torch.device, poll: Poll
    ) -> tuple[float, list[str]]:
        assert isinstance(model, TranslationModel)
        assert self.tokenizers is not None
        pairs = pairs[: self.config.train.valid_sentences or None]
        sources = self.tokenizers.source.encode_batch([pair[0] for pair in pairs])
        language = direction.split(">")[-1] or self.config.data.target
        if direction:
            sources = [[language_token(self.tokenizers.source, language), *ids] for ids in sources]
        # Greedy: the same ranking of checkpoints as a beam for a fraction of its time.
        options = allow_unknown(greedy(self.config.decode), model, self.tokenizers)
        found = decode(model, sources, options, model.config.max_len, device, lambda done: poll(), self.token_template)
        written = [best[0].tokens for best in found]
        if options.replace_unknown == "none":
            texts = self.tokenizers.target.decode_batch(written)
        else:
            given = [pair[0] for pair in pairs], sources, written
            texts = replace_unknown(model, self.tokenizers, self.token_template, options, *given)
        cased = str.lower if self.tokenizers.target.lowercases else str  # as the model can write it
        # Words that are copied from the source have its capitals.
        bleu = corpus_bleu([cased(text) for text in texts], [cased(pair[1]) for pair in pairs], language)
        rows = zip(pairs[: self.config.train.samples], texts, strict=False)
        return bleu, [f"{source}\n    ours {text}\n    ref. {reference}" for (source, reference), text in rows]

    def package(self) -> ModelPackage:
        return replace(super().package(), directions=self.directions, languages=self.languages)

    def next_steps(self) -> list[str]:
        to = f" --to {self.directions[0].split('>')[1]}" if self.directions else ""
        return [*super().next_steps(), f'regard translate --model {self.quoted_folder}{to} "..."']


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> TranslationJob:
    """Prepare a run: tokenizers, tokenized pairs and model."""
    check_task(config)
    initial = InitialModel.load(folder, config, quiet)
    corpora = make_corpora(config, quiet)
    directions = corpora["train"].directions
    if directions:
        check_directions(config, directions, corpora["valid"].directions)
        config = replace(config, tokenizer=replace(config.tokenizer, language_tokens=target_languages(directions)))
    elif config.tokenizer.language_tokens:
        raise RegardError(
            "tokenizer.language_tokens would do nothing: it is filled in from the directions of corpora; leave it out, and "
            f"write '...@{config.data.source}>{config.data.target}' behind each corpus of data.train and data.valid"
        )
    valid_pairs = [row for row in corpora["valid"].directed_rows() if all(text.strip() for text in row[1:])]
    tokenizers = initial.get_tokenizers(lambda: train_tokenizers(corpora["train"], config, quiet))
    if not directions and (languages := tokenizers.source.language_tokens()):
        raise RegardError(
            f"this vocabulary is of a model that is told which language to translate to ({', '.join(languages)}): write "
            f"'...@{config.data.source}>{config.data.target}' behind each corpus of data.train and data.valid"
        )
    window = config.tokenizer.positional_unknown
    distances = [distance for distance in tokenizers.target.positional_unknown().values() if distance is not None]
    if window and window != max(distances, default=0):
        has = f"tokens <unk:-{max(distances)}> to <unk:+{max(distances)}>" if distances else "no tokens <unk:...>"
        raise RegardError(
            f"tokenizer.positional_unknown {window} would do nothing: the given vocabulary has {has}; leave it out, or "
            f"train a new vocabulary"
        )
    token_template = initial.get_token_template(eos_template(tokenizers.target.special))
    longest = config.model.max_len - max(
        len(token_template.before) + len(token_template.after), len(token_template.start)
    )
    filters = Filters(min(config.data.max_len, longest), config.data.max_ratio)
    unknown_words = align_unknown_words(corpora["train"], tokenizers)
    train = _prepare_store(corpora["train"], tokenizers, filters, "training", quiet, unknown_words)
    valid = _prepare_store(corpora["valid"], tokenizers, Filters(longest), "validation", quiet, unknown_words)
    if valid.report.too_long:
        raise RegardError(
            f"{valid.report.too_long} validation pairs are longer than model.max_len {config.model.max_len} allows: "
            f"raise model.max_len or shorten them"
        )
    model_config = replace(config.model, source_vocab=len(tokenizers.source), target_vocab=len(tokenizers.target))
    model_config = replace(model_config, **tokenizers.target.special.model_settings())
    model = initial.build_model(model_config)
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    assert isinstance(model, TranslationModel)
    allow_unknown(config.decode, model, tokenizers)  # refused before training, not at the first validation
    check_coverage(config.decode, model)
    if tokenizers.target.positional_unknown() and config.decode.replace_unknown == "none":
        print_message(
            "warning: the vocabulary has tokens for unknown words (<unk:+1>, ...), which translations leave out while "
            "decode.replace_unknown is none: set it to copy",
            quiet,
        )
    amount = f"{len(train):,} training pairs"
    own = (folder, config, model, tokenizers, token_template, train.key, amount)
    weights = sampling_weights(corpora["train"], train.rows_of_specs, config.data.temperature)
    return TranslationJob(*own, train, valid, valid_pairs, directions, language_profiles(corpora["train"]), weights)


def check_directions(config: Config, train: tuple[str, ...], valid: tuple[str, ...]) -> None:
    """Refuse directions that are validated and not trained, and separate vocabularies for several directions."""
    if not config.tokenizer.joint:
        raise RegardError("a model of several directions has one vocabulary for all: set tokenizer.joint true")
    if unknown := [direction for direction in valid if direction not in train] or (not valid and ["none"]):
        raise RegardError(
            f"data.valid has the direction {unknown[0]}, which data.train has not: write '...@en>de' in both"
        )


def sampling_weights(corpus: ParallelCorpus, rows: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return how often an epoch reads each corpus: its own weight, times a factor for its direction.

    With the temperature T a direction of n weighted pairs is read in proportion to n^(1/T) (Arivazhagan et al. 2019); the
    factor of the direction with most pairs is 1.
    """
    if temperature == 1 or not corpus.directions:
        return corpus.weights
    found = [parse_direction(spec)[1] for spec in corpus.specs]
    pairs: dict[str, float] = dict.fromkeys(found, 0.0)
    for direction, weight, n in zip(found, corpus.weights, rows, strict=True):
        pairs[direction] += weight * n
    most = max(pairs.values())
    return tuple(
        weight * (max(pairs[direction], 1.0) / most) ** (1 / temperature - 1)
        for direction, weight in zip(found, corpus.weights, strict=True)
    )


def make_corpora(config: Config, quiet: bool) -> dict[str, ParallelCorpus]:
    """Return the corpora for training and validation; without data.valid, a share of the training pairs is held out."""
    data = config.data
    if not data.train:
        raise RegardError("data.train names no corpus: set it in the recipe or with --data.train FILE")
    train = ParallelCorpus(data.train, data.source, data.target, Path(data.root), "train")
    if data.valid:
        return {"train": train, "valid": replace(train, specs=data.valid, split="valid")}
    train, valid = train.hold_out(data.valid_share, config.train.seed)
    assert train.held_out is not None
    print_message(train.held_out.describe("pairs"), quiet)
    return {"train": train, "valid": valid}


def train_tokenizers(corpus: ParallelCorpus, config: Config, quiet: bool) -> Tokenizers:
    """Train a tokenizer for both languages, or one for each."""
    settings = config.tokenizer
    with progress_bar("reading pairs", quiet=quiet) as advance:

        def side(*sides: int) -> Tokenizer:
            rows = count_progress(corpus.rows(), advance)
            return Tokenizer.train((row[i] for row in rows for i in sides), settings)

        if settings.joint:
            joint = side(0, 1)
            return Tokenizers(joint, joint)
        return Tokenizers(side(0), side(1))


def _prepare_store(
    corpus: ParallelCorpus,
    tokenizers: Tokenizers,
    filters: Filters,
    what: str,
    quiet: bool,
    unknown_words: PositionalUnknownTokenizer,
) -> Store:
    """Tokenize a corpus, or take it from the cache, and print how much of it there is."""
    with progress_bar("tokenizing pairs", quiet=quiet) as advance:
        store = prepare_pair_store(corpus, tokenizers, filters, advance, unknown_words)
    print_message(f"{what} data: {store.report.describe()}", quiet)
    return store
