"""Recording the attention weights (attn_weights) and the residual stream of a model while it runs.

    with record(model, "decoder.*.cross") as tape:
        model(source, target)
    tape["decoder.3.cross"][0].weights(rows=[5])  # (B, H, 1, S)

Recurrent decoders have one attention layer with one head, "decoder.cross", whose weights are an alignment.

A fused attention kernel never holds the weights, so a record keeps what they are computed from: queries, keys and the
plan, whose size is linear in the length, and the score function of a layer that has its own. The weights are computed
when they are asked for, and of a long sequence only the rows asked for: a row is compared with all of its keys at once,
so its softmax needs no stored log-sum-exp. The result of the forward pass does not change by a bit, and `difference()`
returns how far it is from the result of the recomputed weights.

`record(model, stream=True)` also keeps the vectors between the layers, as `tape.vectors`:

| name                   | vectors                                                                                   |
|------------------------|-------------------------------------------------------------------------------------------|
| encoder.embedding      | the embedded tokens (BERT: with token type embeddings; ViT: patches)                      |
| encoder.position       | the position embeddings that were added to them, if there are any                         |
| encoder.input          | the input of the first block: their sum, normalised where the model does that             |
| encoder.0.self.input   | the input of the sublayer: normalised in a pre-norm model                                 |
| encoder.0.self.mix     | the concatenated heads before the output projection; attention only                       |
| encoder.0.self.output  | the output of the sublayer                                                                |
| encoder.0.self.stream  | the residual stream after it: x + output, or the norm of that in a post-norm model        |
| encoder.0.ff.inner     | the input of the second matrix of a dense feed-forward layer                              |
| encoder.0.ff.experts   | the weight of every expert in a mixture of experts, 0 where it was not chosen             |
| encoder.output         | the output of the stack, after its last norm                                              |
| logits                 | the output of the model                                                                   |

`self` is followed by `cross` in a decoder and by `ff`. A parallel block makes one sum of all its sublayers, which has
the name of the last. A part declares which of its inner vectors are kept (`mix`, `inner`: `Part.observed`). Nothing is
computed twice: a sum is taken from the norm that computes it. The last sum of a pre-norm stack is computed here,
without dropout. Recurrent models have logits, and the vectors of feed-forward parts between their layers: the part after
layer 0 of the encoder is encoder.0.ff, in the two columns of Deep-Att encoder.forward.0.ff and encoder.backward.0.ff.

A search moves its hypotheses at every step, so decoding is not recorded while it runs: the engine reads the best
hypothesis of each sentence once more, and that forward pass is recorded, with its `sentences` and `tokens`.
(look/beam_search_trace.py records the steps themselves.) A training step of a recorded model runs eagerly, neither
compiled nor as a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax, repeat_kv
from regard.kernels.masks import PAD_POSITION
from regard.layers.attention_kernels import AttentionPlan, raw_scores, reference
from regard.layers.block import Block
from regard.layers.hooks import AttentionHook, Recording
from regard.layers.mixers.attention import Attention
from regard.layers.part import Part
from regard.layers.recurrent import InterleavedRecurrent
from regard.layers.recurrent_attention import Alignment
from regard.layers.recurrent_feedforward import RecurrentFeedForward
from regard.layers.stack import Stack

Layer = Attention | Alignment
ScoreFunction = Callable[[Tensor, Tensor, AttentionPlan], Tensor]  # queries and keys -> unmasked scores (B, H, T, S)
Selection = Sequence[int] | Tensor | None  # None: all
QUERIES_AT_A_TIME = 256  # queries whose weights `difference` holds in memory at a time
UNNAMED = ("blocks", "sublayers", "attentive", "body")  # parts of module paths that short names leave out


@dataclass(frozen=True)
class AttentionRecord:
    """Queries, keys, values and plan of one attention layer in one forward pass."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, D)
    plan: AttentionPlan
    score: ScoreFunction = raw_scores
    sentences: list[int] | None = None  # after decoding: which source each of the B rows translates,
    tokens: list[list[int]] | None = None  # ... and the output tokens; row t of the weights predicted token t + 1
    out: Tensor | None = None  # (B, H, T, D) the result of the layer's kernel; None for a recurrent decoder

    def weights(self, rows: Selection = None, heads: Selection = None) -> Tensor:
        """Return the attention weights (B, H, T, S) in fp32, or those of some queries and heads; 0 where all is masked."""
        q, plan = self._queries(rows)
        return self._heads(masked_softmax(self._raw_scores(q, plan), plan.seen()), heads)

    def scores(self, rows: Selection = None, heads: Selection = None) -> Tensor:
        """Return the scores before the softmax, (B, H, T, S); -inf where a key is masked."""
        q, plan = self._queries(rows)
        return self._heads(self._raw_scores(q, plan).masked_fill(~plan.seen(), -torch.inf), heads)

    def difference(self) -> float | None:
        """Return the largest |weights @ v - out| over queries that are no padding; None without a kernel's result.

        It is rounding error only, unless attention dropout was on."""
        if self.out is None:
            return None
        worst = 0.0
        for rows in torch.arange(self.q.shape[2], device=self.q.device).split(QUERIES_AT_A_TIME):
            gap = (self._mixed_values(rows) - self.out[:, :, rows]).abs().amax((1, 3))  # (B, rows)
            worst = max(worst, float(gap.where(self.plan.query_positions[:, rows] != PAD_POSITION, 0.0).max()))
        return worst

    def _mixed_values(self, rows: Tensor) -> Tensor:
        """Return weights @ values for these queries, (B, H, rows, D)."""
        w = self.weights(rows)
        found = w @ repeat_kv(self.v.to(w.dtype), w)
        if self.plan.scheme.contextual:
            found = found + self.plan.scheme.values(w, (self.plan.query_positions[:, rows], self.plan.key_positions))  # type: ignore[operator]
        return found

    def _queries(self, rows: Selection) -> tuple[Tensor, AttentionPlan]:
        if rows is None:
            return self.q, self.plan
        places = checked_indices(rows, self.q.shape[2], "queries").to(self.q.device)
        return self.q[:, :, places], self.plan.for_queries(places)

    def _raw_scores(self, q: Tensor, plan: AttentionPlan) -> Tensor:
        # fp32 for a bf16 model too: the fused kernels also keep their scores in fp32.
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, self.k))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return self.score(q, k, plan)

    def _heads(self, found: Tensor, heads: Selection) -> Tensor:
        return found if heads is None else found[:, checked_indices(heads, found.shape[1], "heads").to(found.device)]


def checked_indices(which: Sequence[int] | Tensor, n: int, what: str) -> Tensor:
    """Return non-negative indices below n; checked on the CPU, because a CUDA context does not survive a wrong index."""
    try:
        return torch.arange(n)[torch.as_tensor(which, dtype=torch.long, device="cpu")]
    except IndexError as error:
        raise RegardError(f"the record has {n} {what}, counted from 0: there is no such one ({error})") from None


class Tape(Recording):
    """The records of each layer, oldest first: `tape["decoder.0.cross"][-1]`. It iterates over the names of layers.

    `vectors` maps the names of the module docstring to one tensor per forward pass, if the stream is recorded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._records: dict[str, list[AttentionRecord]] = {name: [] for name in names}
        self.vectors: dict[str, list[Tensor]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._records)

    @property
    def is_recording(self) -> bool:
        """Whether it is neither paused nor in a backward pass, which recomputes blocks that were recorded before."""
        return not self.pauses and torch._C._current_graph_task_id() == -1

    def keep(self, name: str, vectors: Tensor) -> None:
        if self.is_recording:
            self.vectors.setdefault(name, []).append(vectors.detach())

    def __getitem__(self, name: str) -> list[AttentionRecord]:
        if name not in self._records:
            raise RegardError(f"'{name}' was not recorded: choose one of {', '.join(self._records)}")
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def weights(self, name: str, rows: Selection = None, heads: Selection = None) -> Tensor:
        """Return the weights of the layer's last forward pass, (B, H, T, S)."""
        if not self[name]:
            raise RegardError(f"'{name}' has no records: run the model inside the `with`")
        return self[name][-1].weights(rows, heads)


@contextmanager
def record(model: nn.Module, patterns: str | Sequence[str] = "*", stream: bool = False) -> Iterator[Tape]:
    """Record the attention weights of layers whose names match, in every forward pass inside the `with`.

    Patterns are those of file names: "decoder.*.cross". With `stream`, the vectors between the layers of the whole model
    are recorded too; the model may have no attention then.
    """
    layers = attention_layers(model)
    if layers or not stream:
        layers = select_layers(layers, [patterns] if isinstance(patterns, str) else patterns)
    tape = Tape(list(layers))
    recorders = {layer: AttentionRecorder(layer, tape, name) for name, layer in layers.items()}
    concerned = None if stream else set[nn.Module](recorders)
    vectors = record_stream(model, tape.keep) if stream else nullcontext()
    with patch_attribute(recorders, "attend"), uncompiled(model, concerned), vectors:
        yield tape


def short_name(path: str) -> str:
    """Return "encoder.3.self" for the module path "body.encoder.blocks.3.sublayers.self"."""
    return ".".join(part for part in path.split(".") if part not in UNNAMED)


def attention_layers(model: nn.Module) -> dict[str, Layer]:
    """Return every attention layer of a model by its short name, such as "decoder.3.cross"."""
    paths = {path: layer for path, layer in model.named_modules() if isinstance(layer, (Attention, Alignment))}
    return {short_name(path): layer for path, layer in paths.items()}


def select_layers(layers: dict[str, Layer], patterns: Sequence[str]) -> dict[str, Layer]:
    """Return the layers whose names match any of the patterns; a pattern that matches none is an error."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            there_are = ", ".join(layers) or "none"
            raise RegardError(f"no attention layer is called '{pattern}': the layers of this model are {there_are}")
    return {name: layer for name, layer in layers.items() if any(fnmatchcase(name, p) for p in patterns)}


@contextmanager
def patch_attribute(values: Mapping[Any, object], name: str) -> Iterator[None]:
    """Set an instance attribute of each module inside the `with`; afterwards each has what it had before, or none."""
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


def uncompiled(model: nn.Module, layers: set[nn.Module] | None) -> AbstractContextManager[None]:
    """Run modules eagerly that were compiled in place and contain any of these layers; None: all compiled modules."""
    compiled = (m for m in model.modules() if m._compiled_call_impl is not None)
    around = (m for m in compiled if layers is None or layers.intersection(m.modules()))
    return patch_attribute(dict.fromkeys(around), "_compiled_call_impl")


# ---- attention --------------------------------------------------------------------------------------------------------


class AttentionRecorder(AttentionHook):
    """A hook that copies the inputs and the result of a layer's `attend` to a tape.

    Copies are needed because a key/value cache is written in place. Learned position schemes and score functions are
    copied too: their parameters may have been trained further by the time that the weights are asked for.
    """

    def __init__(self, layer: Layer, tape: Tape, name: str) -> None:
        super().__init__(layer, tape)
        self.own_score = layer.score if isinstance(layer, Alignment) else None
        self.tape, self.name = tape, name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Any:
        out = self.inner(q, k, v, plan)
        if self.tape.is_recording:
            self.tape[self.name].append(self.make_record(q, k, v, plan, out))
        return out

    def make_record(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, out: Tensor | None) -> AttentionRecord:
        scheme = plan.scheme
        if scheme.relative or scheme.contextual:
            scheme = copy.deepcopy(scheme).requires_grad_(False)
        # `kernel_input` may be a dense mask.
        light = replace(plan, kernel=reference, scheme=scheme, kernel_input=None)
        q, k, v = (x.detach().clone() for x in (q, k, v))
        out = None if out is None else out.detach()
        return AttentionRecord(q, k, v, light, self.score_function(), self.tape.sentences, self.tape.tokens, out)

    def score_function(self) -> ScoreFunction:
        if self.own_score is None:
            return raw_scores
        score = copy.deepcopy(self.own_score).requires_grad_(False)
        return lambda q, k, plan: score(q, k)


# ---- residual stream --------------------------------------------------------------------------------------------------


@contextmanager
def record_stream(model: nn.Module, keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `keep(name, vectors)` for the vectors between the layers, in every forward pass inside the `with`."""
    with ExitStack() as entered:
        for path, module in model.named_modules():
            if isinstance(module, Stack):
                StreamRecorder(module, short_name(path), keep, entered)
        for name, part, is_reversed in recurrent_parts(model):
            turned = (lambda name, x: keep(name, x.flip(1))) if is_reversed else keep
            observe_part(part, name, turned, entered)
        head = getattr(model, "prediction_head", None) or getattr(model, "head", None)
        if isinstance(head, nn.Module):
            add_forward_hook(entered, head, lambda logits: keep("logits", logits))
        yield


def recurrent_parts(model: nn.Module) -> Iterator[tuple[str, Part, bool]]:
    """Yield the name of each part between recurrent layers, the part, and whether it is given a text from its end on."""
    columns: dict[nn.Module, tuple[str, bool]] = {}
    for module in model.modules():
        if isinstance(module, InterleavedRecurrent):
            for name, column in module.columns.items():
                for i, layer in enumerate(column.feedforwards):  # type: ignore[arg-type]
                    columns[layer] = f"{name.rstrip('_')}.", module.begins_backward(name) != (i % 2 == 1)
    for module in model.modules():
        if isinstance(module, RecurrentFeedForward):
            within, is_reversed = columns.get(module, ("", False))
            yield f"{module.place.side}.{within}{module.place.index}.ff", module.part, is_reversed


def observe_part(part: Part, name: str, keep: Callable[[str, Tensor], None], entered: ExitStack) -> None:
    """Call `keep` with the input, the observed vectors and the output of a part, until `entered` is closed."""

    def keep_input(name: str, args: tuple[Any, ...]) -> None:
        keep(name, args[0])

    def keep_output(result: Any) -> None:
        keep(f"{name}.output", result[0] if isinstance(result, tuple) else result)  # a tuple also holds a loss

    add_forward_pre_hook(entered, part, partial(keep_input, f"{name}.input"))
    for vectors, child in part.observed.items():
        add_forward_pre_hook(entered, part.get_submodule(child), partial(keep_input, f"{name}.{vectors}"))
    add_forward_hook(entered, part, keep_output)


class StreamRecorder:
    """The hooks on one stack, its blocks and their sublayers; `entered` removes them."""

    def __init__(self, stack: Stack, name: str, keep: Callable[[str, Tensor], None], entered: ExitStack) -> None:
        self.stack, self.name, self.keep, self.entered = stack, name, keep, entered
        self.pending: tuple[str, Tensor, Tensor] | None = None  # name, x and y of a sum that is not computed yet
        self.inner_embed = stack.embed  # the stack's own method, or that of an outer recording
        entered.enter_context(patch_attribute({stack: self.embed}, "embed"))
        add_forward_pre_hook(entered, stack, self.begin)
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            self.add_block(block, f"{name}.{i}")
        add_forward_hook(entered, stack, self.end)

    def add_block(self, block: Block, name: str) -> None:
        for kind, part in block.sublayers.items():
            assert isinstance(part, Part)
            observe_part(part, f"{name}.{kind}", self.keep, self.entered)
        outer = block.observe  # None, or the observer of an outer recording, which must be called as well

        def observe(sublayer: str, x: Tensor, y: Tensor | None) -> None:
            if outer is not None:
                outer(sublayer, x, y)
            self.keep_sum(f"{name}.{sublayer}.stream", x, y)

        self.entered.enter_context(patch_attribute({block: observe}, "observe"))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        self.keep(f"{self.name}.embedding", x)
        result = self.inner_embed(x, positions)
        if result is not x:  # embedding zeros gives what the scheme adds, without the rounding of result - x
            added = self.stack.schemes[0].embed(torch.zeros_like(x), positions)  # type: ignore[operator]
            self.keep(f"{self.name}.position", added)
        return result

    embed.observes = True  # type: ignore[attr-defined]

    def begin(self, args: tuple[Any, ...]) -> None:
        self.pending = None
        self.keep(f"{self.name}.input", args[0])

    def keep_sum(self, name: str, x: Tensor, y: Tensor | None) -> None:
        """Keep the stream after a sublayer; if y has still to be added to x, when the next norm has computed the sum."""
        if self.pending is not None:
            self.keep(self.pending[0], x)
        if y is None:
            self.keep(name, x)
        self.pending = None if y is None else (name, x, y)

    def end(self, result: Tensor) -> None:
        if self.pending is not None:
            name, x, y = self.pending
            self.keep(name, (x + y).to(x.dtype))
        self.pending = None
        self.keep(f"{self.name}.output", result)


def add_forward_pre_hook(entered: ExitStack, module: nn.Module, observe: Callable[[tuple[Any, ...]], None]) -> None:
    """Call `observe(args)` before the module runs, until `entered` is closed."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        observe(args)

    # The mark tells CUDA-graph decoding that it may leave the hook out (decode/graphs/step_model.py).
    hook.observes = True  # type: ignore[attr-defined]
    entered.enter_context(module.register_forward_pre_hook(hook))


def add_forward_hook(entered: ExitStack, module: nn.Module, observe: Callable[[Any], None]) -> None:
    """Call `observe(result)` after the module has run, until `entered` is closed."""

    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        observe(result)

    hook.observes = True  # type: ignore[attr-defined]
    entered.enter_context(module.register_forward_hook(hook))
