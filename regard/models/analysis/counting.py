"""Counts a model by running it on the meta device, where tensors have shapes and no numbers.

Nothing here knows what a model is made of. Parameters are those of its modules, FLOPs are those of the matrix products
that a forward pass makes, each by its shapes, and a product belongs to the module whose weight is in it, else to the
module that runs. So a part that nobody has seen before is counted like all others.

Of blocks that are alike one is run: a module of an nn.ModuleList that has the structure of an earlier one, and is called
with arguments of the same shapes, is not run again; what the earlier one did is noted for it.

An operator of a part that multiplies matrices gets its formula where torch's own counter looks for it, by
`torch.utils.flop_counter.register_flop_formula`. What is no matrix product (norms, softmax, sums) counts nothing.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers import recurrent
from regard.layers.part import find_failing_part
from regard.models.architectures import make_model
from regard.models.weights import SkipInit

Shape = tuple[int, ...]

# ---- formulas ----------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> int:
    """(..., m, k) x (k, n): 2 m k n."""
    return 2 * a.numel() * b.shape[-1]


def attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """q k^T and the weighted sum of v, for q (B, H, T, D) and k, v (B, G, S, D), masked or not."""
    return 2 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])


FORMULAS: dict[str, Callable[..., int]] = {
    "aten::mm": product,
    "aten::bmm": product,
    "aten::addmm": lambda bias, a, b, **_: product(a, b),
    "aten::baddbmm": lambda bias, a, b, **_: product(a, b),
    # what torch has no formula for
    "aten::mv": lambda matrix, vector: 2 * matrix.numel(),
    "aten::addmv": lambda bias, matrix, vector, **_: 2 * matrix.numel(),
    "aten::dot": lambda a, b: 2 * a.numel(),
    "aten::_addmm_activation": lambda bias, a, b, **_: product(a, b),
    "aten::_grouped_mm": lambda a, b, *_, **__: product(a, b),  # every row meets one of the matrices
    "regard::activated": lambda x, weight, *_: 2 * x.numel() * len(weight),
    "regard::activated_backward": lambda *_: 0,  # its products are outside of it
    "regard::add_norm": lambda *_: 0,
    "regard::add_norm_backward": lambda *_: 0,
    "regard::short_attention": lambda q, k, v, *_: attention(q, k, v),
    # the scores again, and the gradients of q, k, v and the weights
    "regard::short_attention_backward": lambda grad, q, k, v, *_: 5 * attention(q, k, v) // 2,
}


RARE = tuple(
    f"aten::{name}" for name in ("_scaled", "_flash", "_efficient", "_cudnn", "cudnn", "conv", "_conv", "_slow")
)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """The FLOPs of an operation, or None where it is no product.

    torch's formulas are asked for rare products, and for operators whose authors have registered one with torch. Its module
    imports Triton: it is not imported for what all models do."""
    name = func._schema.name
    if name in FORMULAS:
        return FORMULAS[name](*args, **kwargs)
    if name.startswith(RARE):
        importlib.import_module("torch.utils.flop_counter")
    torchs = sys.modules.get("torch.utils.flop_counter")
    formula = torchs and torchs.flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula else None


# ---- tensors without numbers -------------------------------------------------------------------------------------------


class MetaShapes(TorchDispatchMode):
    """Answers operations on meta tensors by their shapes.

    torch can do that itself, but it works out the shapes of most operations in Python, and loads its compiler before the
    first of them, which takes longer than counting a model. The few rules here do for nearly all operations; the others
    are torch's.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for the compiler, which would be loaded for it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return result_of(func, args, kwargs or {})


SAME_SHAPE = {
    f"aten::{name}"
    for name in ("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "flip", "tril", "triu", "argsort")
}
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addmv": 1}
REDUCTION = getattr(torch.Tag, "reduction", None)


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation returns, on the meta device if one of its arguments is there."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    name: str = func._schema.name
    if not tensors and torch.device(kwargs.get("device") or "cpu").type == "meta":
        if name == "aten::arange":
            return arange(*args, **kwargs)
        if name in ("aten::rand", "aten::randn"):
            return torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
    if not any(x.is_meta for x in tensors) or "out" in kwargs:
        return func(*args, **kwargs)
    if name.endswith("_") and torch.Tag.inplace_view not in func.tags:
        return args[0]  # it would be written into
    if torch.Tag.pointwise in func.tags:
        return pointwise(func, args, kwargs, tensors)
    if len(tensors) == 1 and (name in SAME_SHAPE or REDUCTION in func.tags):
        return along_dimensions(func, args, kwargs, tensors[0])
    if name == "aten::native_layer_norm":
        x, rows = args[0], args[0].shape[: args[0].dim() - len(args[1])]
        stats = x.new_empty((*rows, *(1,) * len(args[1])))
        return x.new_empty(x.shape), stats, stats
    if name in PRODUCTS:
        a, b = args[PRODUCTS[name] :][:2]
        return a.new_empty((*a.shape[:-1], *b.shape[a.dim() - 1 :]))
    if name == "aten::embedding":
        return args[0].new_empty((*args[1].shape, args[0].shape[1]))
    if name == "aten::gather":
        return args[0].new_empty(args[2].shape)
    if name == "aten::index" and all(i is not None and i.dtype == torch.long for i in args[1]):
        return args[0].new_empty((*broadcast(*(i.shape for i in args[1])), *args[0].shape[len(args[1]) :]))
    if name in ("aten::cat", "aten::stack"):
        return joined(name == "aten::stack", *args, **kwargs)
    return func(*args, **kwargs)


def arange(*limits: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    start, end, step = {1: (0, *limits, 1), 2: (*limits, 1), 3: limits}[len(limits)]
    whole = all(isinstance(x, int) for x in limits)
    n = max(0, math.ceil((end - start) / step))
    return torch.empty(n, dtype=dtype or (torch.long if whole else torch.get_default_dtype()), device="meta")


def broadcast(*shapes: Shape) -> Shape:
    """The common shape; where two sizes differ, one of them is 1."""
    rows = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in rows)[::-1]


def ordered_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same shape, its dimensions in the same order in memory."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    dense = torch.empty([x.shape[i] for i in order], dtype=dtype, device="meta")
    return dense.permute(sorted(range(x.dim()), key=order.__getitem__))


def pointwise(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """The result has the common shape, and the type that the operation itself has on a CPU for tensors of no numbers."""
    shape = broadcast(*(x.shape for x in tensors))
    dense = kwargs.get("memory_format") == torch.contiguous_format
    like = None if dense else next((x for x in tensors if x.shape == shape), None)  # the order in memory is kept

    def empty(x: Any) -> Any:
        return torch.empty((0,) * x.dim(), dtype=x.dtype) if isinstance(x, Tensor) else x

    def full(x: Any) -> Any:
        if like is None:
            return torch.empty(shape, dtype=x.dtype, device="meta")
        return ordered_as(like, x.dtype)

    return tree_map(full, func(*tree_map(empty, args), **tree_map(empty, kwargs)))


def along_dimensions(func: Any, args: Any, kwargs: Any, x: Tensor) -> Any:
    """An operation that keeps or drops whole dimensions. A CPU tells which, on a small tensor of sizes 2, 3, 4, ..."""
    sizes = dict(enumerate(x.shape, start=2)) | {1: 1}

    def small(y: Any) -> Any:
        return torch.zeros(*range(2, x.dim() + 2), dtype=x.dtype) if isinstance(y, Tensor) else y

    def full(y: Tensor) -> Tensor:
        return torch.empty([sizes[n] for n in y.shape], dtype=y.dtype, device="meta")

    return tree_map(full, func(*tree_map(small, args), **tree_map(small, kwargs)))


def joined(stacked: bool, parts: list[Tensor], dim: int = 0) -> Tensor:
    dtype, shape = parts[0].dtype, list(parts[0].shape)
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    if stacked:
        shape.insert(dim % (len(shape) + 1), len(parts))
    else:
        parts = [part for part in parts if part.shape != (0,)] or parts
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_model(config: ModelConfig) -> nn.Module:
    """Build a model that takes no memory, whatever its size."""
    with torch.device("meta"), SkipInit(), MetaShapes():
        return make_model(config).eval()


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, without a copy of its numbers on the way."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).eval()


# ---- counting ----------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """Products of matrices that belong to one module."""

    module: nn.Module
    flops: int
    weight: str | None  # the module's parameter that was multiplied


class Output(NamedTuple):
    """What a module returned: the shape of its first tensor."""

    module: nn.Module
    shape: Shape


class ForwardCount(MetaShapes):
    """While it is entered, what a model on the meta device does is noted in `log`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.log: list[Product | Output] = []
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[nn.Module] = [model]  # the innermost last
        self.owners: dict[int, list[tuple[nn.Module, str]]] = {}  # a storage -> whose weight is in it
        for module in self.paths:
            for name, p in module.named_parameters(recurse=False):
                self.owners.setdefault(storage(p), []).append((module, name))
        self.copies: list[Tensor] = []  # kept, or another tensor would get the storage of one
        self.until = ExitStack()
        self.done: dict[Any, Any] = {}  # what alike modules did

    def __enter__(self) -> ForwardCount:
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module)
        for handle in (before, after):
            self.until.callback(handle.remove)
        for module in self.paths:
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                for child in module:
                    self.until.enter_context(self._counted_once(child))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.until.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = result_of(func, args, kwargs)
        name = func._schema.name
        if (
            name in ("aten::_to_copy", "aten::clone") and storage(args[0]) in self.owners
        ):  # a weight in another precision
            self.owners[storage(out)] = self.owners[storage(args[0])]
            self.copies.append(out)
        if name == "aten::embedding":
            module, _ = self._owner(args)
            self.log.append(Output(module, tuple(out.shape)))
        elif flops := flops_of(func, args, kwargs, out):
            self._note(flops, args)
        return out

    def _note(self, flops: int, args: Any) -> None:
        module, weight = self._owner(args)
        self.log.append(Product(module, flops * recurrent.repetition_count(), weight))

    def _owner(self, args: Any) -> tuple[nn.Module, str | None]:
        """Whom an operation belongs to. A tied weight is the running module's if it has it, else its first owner's."""
        largest = sorted(
            (x for x in args if isinstance(x, Tensor)), key=lambda x: -x.numel()
        )  # a matrix before its bias
        for x in largest:
            if owners := self.owners.get(storage(x)):
                return next((owner for owner in owners if owner[0] is self.running[-1]), owners[0])
        return self.running[-1], None

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module in self.paths:
            self.running.append(module)

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if module in self.paths:
            self.running.pop()
            first = next((x for x in tree_leaves(out) if isinstance(x, Tensor)), None)
            if first is not None:
                self.log.append(Output(module, tuple(first.shape)))

    @contextmanager
    def _counted_once(self, module: nn.Module) -> Iterator[None]:
        """A call like an earlier one of a module like this is not made again."""
        structure, usual, own = structure_key(module), module.forward, vars(module).get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = structure, structure_key((args, kwargs)), recurrent.repetition_count()
            mine = [*module.modules(), *modules_in((args, kwargs))]
            if key in self.done:
                out, theirs, log = self.done[key]
                place = dict(zip(theirs, mine, strict=True))
                self.log += [entry._replace(module=place.get(entry.module, entry.module)) for entry in log]
                return out
            start = len(self.log)
            out = usual(*args, **kwargs)
            self.done[key] = out, mine, self.log[start:]
            return out

        module.forward = forward
        try:
            yield
        finally:
            del module.forward
            vars(module).update({} if own is None else {"forward": own})

    # ---- results ----

    def flops(self) -> Counter[str]:
        """FLOPs by the path of a module."""
        found: Counter[str] = Counter()
        for entry in self.log:
            if isinstance(entry, Product):
                found[self.paths[entry.module]] += entry.flops
        return found

    def shapes(self) -> dict[str, Shape]:
        """What every module that was called returned, by its path."""
        return {self.paths[entry.module]: entry.shape for entry in self.log if isinstance(entry, Output)}

    def weights(self) -> dict[nn.Parameter, int]:
        """The parameters that were multiplied, and the FLOPs of that."""
        found: Counter[nn.Parameter] = Counter()
        for entry in self.log:
            if isinstance(entry, Product) and entry.weight is not None:
                found[entry.module.get_parameter(entry.weight)] += entry.flops
        return found


def storage(x: Tensor) -> int:
    """What views of a tensor share."""
    return x.untyped_storage()._cdata


OWN = set(vars(nn.Module()))  # what every module has


def structure_key(x: Any) -> Any:
    """A value that is equal for what does the same with tensors of the same shapes: structure matters, numbers do not."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.device.type
    if isinstance(x, nn.Module):
        plain = {name: value for name, value in vars(x).items() if name not in OWN and name != "forward"}
        return type(x), structure_key([plain, x._parameters, x._buffers, x._modules])
    if isinstance(x, dict):
        return type(x), tuple((structure_key(key), structure_key(value)) for key, value in x.items())
    if isinstance(x, list | tuple):
        return type(x), tuple(structure_key(value) for value in x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple(structure_key(getattr(x, field.name)) for field in fields(x))
    if x is None or isinstance(x, bool | int | float | str | torch.dtype | torch.device):
        return type(x), x
    return id(x)


def modules_in(x: Any) -> Iterator[nn.Module]:
    """Modules among arguments, with all that is in them, always in the same order."""
    if isinstance(x, nn.Module):
        yield from x.modules()
    elif isinstance(x, dict):
        yield from modules_in([*x.values()])
    elif isinstance(x, list | tuple):
        for value in x:
            yield from modules_in(value)
    elif is_dataclass(x) and not isinstance(x, type):
        yield from modules_in([getattr(x, field.name) for field in fields(x)])


def count(model: nn.Module, *inputs: Tensor) -> ForwardCount:
    """Run a model of the meta device, and return what it did."""
    counting = ForwardCount(model)
    try:
        with torch.no_grad(), counting:
            model(*inputs)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        part, why = find_failing_part(error), str(error).split("\n", maxsplit=1)[0]
        raise RegardError(f"{part} cannot be counted: its forward needs numbers, not shapes alone ({why})") from None
    return counting
