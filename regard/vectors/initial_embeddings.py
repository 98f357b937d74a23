"""Word vectors as the first embeddings of a model: `train.vectors`.

A piece of the vocabulary that is a whole word takes the vector of that word; all others keep their random start. Whole are
all pieces in a vocabulary of words, and of sub-words those that begin a word ("▁cat"; in WordPiece "cat", not "##cat") and
punctuation. Case counts, but a word that is only there in lower case lends its vector. Found vectors are multiplied by one
number, by which they have on average the size that the weights they replace had: angles and relative lengths stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import models
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.embedding import Embedding
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.text.tokenizer_training import SPACE
from regard.vectors.word_vectors import WordVectors


def load_vectors_for(path: Path, d_model: int) -> WordVectors:
    """Vectors as wide as the model."""
    vectors = WordVectors.load(path)
    if vectors.dim != d_model:
        raise RegardError(
            f"the word vectors in {path} have {vectors.dim} numbers each, but model.d_model is {d_model}: "
            f"set model.d_model {vectors.dim}, or take other vectors"
        )
    return vectors


@torch.no_grad()
def initialize_embeddings(model: nn.Module, tokenizers: Tokenizers, vectors: WordVectors) -> str:
    """Put vectors where they belong; says how many pieces got one."""
    said, most = [], 0
    for side, embedding, tokenizer in embeddings_of(model, tokenizers):
        pieces, rows = matches(tokenizer, vectors)
        most += len(pieces)
        scale = put(embedding.weight, pieces, torch.from_numpy(vectors.vectors[rows])) if pieces else 1.0
        said.append(f"{len(pieces):,} of {len(tokenizer):,} {side}pieces (times {scale:.3g})")
    if not said:
        raise RegardError("train.vectors is for models that read text, and this one has no embeddings of words")
    if not most:
        raise RegardError(
            "none of the vocabulary's pieces is among the words of train.vectors: is it another language?"
        )
    return ", ".join(said)


def embeddings_of(model: nn.Module, tokenizers: Tokenizers) -> Iterator[tuple[str, Embedding, Tokenizer]]:
    """The tables of token embeddings, each once, with the vocabulary that they belong to."""
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, Embedding) and id(module.weight) not in done:
            done.add(id(module.weight))
            last = name.rpartition(".")[2]
            side = "" if tokenizers.source is tokenizers.target or last == "embedding" else last.split("_")[0] + " "
            yield side, module, tokenizers.target if last.startswith("target") else tokenizers.source


def matches(tokenizer: Tokenizer, vectors: WordVectors) -> tuple[list[int], list[int]]:
    """Ids of pieces that have a vector, and the rows of their vectors."""
    index, found = vectors.index, list[tuple[int, int]]()
    for piece, word in whole_words(tokenizer):
        row = index.get(word, index.get(word.lower()))
        if row is not None:
            found.append((piece, row))
    return [piece for piece, _ in found], [row for _, row in found]


def whole_words(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Ids of pieces that are words by themselves, and those words."""
    pieces = tokenizer.pieces(range(len(tokenizer)))
    model = tokenizer._backend.model
    for i, piece in enumerate(pieces):
        word = piece.removeprefix(SPACE)
        if isinstance(model, models.WordPiece):
            inside = piece.startswith("##")
        else:
            inside = word == piece and not isinstance(model, models.WordLevel)
        if word and i not in tokenizer.special_ids and not (inside and any(map(str.isalnum, word))):
            yield i, word


def put(weight: Tensor, rows: list[int], vectors: Tensor) -> float:
    """Replace rows of a table (V, C) by vectors (n, C), all times the number that is returned."""
    places = torch.tensor(rows, device=weight.device)
    size = vectors.float().square().mean().sqrt().item()
    scale = weight[places].float().square().mean().sqrt().item() / size if size else 1.0
    weight[places] = (vectors * scale).to(weight)
    return scale
