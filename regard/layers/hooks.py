"""Hooks by which observers follow what the attention layers of a model compute.

A layer computes its attention in `attend`. An observer replaces that method by an `AttentionHook`, which calls the layer's
own method and passes queries, keys, values and result on to a `Recording` (look/record.py). This file holds only what
decoding and training must know about observers: whether a model has any (a CUDA graph would not call them), how to pause
them, and how to tell them which hypotheses a forward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeGuard
from weakref import WeakSet

from torch import nn


class Recording:
    """Base class of what observers write to. It can be paused, and knows which hypotheses a forward pass reads."""

    def __init__(self) -> None:
        self.pauses = 0  # how many `paused` blocks are active
        self.sentences: list[int] | None = None  # the source sentence of each row that is being read
        self.tokens: list[list[int]] | None = None  # the tokens of each row that is being read


class AttentionHook:
    """A replacement of a layer's `attend` that calls the original; subclasses record around that call."""

    observes: ClassVar[bool] = True  # it changes nothing, so CUDA-graph decoding may leave it out of its copy
    alive: ClassVar[WeakSet[AttentionHook]] = WeakSet()  # while it is empty, no model needs to be searched

    def __init__(self, layer: Any, recording: Recording | None) -> None:
        """Take the layer, and the recording that the hook writes to, or None for a hook that is no recorder."""
        self.alive.add(self)
        self.inner: Callable[..., Any] = layer.attend  # the layer's own method, or the hook of an outer recording
        self.recording = recording

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args)


def recordings_of(model: object) -> list[Recording]:
    """Return the recordings of a model that are active and not paused."""
    modules = model.modules() if isinstance(model, nn.Module) and AttentionHook.alive else ()
    hooks = (hook for module in modules for hook in _hooks_from(module.__dict__.get("attend")))
    return [recording for recording in dict.fromkeys(h.recording for h in hooks) if recording and not recording.pauses]


def _hooks_from(hook: object) -> Iterator[AttentionHook]:
    """Yield the hooks of nested recordings, the innermost `with` block first."""
    while isinstance(hook, AttentionHook):
        yield hook
        hook = hook.inner


def is_observed(model: object) -> TypeGuard[nn.Module]:
    """Return whether any recording of the model is active and not paused."""
    return bool(recordings_of(model))


@contextmanager
def paused(model: object) -> Iterator[None]:
    """Record nothing inside the `with` block."""
    recordings = recordings_of(model)
    for recording in recordings:
        recording.pauses += 1
    try:
        yield
    finally:
        for recording in recordings:
            recording.pauses -= 1


@contextmanager
def labelled(model: object, sentences: list[int], tokens: list[list[int]]) -> Iterator[None]:
    """Label everything recorded inside the `with` block with these sentences and tokens of hypotheses."""
    recordings = recordings_of(model)
    for recording in recordings:
        recording.sentences, recording.tokens = sentences, tokens
    try:
        yield
    finally:
        for recording in recordings:
            recording.sentences = recording.tokens = None
