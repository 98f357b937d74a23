"""Counting parameters and FLOPs by running a model on the meta device, where tensors have shapes and no numbers.

No architecture is known here. FLOPs are those of the matrix products and Fourier transforms of a forward pass, each by its
shapes. A product belongs to the module whose weight is multiplied, otherwise to the module that is running. So any new part
is counted without further code.

Of equal blocks only one is run: if a module of an nn.ModuleList has the structure of an earlier one and is called with
arguments of the same shapes, the log of the earlier one is repeated for it.

A custom operator that multiplies matrices registers its formula with `torch.utils.flop_counter.register_flop_formula`,
where torch's own counter looks for it. Operations that are no matrix products (norms, softmax, sums) count as 0.
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
from regard.kernels import gated_linear_attention
from regard.layers import recurrent
from regard.layers.part import find_failing_part
from regard.models.architectures import make_model
from regard.models.weights import SkipInit

Shape = tuple[int, ...]

# ---- formulas ----------------------------------------------------------------------------------------------------------


def matmul_flops(a: Tensor, b: Tensor) -> int:
    """Return the FLOPs of (..., m, k) x (k, n): 2 m k n."""
    return 2 * a.numel() * b.shape[-1]


def attention_flops(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the FLOPs of q k^T and the weighted sum of v, for q (B, H, T, D) and k, v (B, G, S, D), masked or not."""
    return 2 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])


def fourier_flops(rows: Tensor, n: int) -> int:
    """Return the FLOPs of Fourier transforms of real rows (..., n) along the last dimension, by the usual 5/2 n log2 n."""
    return int(math.prod(rows.shape[:-1]) * 2.5 * n * math.log2(max(2, n)))


FORMULAS: dict[str, Callable[..., int]] = {
    "aten::mm": matmul_flops,
    "aten::bmm": matmul_flops,
    "aten::addmm": lambda bias, a, b, **_: matmul_flops(a, b),
    "aten::baddbmm": lambda bias, a, b, **_: matmul_flops(a, b),
    # torch has no formula for these
    "aten::mv": lambda matrix, vector: 2 * matrix.numel(),
    "aten::addmv": lambda bias, matrix, vector, **_: 2 * matrix.numel(),
    "aten::dot": lambda a, b: 2 * a.numel(),
    "aten::_addmm_activation": lambda bias, a, b, **_: matmul_flops(a, b),
    "aten::_grouped_mm": lambda a, b, *_, **__: matmul_flops(a, b),  # every row is multiplied with one of the matrices
    "aten::_fft_r2c": lambda x, dim, *_: fourier_flops(x, x.shape[-1]),
    "aten::_fft_c2r": lambda x, dim, _, n: fourier_flops(x, n),
    "regard::activated": lambda x, weight, *_: 2 * x.numel() * len(weight),
    "regard::activated_backward": lambda *_: 0,  # its products are outside of it
    "regard::grouped_product": lambda x, weight, _, transposed: 2 * x.numel() * weight.shape[2 if transposed else 1],
    "regard::grouped_weight_gradient": lambda grad, x, _: 2 * x.numel() * grad.shape[1],
    "regard::sort_by_expert": lambda *_: 0,
    "regard::gated_linear_attention": gated_linear_attention.forward_flops,
    "regard::gated_linear_attention_backward": gated_linear_attention.backward_flops,
    "regard::add_norm": lambda *_: 0,
    "regard::add_norm_backward": lambda *_: 0,
    # six operations for each state and token: the exponent, the input, the decay and the sum that is the output
    "regard::selective_scan": lambda x, u, a, *_: 6 * x.numel() * a.shape[1],
    "regard::selective_scan_backward": lambda grad, final, x, u, a, *_: 20 * x.numel() * a.shape[1],
    "regard::causal_convolution": lambda *_: 0,  # a few operations for each channel and token
    "regard::causal_convolution_backward": lambda *_: 0,
    "regard::wkv": lambda *_: 0,  # a few operations for each channel and token
    "regard::wkv_backward": lambda *_: 0,
    "regard::short_attention": lambda q, k, v, *_: attention_flops(q, k, v),
    # five products instead of two: the scores again, and the gradients of q, k, v and the weights
    "regard::short_attention_backward": lambda grad, q, k, v, *_: 5 * attention_flops(q, k, v) // 2,
}


# Products for which torch's formulas are loaded.
RARE = tuple(
    f"aten::{name}" for name in ("_scaled", "_flash", "_efficient", "_cudnn", "cudnn", "conv", "_conv", "_slow")
)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the FLOPs of an operation, or None if it is no product.

    torch's formulas are used for rare products and for operators that have registered one. Their module imports Triton, so
    it is not imported for the operations of common models."""
    name = func._schema.name
    if name in FORMULAS:
        return FORMULAS[name](*args, **kwargs)
    if name.startswith(RARE):
        importlib.import_module("torch.utils.flop_counter")
    torch_formulas = sys.modules.get("torch.utils.flop_counter")
    formula = torch_formulas and torch_formulas.flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula else None


# ---- shape inference ---------------------------------------------------------------------------------------------------


class MetaShapes(TorchDispatchMode):
    """A dispatch mode that infers the shapes of operations on meta tensors.

    torch can do that itself, but it computes most shapes in Python and loads its compiler before the first operation, which
    takes longer than counting a model. The few rules here cover nearly all operations; torch infers the others.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap the mode for its compiler, which it would have to load."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return infer_result(func, args, kwargs or {})


SAME_SHAPE = {
    f"aten::{name}"
    for name in ("_softmax", "_safe_softmax", "_log_softmax", "cumsum", "flip", "tril", "triu", "argsort")
}
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addmv": 1}
REDUCTION = getattr(torch.Tag, "reduction", None)


def infer_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, on the meta device if one of its arguments is there."""
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
        return args[0]  # an in-place operation
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
        return concatenate(name == "aten::stack", *args, **kwargs)
    return func(*args, **kwargs)


def arange(*limits: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Return the result of torch.arange on the meta device."""
    start, end, step = {1: (0, *limits, 1), 2: (*limits, 1), 3: limits}[len(limits)]
    whole = all(isinstance(x, int) for x in limits)
    n = max(0, math.ceil((end - start) / step))
    return torch.empty(n, dtype=dtype or (torch.long if whole else torch.get_default_dtype()), device="meta")


def broadcast(*shapes: Shape) -> Shape:
    """Return the common shape of tensors that can be broadcast together."""
    rows = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in rows)[::-1]


def empty_like_strides(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the same shape, with its dimensions in the same order in memory."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    dense = torch.empty([x.shape[i] for i in order], dtype=dtype, device="meta")
    return dense.permute(sorted(range(x.dim()), key=order.__getitem__))


def pointwise(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Return the result of a pointwise operation: of the common shape, and of the dtype that the operation has on a CPU for
    empty tensors."""
    shape = broadcast(*(x.shape for x in tensors))
    dense = kwargs.get("memory_format") == torch.contiguous_format
    like = None if dense else next((x for x in tensors if x.shape == shape), None)  # the order in memory is kept

    def empty(x: Any) -> Any:
        return torch.empty((0,) * x.dim(), dtype=x.dtype) if isinstance(x, Tensor) else x

    def full(x: Any) -> Any:
        if like is None:
            return torch.empty(shape, dtype=x.dtype, device="meta")
        return empty_like_strides(like, x.dtype)

    return tree_map(full, func(*tree_map(empty, args), **tree_map(empty, kwargs)))


def along_dimensions(func: Any, args: Any, kwargs: Any, x: Tensor) -> Any:
    """Return the result of an operation that keeps or drops whole dimensions: which ones is seen by running it on a small
    CPU tensor of sizes 2, 3, 4, ..."""
    sizes = dict(enumerate(x.shape, start=2)) | {1: 1}

    def small(y: Any) -> Any:
        return torch.zeros(*range(2, x.dim() + 2), dtype=x.dtype) if isinstance(y, Tensor) else y

    def full(y: Tensor) -> Tensor:
        return torch.empty([sizes[n] for n in y.shape], dtype=y.dtype, device="meta")

    return tree_map(full, func(*tree_map(small, args), **tree_map(small, kwargs)))


def concatenate(stacked: bool, parts: list[Tensor], dim: int = 0) -> Tensor:
    """Return the result of torch.cat, or of torch.stack."""
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
    """Build a model on the meta device, where it takes no memory whatever its size."""
    with torch.device("meta"), SkipInit(), MetaShapes():
        return make_model(config).eval()


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, without copying its numbers meanwhile."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).eval()


# ---- counting ----------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A matrix product, or several, and the module that it belongs to."""

    module: nn.Module
    flops: int
    weight: str | None  # the module's parameter that was multiplied


class OutputShape(NamedTuple):
    """The shape of the first tensor that a module returned."""

    module: nn.Module
    shape: Shape


class ForwardCount(MetaShapes):
    """A context that logs the matrix products and the output shapes of a model on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.log: list[Product | OutputShape] = []
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[nn.Module] = [model]  # modules whose forward is running, the innermost last
        self.owners: dict[int, list[tuple[nn.Module, str]]] = {}  # a storage -> modules and names of the weight in it
        for module in self.paths:
            for name, p in module.named_parameters(recurse=False):
                self.owners.setdefault(storage_id(p), []).append((module, name))
        self.copies: list[Tensor] = []  # kept alive, so that no other tensor gets the storage of one
        self.until = ExitStack()
        self.done: dict[Any, Any] = {}  # output and log of modules by structure and arguments

    def __enter__(self) -> ForwardCount:
        before = register_module_forward_pre_hook(self._enter_module)
        after = register_module_forward_hook(self._leave_module)
        for handle in (before, after):
            self.until.callback(handle.remove)
        for module in self.paths:
            if isinstance(module, nn.ModuleList) and len(module) > 1:
                for child in module:
                    self.until.enter_context(self._run_once(child))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.until.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = infer_result(func, args, kwargs)
        name = func._schema.name
        # The copy of a weight in another precision belongs to the same modules.
        if name in ("aten::_to_copy", "aten::clone") and storage_id(args[0]) in self.owners:
            self.owners[storage_id(out)] = self.owners[storage_id(args[0])]
            self.copies.append(out)
        if name == "aten::embedding":
            module, _ = self._owner(args)
            self.log.append(OutputShape(module, tuple(out.shape)))
        elif flops := flops_of(func, args, kwargs, out):
            self._note(flops, args)
        return out

    def _note(self, flops: int, args: Any) -> None:
        module, weight = self._owner(args)
        self.log.append(Product(module, flops * recurrent.repetition_count(), weight))

    def _owner(self, args: Any) -> tuple[nn.Module, str | None]:
        """Return the module that an operation belongs to, and the name of its weight.

        A tied weight belongs to the running module if that has it, otherwise to its first owner."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        for x in sorted(tensors, key=lambda x: -x.numel()):  # a matrix comes before its bias
            if owners := self.owners.get(storage_id(x)):
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
                self.log.append(OutputShape(module, tuple(first.shape)))

    @contextmanager
    def _run_once(self, module: nn.Module) -> Iterator[None]:
        """Replace the forward of a module: a call with a structure and shapes that have run before is not run again."""
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
        """Return the FLOPs of each module, by its path."""
        found: Counter[str] = Counter()
        for entry in self.log:
            if isinstance(entry, Product):
                found[self.paths[entry.module]] += entry.flops
        return found

    def shapes(self) -> dict[str, Shape]:
        """Return the output shape of every module that was called, by its path."""
        return {self.paths[entry.module]: entry.shape for entry in self.log if isinstance(entry, OutputShape)}

    def weights(self) -> dict[nn.Parameter, int]:
        """Return the parameters that were multiplied, with the FLOPs of these products."""
        found: Counter[nn.Parameter] = Counter()
        for entry in self.log:
            if isinstance(entry, Product) and entry.weight is not None:
                found[entry.module.get_parameter(entry.weight)] += entry.flops
        return found


def storage_id(x: Tensor) -> int:
    """Return a number that all views of a tensor share."""
    return x.untyped_storage()._cdata


OWN = set(vars(nn.Module()))  # attributes that every module has


def structure_key(x: Any) -> Any:
    """Return a key that is equal for modules or arguments of equal structure and shapes; their numbers do not matter."""
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
    """Yield the modules among arguments and their children, always in the same order."""
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
    """Run the forward pass of a model on the meta device and return its count."""
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
