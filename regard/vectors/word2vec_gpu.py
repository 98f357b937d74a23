"""Training word vectors on a GPU: the text and both matrices lie there, and programs of one kernel train on them.

Words are dropped (sub-sampled) for a large block of text at once, then the kernel goes through what is left in pieces, each
at one learning rate. The windows in hand at once are few (`batch`), because every one of them works with vectors that the
others are changing: hundreds keep the quality of CPU threads, and a GPU busy enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.config import VectorsConfig
from regard.device import pick_device
from regard.errors import RegardError
from regard.vectors.word2vec import Work, blocks

BLOCK = 1 << 22  # words that are dropped or kept at a time
PIECES = 512  # at least so many learning rates in all
SEEDS = 1 << 31
WARPS = 2


@dataclass
class Held:
    """What the kernel works on, on its device."""

    inputs: Tensor  # (V, D)
    outputs: Tensor
    keep: Tensor  # (V,)
    noise: tuple[Tensor, Tensor]
    tree: tuple[Tensor, Tensor, Tensor]
    totals: Tensor  # (2,) float64: losses and predictions

    @classmethod
    def of(cls, work: Work, device: torch.device) -> Held:
        def put(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, copy=True)

        tree = work.tree
        return cls(
            put(work.inputs),
            put(work.outputs),
            put(work.keep),
            (put(work.noise[0]), put(work.noise[1])),
            (put(tree.start.astype(np.int32)), put(tree.nodes), put(tree.bits)),
            torch.zeros(2, dtype=torch.float64, device=device),
        )


def run_gpu(work: Work) -> None:
    """All epochs; the vectors come back into `work`."""
    if work.config.loss == "softmax":
        raise RegardError("the full softmax is learned on the CPU alone: give device = cpu, or another loss")
    train_on(work, pick_device(work.config.device))


def train_on(work: Work, device: torch.device) -> None:
    held = Held.of(work, device)
    generator = torch.Generator(device).manual_seed(work.config.seed)
    for epoch in range(work.config.epochs):
        held.totals.zero_()
        for a, b in blocks(work.offsets, 0, len(work.offsets) - 1, BLOCK):
            run_block(work, held, a, b, generator)
            work.totals[epoch, 0, :2] = held.totals.cpu().numpy()
    work.inputs[:] = held.inputs.cpu().numpy()
    work.outputs[:] = held.outputs.cpu().numpy()


def run_block(work: Work, held: Held, a: int, b: int, generator: torch.Generator) -> None:
    """Sentences a to b, in pieces that each have one learning rate."""
    begin, end = (int(work.offsets[i]) for i in (a, b))
    lengths = torch.from_numpy(work.text.lengths[a:b]).to(held.keep.device)
    ids = torch.from_numpy(work.text.ids[begin:end].astype(np.int32)).to(held.keep.device)
    ids, sentence = subsample(ids, lengths, held.keep, generator)
    piece = max(1, min(len(ids), work.total // PIECES))
    seeds = np.random.default_rng([work.config.seed, work.done]).integers(SEEDS, size=-(-len(ids) // piece))
    for seed, first in zip(seeds.tolist(), range(0, len(ids), piece), strict=True):
        last = min(first + piece, len(ids))
        launch(held, work.config, ids, sentence, first, last, work.lr, seed)
        work.advance((end - begin) * last // len(ids) - (end - begin) * first // len(ids))
    if not len(ids):
        work.advance(end - begin)


def subsample(ids: Tensor, lengths: Tensor, keep: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The words that stay, and the number of the sentence each is in.  # (N,) -> (n,), (n,)"""
    sentence = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device, dtype=torch.int32), lengths)
    kept = torch.rand(len(ids), device=ids.device, generator=generator) < keep[ids.long()]
    return ids[kept], sentence[kept]


def launch(
    held: Held, config: VectorsConfig, ids: Tensor, sentence: Tensor, first: int, last: int, lr: float, seed: int
) -> None:
    """One piece of the text, whose windows look past its ends."""
    import triton

    from regard.vectors.word2vec_triton import train_part

    tree, cbow = config.loss == "hierarchical", config.model == "cbow"
    programs = min(config.batch or (256 if tree else 512), last - first)
    dim = held.inputs.shape[1]
    train_part[(programs,)](
        ids, sentence, len(ids), first, last, held.inputs, held.outputs, *held.noise, *held.tree, held.totals, seed, lr,
        len(held.keep), dim, held.inputs.stride(0), config.window, config.negatives,
        CBOW=cbow, TREE=tree, SHRINK=config.shrink_windows, DIVIDED=cbow and config.cbow_gradient == "divided",
        D=triton.next_power_of_2(dim), W=triton.next_power_of_2(2 * config.window), num_warps=WARPS,
    )  # fmt: skip
