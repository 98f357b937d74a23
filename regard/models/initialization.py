"""Every initial weight.

| weights                      | start                                                              |
|------------------------------|--------------------------------------------------------------------|
| projections                  | Xavier uniform; q, k, v share one matrix, so each starts smaller   |
|                              | by sqrt(2), which keeps early attention soft                       |
| embeddings (and a tied head) | N(0, 1/sqrt(C)): unit size after the sqrt(C) scaling, and logits   |
|                              | of unit size too; N(0, 0.02) where a norm follows them, as the     |
|                              | positions and token types have that are added to them             |
| token types                  | N(0, 0.02)                                                         |
| biases                       | 0                                                                  |
| LayerNorm, RMSNorm           | gain 1, bias 0                                                     |
| others                       | as the `init_weights` of their modules say                         |

Every parameter is drawn from a generator of its own, seeded by the model's seed and by the path of the module that holds
it (of modules with several matrices, of the parameter); what a module fills by `init_weights`, by the module's path. So a
weight does not depend on what was built before it: many GPUs can make the same weights shard by shard, and a block of a
hybrid keeps its weights when another block becomes one of another kind. The model's seed is one number of torch's global
generator.

A module with a method `init_weights` fills vectors and buffers of its own there. It may change its matrices and those of its
children too, which have been filled by then. A model that was built on the meta device becomes a real one by `materialise`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from regard.layers.embedding import Embedding, Head
from regard.layers.part import Part
from regard.models.heads import MaskedHead


def new_seed() -> int:
    """Draw the seed of a model. Models do that before anything else: what their layers draw at first is overwritten."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def initialize(model: nn.Module, seed: int | None = None) -> None:
    """Fill all parameters and computed buffers of a model, or of a layer; without a seed, by a new one."""
    seed = new_seed() if seed is None else seed
    model.seed = seed  # type: ignore[assignment]
    config = getattr(model, "config", None)
    modules = [*model.named_modules()]
    owners = {id(p): module for _, module in reversed(modules) for p in module.parameters(recurse=False)}
    for path, module in reversed(modules):  # children before their parents
        mine = {
            name: p for name, p in module.named_parameters(recurse=False) if owners[id(p)] is module
        }  # tied: the first's
        init_module(module, seed, path, mine, config is not None and config.embedding_norm)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give a model of the meta device its numbers: those that it would have if it had been built on `device`.

    `to_empty` of torch would tear tied weights apart."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            empty = made.setdefault(id(p), nn.Parameter(torch.empty_like(p, device=device), p.requires_grad))
            setattr(module, name, empty)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, made.setdefault(id(buffer), torch.empty_like(buffer, device=device)))
    initialize(model, model.seed)  # type: ignore[arg-type]


def init_module(module: nn.Module, seed: int, path: str, mine: dict[str, nn.Parameter], normed: bool = False) -> None:
    """Fill what belongs to one module, not to its children. `normed`: a norm follows the embeddings."""
    has_own = getattr(type(module), "init_weights", Part.init_weights) is not Part.init_weights
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is None or tensor.is_meta or not (has_own or mine):
        return
    path = path.removeprefix("body.")  # that of a classifier starts as it would by itself
    known = isinstance(module, KNOWN)
    with torch.no_grad():
        if mine and not known and not has_own and hasattr(module, "reset_parameters"):
            with seeded(seed, path, tensor.device):
                module.reset_parameters()  # type: ignore[operator]
            return
        for name, p in mine.items():
            with seeded(seed, path if known else f"{path}.{name}", p.device):
                if known:
                    fill(module, name, p, normed)
                else:
                    fill_other(name, p)
        if has_own:
            with seeded(seed, path, tensor.device):
                module.init_weights()  # type: ignore[operator]


KNOWN = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Linear, Head, MaskedHead)


def fill(module: nn.Module, name: str, p: Tensor, normed: bool) -> None:
    """Fill a parameter of a layer that all models are made of."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        nn.init.constant_(p, float(name == "weight"))
    elif name == "bias":
        nn.init.zeros_(p)
    elif isinstance(module, (Embedding, Head, MaskedHead)):
        nn.init.normal_(p, std=0.02 if normed else p.shape[1] ** -0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(p, std=0.02)
    else:
        nn.init.xavier_uniform_(p)


def fill_other(name: str, p: Tensor) -> None:
    """Fill a parameter of a part that says nothing: matrices, several of which may be one tensor, and biases. Other vectors
    stay as their part made them."""
    if p.dim() >= 2:
        for matrix in p.flatten(0, -3) if p.dim() > 2 else [p]:
            nn.init.xavier_uniform_(matrix)
    elif name == "bias":
        nn.init.zeros_(p)


@contextmanager
def seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Random numbers of `device` that depend on a seed and a path alone; afterwards its generator is as it was."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)
