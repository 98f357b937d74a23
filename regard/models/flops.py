"""FLOPs counted while a model runs, product by product, each where it is done.

torch has the formula of every product of matrices (torch.utils.flop_counter), and asks it of whatever comes by. Two things
it does not know: the fused attention of CPUs, which it takes for nothing, and the scores of a recurrent decoder, a product
and a sum. A product with a weight belongs to whoever owns that weight; one without, such as q k^T, to the layer that runs.

A model need not be there to be counted: tensors that have shapes and no numbers run through it just as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from regard.config import ModelConfig
from regard.layers.alignment import Additive
from regard.layers.recurrent import Recurrent
from regard.layers.stack import Stack
from regard.models.architectures import make_model
from regard.models.counted import place_of
from regard.models.seq2seq import Searching

Shape = tuple[int, ...]


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    """q k^T and the weighted sum of v; heads of keys may be shared."""
    b, h, t, d = q.shape
    return 2 * b * h * t * k.shape[2] * (d + v.shape[3])


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
}


class Counting(TorchDispatchMode):
    """While it is entered, `flops` and output `shapes` of the model's places are noted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config: ModelConfig = model.config  # type: ignore[assignment]
        self.flops: Counter[str] = Counter()
        self.shapes: dict[str, Shape] = {}
        self.running = [""]  # paths of the modules that run, the innermost last
        self.owners: dict[int, list[str]] = {}  # a storage -> the modules whose weights are in it
        for path, module in model.named_modules():
            for p in module.parameters(recurse=False):
                self.owners.setdefault(storage(p), []).append(path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            self.shapes[self.place(self.owner(args))] = tuple(out.shape)
        elif formula := FORMULAS.get(func._overloadpacket):
            self.flops[self.place(self.owner(args))] += formula(*args, **(kwargs or {}), out_val=out)
        return out

    def owner(self, args: tuple[Any, ...]) -> str:
        """The path of the module that an operation belongs to. A tied weight is whose turn it is, else its first owner's."""
        for x in args:
            owners = self.owners.get(storage(x)) if isinstance(x, Tensor) else None
            if owners:
                return self.running[-1] if self.running[-1] in owners else owners[0]
        return self.running[-1]

    def place(self, path: str) -> str:
        """A recurrent decoder itself multiplies only weights of attention with annotations."""
        place = place_of(path, self.config)
        return "decoder.0.attention" if place == "decoder" and self.config.architecture == "seq2seq" else place

    def enter(self, path: str) -> None:
        self.running.append(path)

    def leave(self, path: str, module: nn.Module, inputs: Any, out: Any) -> None:
        self.running.pop()
        if isinstance(module, Additive):
            q, k = inputs  # (B, K, A), (B, S, A): v . tanh(q + k) of every pair
            self.flops[self.place(path)] += 2 * prod(q.shape) * k.shape[-2]
        first = next((x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)), None)
        if first is not None and path:  # of modules inside one another that are one place, the outermost is the last
            self.shapes[place_of(path, self.config)] = tuple(first.shape)
            for inner, width in widths(module, self.shapes):
                self.shapes[place_of(f"{path}.{inner}", self.config)] = (*first.shape[:2], width)


def widths(module: nn.Module, shapes: dict[str, Shape]) -> Iterator[tuple[str, int]]:
    """How wide the outputs are of what recurrent modules call step by step."""
    if isinstance(module, Recurrent):
        for i, layer in enumerate(module.layers):
            yield f"layers.{i}", sum(cell.d_hidden for cell in layer.values())  # type: ignore[operator]
    if isinstance(module, Searching):
        yield "attentive.cell", module.attentive.cell.d_hidden
        yield "attentive.cross", shapes["decoder.0.attention"][-1]  # its weights, one a token of the source


def storage(x: Tensor) -> int:
    """What views of a tensor share, also without memory."""
    return x.untyped_storage()._cdata


def count(model: nn.Module, batch: int, s: int, t: int) -> Counting:
    """Run a forward pass over rows of these lengths, and count."""
    counting, training, one = Counting(model), model.training, next(model.parameters())
    model.eval()
    try:
        with torch.no_grad(), ExitStack() as until:
            if isinstance(one, FakeTensor):
                until.enter_context(one.fake_mode)
            inputs = example(model.config, batch, s, t, one)  # type: ignore[arg-type]
            for path, module in model.named_modules():
                until.enter_context(followed(counting, path, module))
            until.enter_context(counting)
            model(*inputs)
    finally:
        model.train(training)
    return counting


def hollow(config: ModelConfig) -> nn.Module:
    """A model whose tensors have shapes and no numbers: it takes no memory, whatever its size."""
    with FakeTensorMode():
        return make_model(config)


@contextmanager
def followed(counting: Counting, path: str, module: nn.Module) -> Iterator[None]:
    """The counter knows when this module runs and what it gives."""
    before = module.register_forward_pre_hook(lambda *_: counting.enter(path))
    after = module.register_forward_hook(lambda *call: counting.leave(path, *call))
    usual, otherwise = vars(module).copy(), countable(module)
    vars(module).update(otherwise)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        for name in otherwise:
            vars(module).pop(name)
            vars(module).update({name: usual[name]} if name in usual else {})


def countable(module: nn.Module) -> dict[str, Any]:
    """What a module must do otherwise to be counted. Fused cells hide their products, so they go step by step; the kernels
    of attention are not for tensors without numbers, so there the formula runs as it is written."""
    if isinstance(module, Recurrent):
        return {"fuses": False, "fuses_padded": False}
    if isinstance(module, Stack) and any(isinstance(p, FakeTensor) for p in module.parameters()):
        usual = module._plan
        return {
            "_plan": lambda mask, q, k, scheme, past=None, kernel=None: usual(mask, q, k, scheme, past, "reference")
        }
    return {}


# ---- what it runs on ---------------------------------------------------------------------------------------------------


def example(config: ModelConfig, batch: int, s: int, t: int, like: Tensor) -> tuple[Tensor, ...]:
    """Inputs of these lengths, without padding; those of a picture are its patches and one more."""

    def ids(length: int) -> Tensor:
        return torch.ones(batch, length, dtype=torch.long, device=like.device)

    if config.architecture == "vit":
        rows = isqrt(s - 1) if isqrt(s - 1) ** 2 == s - 1 else 1
        size = config.value("vit.patch_size") * rows, config.value("vit.patch_size") * ((s - 1) // rows)
        return (like.new_zeros(batch, config.value("vit.image_channels"), *size),)
    if config.architecture in ("transformer", "seq2seq"):
        return ids(s), ids(t)
    read = ids(max(s, t))
    return (read,) if config.answer == "none" else (read, torch.zeros_like(read))
