"""The initialization of all weights.

| weights                      | initial values                                                     |
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

Every parameter is drawn from a generator of its own, seeded by the model's seed and by the path of its module (for modules
with several matrices, by the path of the parameter); `init_weights` of a module draws by the module's path. So a weight does
not depend on what was built before it: many GPUs can make the same weights shard by shard, and a block of a hybrid model
keeps its weights when another block gets another mixer. The model's seed is one number of torch's global generator.

A module with a method `init_weights` fills its own vectors and buffers there. It may also change its matrices and those of
its children, which have been filled by then. `materialize` gives a model on the meta device real weights.
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
from regard.layers.stack import Stack
from regard.models.heads import MaskedLMHead


def new_seed() -> int:
    """Draw the seed of a model, before its layers are built: these draw numbers too, which are overwritten later."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def initialize(model: nn.Module, seed: int | None = None) -> None:
    """Fill all parameters and computed buffers of a model or a layer; without a seed, with a new one."""
    seed = new_seed() if seed is None else seed
    model.seed = seed  # type: ignore[assignment]
    config = getattr(model, "config", None)
    modules = [*model.named_modules()]
    owners = {id(p): module for _, module in reversed(modules) for p in module.parameters(recurse=False)}
    for path, module in reversed(modules):  # children before their parents
        # A tied weight belongs to the first module that has it.
        mine = {name: p for name, p in module.named_parameters(recurse=False) if owners[id(p)] is module}
        init_module(module, seed, path, mine, config is not None and config.embedding_norm)


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Give a model on the meta device the weights that it would have if it had been built on `device`.

    torch's `to_empty` would untie tied weights."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            empty = made.setdefault(id(p), nn.Parameter(torch.empty_like(p, device=device), p.requires_grad))
            setattr(module, name, empty)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, made.setdefault(id(buffer), torch.empty_like(buffer, device=device)))
    initialize(model, model.seed)  # type: ignore[arg-type]


def materialize_part(model: nn.Module, path: str, device: torch.device | str) -> None:
    """Give one part of a model on the meta device the weights that `materialize` would give it; the rest stays there.

    With an empty path it is all that is left on the meta device. What a module changes in its children (`init_weights` of a
    stack) is left out: see `is_made_in_parts`."""
    made: dict[int, Tensor] = {}
    inside = [
        (name, module) for name, module in model.named_modules() if f"{name}.".startswith(f"{path}." if path else "")
    ]
    found = []
    for name, module in inside:
        own = [*module._parameters.items(), *module._buffers.items()]
        empty = {key: x for key, x in own if x is not None and x.is_meta}
        for key, x in empty.items():
            fresh = torch.empty_like(x, device=device)
            is_parameter = isinstance(x, nn.Parameter)
            setattr(
                module, key, made.setdefault(id(x), nn.Parameter(fresh, x.requires_grad) if is_parameter else fresh)
            )
        if empty:
            found.append((name, module))
    owners = {id(p): module for _, module in reversed(found) for p in module.parameters(recurse=False)}
    config = getattr(model, "config", None)
    for name, module in reversed(found):
        mine = {key: p for key, p in module.named_parameters(recurse=False) if owners[id(p)] is module}
        init_module(module, model.seed, name, mine, config is not None and config.embedding_norm)  # type: ignore[arg-type]


def is_made_in_parts(model: nn.Module) -> bool:
    """Return whether a model has blocks, and whether filling them one by one fills it as `initialize` does."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    kinds = (Stack, nn.Embedding, *KNOWN)
    parents = (m for m in model.modules() if hasattr(type(m), "init_weights") and not isinstance(m, (Part, *kinds)))
    return bool(stacks) and not any(stack.scales_queries for stack in stacks) and not any(parents)


def init_module(module: nn.Module, seed: int, path: str, mine: dict[str, nn.Parameter], normed: bool = False) -> None:
    """Fill the parameters `mine` of one module, not of its children; `normed` says that a norm follows the embeddings."""
    has_own = getattr(type(module), "init_weights", Part.init_weights) is not Part.init_weights
    tensor = next(chain(module.parameters(), module.buffers()), None)
    if tensor is None or tensor.is_meta or not (has_own or mine):
        return
    path = path.removeprefix("body.")  # the body of a classification model gets the weights it would have by itself
    known = isinstance(module, KNOWN)
    with torch.no_grad():
        if mine and not known and not has_own and hasattr(module, "reset_parameters"):
            with seeded(seed, path, tensor.device):
                module.reset_parameters()  # type: ignore[operator]
            return
        for name, p in mine.items():
            with seeded(seed, path if known else f"{path}.{name}", p.device):
                if known:
                    init_layer_parameter(module, name, p, normed)
                else:
                    init_part_parameter(name, p)
        if has_own:
            with seeded(seed, path, tensor.device):
                module.init_weights()  # type: ignore[operator]


KNOWN = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Linear, Head, MaskedLMHead)


def init_layer_parameter(module: nn.Module, name: str, p: Tensor, normed: bool) -> None:
    """Fill a parameter of a standard layer (`KNOWN`)."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        nn.init.constant_(p, float(name == "weight"))
    elif name == "bias":
        nn.init.zeros_(p)
    elif isinstance(module, (Embedding, Head, MaskedLMHead)):
        nn.init.normal_(p, std=0.02 if normed else p.shape[1] ** -0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(p, std=0.02)
    else:
        nn.init.xavier_uniform_(p)


def init_part_parameter(name: str, p: Tensor) -> None:
    """Fill a parameter of a part without rules of its own: a matrix, several matrices in one tensor, or a bias.

    Other vectors keep the values that their part gave them."""
    if p.dim() >= 2:
        for matrix in p.flatten(0, -3) if p.dim() > 2 else [p]:
            nn.init.xavier_uniform_(matrix)
    elif name == "bias":
        nn.init.zeros_(p)


@contextmanager
def seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Seed the generator of `device` with a seed and a path inside of the context, and restore its state afterwards."""
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
