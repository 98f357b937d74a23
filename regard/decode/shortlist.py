"""Short-lists of the vocabulary: the target pieces that a translation is made of, judging by the pieces of its source.

On a CPU much of a decoding step goes into the output matrix (V, C), although most of the vocabulary has nothing to do
with the sentence. Which pieces go with which, `regard shortlist` learns from training pairs; a batch then multiplies only
the rows of those that go with its sources, of the most frequent pieces and of the special tokens. A mask keeps each sentence
to its own list, so its translation does not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialized
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.decode.rules import Decoder, Hypothesis
from regard.errors import RegardError
from regard.files import add_file, check_regular, exists, manifest_of
from regard.layers.embedding import Head
from regard.models.model import TranslationModel
from regard.text.special import PAD

FILE = "shortlist.safetensors"


@dataclass(frozen=True)
class Shortlist:
    always: Tensor  # (F,) int32 pieces for any translation, beside the special tokens: the most frequent
    lists: Tensor  # (source pieces, n) int32 those that go with each source piece; PAD fills up

    def allowed(self, source: Tensor, config: ModelConfig) -> Tensor:
        """(B, V) which pieces the translation of each source row (B, S) may be made of."""
        vocab = config.target_vocab
        allowed = torch.zeros(len(source), vocab + 1, dtype=torch.bool)  # the last column is for padding
        allowed[:, special_of(config)] = True
        allowed[:, self.always.long()] = True
        listed = self.lists[source.clamp(min=0)].masked_fill_((source < 0)[:, :, None], PAD)  # (B, S, n)
        listed = listed.masked_fill_(listed == PAD, vocab)
        return allowed.scatter_(1, listed.flatten(1).long(), True)[:, :vocab]


def special_of(config: ModelConfig) -> list[int]:
    """The special tokens, which the search treats by their ids: the end token, and those that are never generated."""
    return [i for i in (config.eos_token_id, *config.suppress_tokens) if i >= 0]


# ---- in a model folder -----------------------------------------------------------------------------------------------


def save(folder: Path, shortlist: Shortlist) -> None:
    """Put it into a sealed model folder, or replace the one there."""
    if manifest_of(folder) is None:
        raise RegardError(f"the model in {folder} is damaged: manifest.json cannot be read; copy the folder anew")
    add_file(folder, FILE, lambda draft: write(draft, shortlist))


def write(path: Path, shortlist: Shortlist) -> None:
    path.write_bytes(serialized({"always": shortlist.always.contiguous(), "lists": shortlist.lists.contiguous()}))


def load(folder: Path, config: ModelConfig) -> Shortlist | None:
    """That of a model folder, if it has one."""
    path = folder / FILE
    if not exists(path):
        return None
    try:
        tensors = load_file(check_regular(path))
        always, lists = tensors["always"], tensors["lists"]
        fits = always.ndim == 1 and lists.ndim == 2 and len(lists) == config.source_vocab
        fits &= all(PAD <= int(x.min()) <= int(x.max()) < config.target_vocab for x in (always, lists))
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:
        raise RegardError(f"cannot read {path}: {error}; make it again with `regard shortlist {folder}`") from None
    if not fits:
        raise RegardError(f"{path} is of another vocabulary: make it again with `regard shortlist {folder}`")
    return Shortlist(always, lists)


# ---- in use ----------------------------------------------------------------------------------------------------------


@dataclass
class NarrowState:
    own: Any  # the model's
    hidden: Tensor  # (B, U) pieces of the batch that are not for this sentence

    def reorder(self, parents: Tensor) -> None:
        self.own.reorder(parents)

    def select(self, sentences: Tensor) -> None:
        self.own.select(sentences)
        self.hidden = self.hidden[sentences]


class Narrow:
    """A `Decoder` that writes one batch with the U pieces on the lists of its sources.

    They are numbered anew, in their old order, so that the softmax and the search are smaller too; `config` has the special
    tokens by these numbers. Sampling draws a number for every piece of the vocabulary: then logits are `wide`, with -inf for
    all others.
    """

    def __init__(
        self, model: Decoder, shortlist: Shortlist, source: Tensor, start: tuple[int, ...], wide: bool
    ) -> None:
        assert isinstance(model, TranslationModel)
        if type(model.head) is not Head:
            raise RegardError("decode.shortlist takes rows of the output matrix as they are: leave out --weights")
        self.model, self.shortlist, self.wide = model, shortlist, wide
        self.vocab, config = model.config.target_vocab, model.config
        used = shortlist.allowed(source, config).any(0)  # (V,)
        used[list(start)] = True  # read, not said
        self.ids = used.nonzero().squeeze(1)  # (U,)
        self.head = rows_of(model.head, self.ids)
        self.start, self.config = start, config
        if not wide:
            self.start = self.numbers(start)
            end = self.numbers((config.eos_token_id,))[0] if config.eos_token_id >= 0 else -1
            suppressed = self.numbers(config.suppress_tokens)
            self.config = replace(config, eos_token_id=end, suppress_tokens=suppressed)

    def numbers(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Of pieces that are among the U."""
        return tuple(torch.searchsorted(self.ids, torch.tensor(tokens, dtype=torch.long)).tolist())

    def begin(self, source: Tensor) -> NarrowState:
        return NarrowState(self.model.begin(source), ~self.shortlist.allowed(source, self.model.config)[:, self.ids])

    def step(self, tokens: Tensor, state: NarrowState) -> Tensor:
        """Logits (N, U), or (N, V) if wide."""
        logits = self.head(self.model.advance(tokens if self.wide else self.ids[tokens], state.own))
        logits.view(len(state.hidden), -1, len(self.ids)).masked_fill_(state.hidden[:, None], -torch.inf)
        if not self.wide:
            return logits
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy_(1, self.ids, logits)

    def full(self, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """The hypotheses with the ids of the whole vocabulary."""
        if self.wide:
            return found
        ids = self.ids.tolist()
        return [[replace(h, tokens=[ids[i] for i in h.tokens]) for h in ranked] for ranked in found]


@torch.no_grad()
def rows_of(head: Head, ids: Tensor) -> Head:
    """The head of some pieces alone."""
    small = Head(head.weight[ids], head.scale != 1.0)
    small.bias = None if head.bias is None else nn.Parameter(head.bias[ids])
    return small
