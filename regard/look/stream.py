"""What goes from layer to layer: the residual stream, and what every sublayer is given and returns.

`hearing(model, keep)` tells `keep(name, vectors)` of it, in every forward inside the `with`:

| name                   | it is                                                                                     |
|------------------------|-------------------------------------------------------------------------------------------|
| encoder.embedding      | the embedded tokens (BERT: with those of its token types; ViT: patches)                   |
| encoder.position       | what the position scheme added to them, if it did                                         |
| encoder.input          | what enters the first block: their sum, normalised where the model does that              |
| encoder.0.self.input   | what the sublayer was given: normalised, where norms come first                           |
| encoder.0.self.mix     | what the heads read, side by side, before the output projection; only of attention        |
| encoder.0.self.output  | what the sublayer returned                                                                |
| encoder.0.self.stream  | the stream after it: x + output, or the norm of that where norms come last                |
| encoder.0.ff.inner     | what a dense feed-forward layer's second matrix multiplies                                |
| encoder.output         | what the stack returned, after its last norm                                              |
| logits                 | what the model returned                                                                   |

`self` is followed by `cross` in a decoder and by `ff`. A parallel block makes one sum of all its sublayers, which has the
name of the last. Which vectors inside of a sublayer are kept (`mix`, `inner`) is declared by its part (`Part.observed`).
Nothing is worked out twice: a sum is what the next norm made of it. The last one of a stack whose norms come first is added
up here, without dropout. Recurrent models have logits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers.block import Block
from regard.layers.part import Part
from regard.layers.stack import Stack

Keep = Callable[[str, Tensor], None]
INSIDE = ("blocks", "sublayers", "attentive", "body")  # parts of paths that no name needs


def short_name(path: str) -> str:
    """ "body.encoder.blocks.3.sublayers.self" is "encoder.3.self"."""
    return ".".join(part for part in path.split(".") if part not in INSIDE)


@contextmanager
def hearing(model: nn.Module, keep: Keep) -> Iterator[None]:
    with ExitStack() as entered:
        for path, module in model.named_modules():
            if isinstance(module, Stack):
                Heard(module, short_name(path), keep, entered)
        head = getattr(model, "answers", None) or getattr(model, "head", None)
        if isinstance(head, nn.Module):
            after(entered, head, lambda logits: keep("logits", logits))
        yield


class Heard:
    """The hooks of one stack."""

    def __init__(self, stack: Stack, name: str, keep: Keep, entered: ExitStack) -> None:
        self.stack, self.name, self.keep, self.entered = stack, name, keep, entered
        self.open: tuple[str, Tensor, Tensor] | None = None  # a sum that nobody has made yet
        self.inner = stack.embed
        entered.enter_context(swapped({stack: self.embed}, "embed"))
        before(entered, stack, self.begin)
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            self.add_block(block, f"{name}.{i}")
        after(entered, stack, self.end)

    def add_block(self, block: Block, name: str) -> None:
        for kind, part in block.sublayers.items():
            self.add_sublayer(part, f"{name}.{kind}")
        self.entered.enter_context(swapped({block: partial(self.summed, name)}, "observe"))

    def add_sublayer(self, sublayer: nn.Module, name: str) -> None:
        assert isinstance(sublayer, Part)
        before(self.entered, sublayer, partial(self.heard, f"{name}.input"))
        for vectors, child in sublayer.observed.items():
            before(self.entered, sublayer.get_submodule(child), partial(self.heard, f"{name}.{vectors}"))
        after(self.entered, sublayer, partial(self.returned, f"{name}.output"))

    def heard(self, name: str, given: tuple[Any, ...]) -> None:
        self.keep(name, given[0])

    def returned(self, name: str, result: Any) -> None:
        self.keep(name, result[0] if isinstance(result, tuple) else result)  # beside it may be an auxiliary loss

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        self.keep(f"{self.name}.embedding", x)
        result = self.inner(x, positions)
        if result is not x:  # of zeros it is what the scheme adds, without the rounding of a difference
            self.keep(f"{self.name}.position", self.stack.schemes[0].embed(torch.zeros_like(x), positions))  # type: ignore[operator]
        return result

    embed.observes = True  # type: ignore[attr-defined]

    def begin(self, given: tuple[Any, ...]) -> None:
        self.open = None
        self.keep(f"{self.name}.input", given[0])

    def summed(self, block: str, sublayer: str, x: Tensor, y: Tensor | None) -> None:
        """Keep the stream after a sublayer. Where y has still to be added to x, the sum is kept when the next one is made."""
        name = f"{block}.{sublayer}.stream"
        if self.open is not None:
            self.keep(self.open[0], x)
        if y is None:
            self.keep(name, x)
        self.open = None if y is None else (name, x, y)

    def end(self, result: Tensor) -> None:
        if self.open is not None:
            name, x, y = self.open
            self.keep(name, (x + y).to(x.dtype))
        self.open = None
        self.keep(f"{self.name}.output", result)


def before(entered: ExitStack, module: nn.Module, tell: Callable[[tuple[Any, ...]], None]) -> None:
    def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
        tell(given)

    hook.observes = True  # type: ignore[attr-defined]  # CUDA-graph decoding may leave it out (decode/graphs/step_model.py)
    entered.enter_context(module.register_forward_pre_hook(hook))


def after(entered: ExitStack, module: nn.Module, tell: Callable[[Any], None]) -> None:
    def hook(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        tell(result)

    hook.observes = True  # type: ignore[attr-defined]
    entered.enter_context(module.register_forward_hook(hook))


@contextmanager
def swapped(values: Mapping[Any, object], name: str) -> Iterator[None]:
    """Instance attributes for the time being; afterwards each module has what it had, or nothing."""
    before = {module: module.__dict__[name] for module in values if name in module.__dict__}
    for module, value in values.items():
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module in values:
            del module.__dict__[name]
        for module, value in before.items():
            module.__dict__[name] = value
