"""The objectives of word2vec, as formulas: what its fast kernels compute the gradients of.

`inputs` (V, D) are the vectors of words (v of the papers), `outputs` those of what is predicted (u): of words, or of the
inner nodes of a Huffman tree. Skip-gram predicts the centre from each word of its window alone, CBOW from their mean. All
return the loss of one prediction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def hidden(inputs: Tensor, context: Tensor) -> Tensor:
    """What predicts: the mean of the vectors of some words; for skip-gram of one.  # (n,) -> (D,)"""
    return inputs[context].mean(0)


def negative_sampling(h: Tensor, outputs: Tensor, target: int, negatives: Tensor) -> Tensor:
    """-log s(u_target h) - sum over negatives of log s(-u h); a negative that is the target does not count."""
    noise = outputs[negatives[negatives != target]]
    return -F.logsigmoid(outputs[target] @ h) - F.logsigmoid(-noise @ h).sum()


def hierarchical_softmax(h: Tensor, outputs: Tensor, nodes: Tensor, bits: Tensor) -> Tensor:
    """-log of the probability of a word's way down the tree; at each node bit 0 has probability s(u h)."""
    return -F.logsigmoid((1 - 2 * bits) * (outputs[nodes] @ h)).sum()


def full_softmax(h: Tensor, outputs: Tensor, target: int) -> Tensor:
    """-log softmax(U h)[target]."""
    return torch.logsumexp(outputs @ h, 0) - outputs[target] @ h
