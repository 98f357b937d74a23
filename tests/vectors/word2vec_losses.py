"""The losses of word2vec as formulas, whose gradients the fast kernels must follow.

`inputs` (V, D) are the vectors of words (v in the papers), `outputs` those of what is predicted (u): of words, or of
the inner nodes of a Huffman tree. Skip-gram predicts the centre from each word of its window alone, CBOW from their
mean. Every function returns the loss of one prediction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def hidden(inputs: Tensor, context: Tensor) -> Tensor:
    """Return the vector that predicts (D,): the mean of the vectors of the context (n,), which for skip-gram is one word."""
    return inputs[context].mean(0)


def negative_sampling(h: Tensor, outputs: Tensor, target: int, negatives: Tensor) -> Tensor:
    """Return -log s(u_target h) - sum over negatives of log s(-u h); a negative equal to the target is left out."""
    noise = outputs[negatives[negatives != target]]
    return -F.logsigmoid(outputs[target] @ h) - F.logsigmoid(-noise @ h).sum()


def hierarchical_softmax(h: Tensor, outputs: Tensor, nodes: Tensor, bits: Tensor) -> Tensor:
    """Return -log of the probability of a word's path in the tree; at each node, bit 0 has probability s(u h)."""
    return -F.logsigmoid((1 - 2 * bits) * (outputs[nodes] @ h)).sum()


def full_softmax(h: Tensor, outputs: Tensor, target: int) -> Tensor:
    """Return -log softmax(U h)[target]."""
    return torch.logsumexp(outputs @ h, 0) - outputs[target] @ h
