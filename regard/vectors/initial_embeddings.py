"""Word vectors as the initial embeddings of a model (setting `train.pretrained_embeddings`).

A token that is a whole word gets the vector of that word; all others keep their random initialisation. In a vocabulary
of words all tokens are whole words; in a subword vocabulary, those that begin a word ("▁cat"; in WordPiece "cat", not
"##cat") and punctuation. Case matters, but a word without a vector gets that of its lower-case form. The vectors are
multiplied by one factor, so that their root mean square is that of the weights they replace: angles and relative
lengths stay.
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
    """Load word vectors; raise an error unless their dimension is that of the model."""
    vectors = WordVectors.load(path)
    if vectors.dim != d_model:
        raise RegardError(
            f"the word vectors in {path} have {vectors.dim} numbers each, but model.d_model is {d_model}: "
            f"set model.d_model {vectors.dim}, or take other vectors"
        )
    return vectors


@torch.no_grad()
def initialize_embeddings(model: nn.Module, tokenizers: Tokenizers, vectors: WordVectors) -> str:
    """Replace the embeddings of all tokens that have a word vector; return a sentence about how many there are."""
    reports, most = [], 0
    for side, embedding, tokenizer in embeddings_of(model, tokenizers):
        pieces, rows = match_tokens(tokenizer, vectors)
        most += len(pieces)
        scale = replace_rows(embedding.weight, pieces, torch.from_numpy(vectors.vectors[rows])) if pieces else 1.0
        reports.append(f"{len(pieces):,} of {len(tokenizer):,} {side}pieces (times {scale:.3g})")
    if not reports:
        raise RegardError(
            "train.pretrained_embeddings is for models that read text, and this one has no embeddings of words"
        )
    if not most:
        raise RegardError(
            "none of the vocabulary's pieces is among the words of train.pretrained_embeddings: is it another language?"
        )
    return ", ".join(reports)


def embeddings_of(model: nn.Module, tokenizers: Tokenizers) -> Iterator[tuple[str, Embedding, Tokenizer]]:
    """Yield each token embedding of a model once, with its side ("source ", "target " or "") and its tokenizer."""
    done = set()
    for name, module in model.named_modules():
        if isinstance(module, Embedding) and id(module.weight) not in done:
            done.add(id(module.weight))
            last = name.rpartition(".")[2]
            side = "" if tokenizers.source is tokenizers.target or last == "embedding" else last.split("_")[0] + " "
            yield side, module, tokenizers.target if last.startswith("target") else tokenizers.source


def match_tokens(tokenizer: Tokenizer, vectors: WordVectors) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that have a word vector, and the rows of these vectors."""
    index, found = vectors.index, list[tuple[int, int]]()
    for piece, word in whole_words(tokenizer):
        row = index.get(word, index.get(word.lower()))
        if row is not None:
            found.append((piece, row))
    return [piece for piece, _ in found], [row for _, row in found]


def whole_words(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield the id and the word of each token that is a whole word."""
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


def replace_rows(weight: Tensor, rows: list[int], vectors: Tensor) -> float:
    """Replace rows of weight (V, C) by vectors (n, C), scaled to the root mean square of the old rows; return the factor."""
    index = torch.tensor(rows, device=weight.device)
    size = vectors.float().square().mean().sqrt().item()
    scale = weight[index].float().square().mean().sqrt().item() / size if size else 1.0
    weight[index] = (vectors * scale).to(weight)
    return scale
