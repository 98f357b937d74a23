"""Training of word2vec on a GPU, which holds text and matrices, by the Triton kernel of word2vec_triton.py.

A large block of the text is subsampled at once; then the kernel trains on what is left in parts, each at one learning
rate. Few windows (`batch`) are processed at once, because each uses vectors that the others are changing: some hundred
keep the quality of CPU threads, and keep a GPU busy enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.config import VectorsConfig
from regard.device import pick_device
from regard.errors import RegardError
from regard.vectors.word2vec import TrainingState, blocks

BLOCK = 1 << 22  # words that are subsampled at once
LEARNING_RATES = 512  # in all epochs, at least
SEEDS = 1 << 31  # random seeds are below this
WARPS = 2


@dataclass
class DeviceState:
    """The tensors of a training run on its device."""

    inputs: Tensor  # (V, D)
    outputs: Tensor
    keep: Tensor  # (V,), probability that subsampling keeps a word
    noise: tuple[Tensor, Tensor]  # alias table of the noise distribution
    tree: tuple[Tensor, Tensor, Tensor]  # start, nodes and bits of the Huffman tree
    totals: Tensor  # (2,) float64: losses and predictions

    @classmethod
    def of(cls, state: TrainingState, device: torch.device) -> DeviceState:
        """Return copies of the arrays of a training state."""

        def put(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device, copy=True)

        tree = state.tree
        return cls(
            put(state.inputs),
            put(state.outputs),
            put(state.keep),
            (put(state.noise[0]), put(state.noise[1])),
            (put(tree.start.astype(np.int32)), put(tree.nodes), put(tree.bits)),
            torch.zeros(2, dtype=torch.float64, device=device),
        )


def run_gpu(state: TrainingState) -> None:
    """Train all epochs on a GPU; the vectors are copied back into the training state."""
    if state.config.loss == "softmax":
        raise RegardError("the full softmax is learned on the CPU alone: give device = cpu, or another loss")
    device = pick_device(state.config.device)
    device_state = DeviceState.of(state, device)
    generator = torch.Generator(device).manual_seed(state.config.seed)
    for epoch in range(state.config.epochs):
        device_state.totals.zero_()
        for a, b in blocks(state.offsets, 0, len(state.offsets) - 1, BLOCK):
            run_block(state, device_state, a, b, generator)
            state.totals[epoch, 0, :2] = device_state.totals.cpu().numpy()
    state.inputs[:] = device_state.inputs.cpu().numpy()
    state.outputs[:] = device_state.outputs.cpu().numpy()


def run_block(state: TrainingState, device_state: DeviceState, a: int, b: int, generator: torch.Generator) -> None:
    """Train on the sentences a to b (exclusive), in parts that each have one learning rate."""
    begin, end = (int(state.offsets[i]) for i in (a, b))
    lengths = torch.from_numpy(state.text.lengths[a:b]).to(device_state.keep.device)
    ids = torch.from_numpy(state.text.ids[begin:end].astype(np.int32)).to(device_state.keep.device)
    ids, sentence = subsample(ids, lengths, device_state.keep, generator)
    size = max(1, min(len(ids), state.total // LEARNING_RATES))  # words of a part
    seeds = np.random.default_rng([state.config.seed, state.done]).integers(SEEDS, size=-(-len(ids) // size))
    for seed, first in zip(seeds.tolist(), range(0, len(ids), size), strict=True):
        last = min(first + size, len(ids))
        launch(device_state, state.config, ids, sentence, first, last, state.lr, seed)
        state.advance((end - begin) * last // len(ids) - (end - begin) * first // len(ids))
    if not len(ids):
        state.advance(end - begin)


def subsample(ids: Tensor, lengths: Tensor, keep: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the words (n,) of ids (N,) that subsampling keeps, and the number of the sentence of each, (n,)."""
    sentence = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device, dtype=torch.int32), lengths)
    kept = torch.rand(len(ids), device=ids.device, generator=generator) < keep[ids.long()]
    return ids[kept], sentence[kept]


def launch(
    device_state: DeviceState,
    config: VectorsConfig,
    ids: Tensor,
    sentence: Tensor,
    first: int,
    last: int,
    lr: float,
    seed: int,
) -> None:
    """Train on the words first to last (exclusive) of a text; their windows may reach beyond."""
    import triton

    from regard.vectors.word2vec_triton import train_part

    tree, cbow = config.loss == "hierarchical", config.model == "cbow"
    programs = min(config.batch or (256 if tree else 512), last - first)
    dim = device_state.inputs.shape[1]
    train_part[(programs,)](
        ids, sentence, len(ids), first, last, device_state.inputs, device_state.outputs,
        *device_state.noise, *device_state.tree, device_state.totals, seed, lr,
        len(device_state.keep), dim, device_state.inputs.stride(0), config.window, config.negatives,
        CBOW=cbow, TREE=tree, SHRINK=config.shrink_windows, DIVIDED=cbow and config.cbow_gradient == "divided",
        D=triton.next_power_of_2(dim), W=triton.next_power_of_2(2 * config.window), num_warps=WARPS,
    )  # fmt: skip
