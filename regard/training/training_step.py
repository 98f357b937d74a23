"""One optimizer step, as fast as the device can do it.

On a GPU the blocks are compiled, and the whole step (forward, backward, clipping, update) is recorded once for
each batch shape and then replayed as one CUDA graph: small models are limited by launching kernels, not by arithmetic.
Nothing here waits for the device. While somebody records the model (look/record.py) a step runs as written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import autocast
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.cells import Cell
from regard.layers.hooks import is_observed
from regard.layers.recurrent_attention import AttentionCell
from regard.layers.stack import Stack
from regard.training.objective import Objective
from regard.training.optimizer import Updater


class TrainingStep:
    """Where a step is one batch, all of it is one recording, whose gradients live no longer than they are needed."""

    def __init__(self, objective: Objective, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.objective = device, dtype, objective
        self.stacks = [module for module in objective.model.modules() if isinstance(module, Stack)]
        self.size, self.recorded = config.accumulate, device.type == "cuda" and config.compile
        self.updater = Updater(objective.model, config, in_place=self.recorded and self.size > 1)
        self.sums = torch.zeros(3, device=device)  # the objective's, over steps: whoever reads them resets them
        self.share = torch.zeros((), device=device)  # of one answer in the step's mean
        self.loss = torch.zeros((), device=device)  # of the step in progress
        self.norm = torch.zeros((), device=device)  # of the last gradient
        self.has_auxiliary = any(getattr(module, "auxiliary", False) is True for module in objective.model.modules())
        self.auxiliary = torch.zeros((), device=device)  # the auxiliary loss of the last batch
        if self.recorded:
            compile_blocks(objective)
            self.graphed_backward = GraphedCallable(self._backward)
            self.graphed_update = GraphedCallable(self._update)
            self.graphed_step = GraphedCallable(self._backward_and_update)

    def __call__(self, batches: list[Batch], lr: float) -> None:
        """Descend the mean loss over all that is scored in `batches`."""
        self.share.fill_(1 / sum(batch.tokens for batch in batches))
        self.updater.set_lr(lr)
        backward: Callable[..., None] = self._backward
        update: Callable[..., None] = self._update
        # Replaying a CUDA graph runs no Python, so a model that is observed or changed from outside runs eagerly.
        if self.recorded and not is_observed(self.objective.model) and not any(s.intervened for s in self.stacks):
            assert len(batches) == self.size, "captured for another number of batches"
            if self.size == 1:
                return self.graphed_step(*batches[0].to(self.device).inputs)
            backward, update = self.graphed_backward, self.graphed_update
        for batch in batches:
            backward(*batch.to(self.device).inputs)
        update()

    def _backward_and_update(self, *inputs: Tensor) -> None:
        self._backward(*inputs)
        self._update()

    def _backward(self, *inputs: Tensor) -> None:
        """Run one batch forward and backward, and add its gradients to those of the step."""
        with autocast(self.device, self.dtype):
            sums = self.objective(*inputs)  # (3,)
        # Parts with an auxiliary loss add it for each scored answer, so that batches weigh right when accumulated.
        auxiliary = [stack.auxiliary_loss for stack in self.stacks if stack.auxiliary_loss is not None]
        loss = sums[0] * self.share
        if auxiliary:
            total = sum(auxiliary[1:], auxiliary[0])
            loss = loss + total * sums[2] * self.share
            self.auxiliary.copy_(total.detach())
        loss.backward()
        self.loss += loss.detach()
        self.sums += sums.detach()

    def _update(self) -> None:
        self.norm.copy_(self.updater.step(self.loss))
        self.loss.zero_()


def compile_blocks(objective: Objective) -> None:
    """Block by block: blocks of a kind share one compiled form, for any shape, so compiling takes seconds, not minutes.
    Of recurrent layers it is the step of a scan."""
    torch._dynamo.config.specialize_float = True  # dropout rates and scales are constants: no second look at them
    modules = list(objective.modules())
    stacks = [module for module in modules if isinstance(module, Stack)]
    for stack in stacks:
        stack.compiled = True
    blocks: list[nn.Module] = [block for stack in stacks for block in stack.blocks]
    attentive = [module for module in modules if isinstance(module, AttentionCell)]
    inside = {step.cell for step in attentive}
    cells = [module for module in modules if isinstance(module, Cell) and module not in inside]
    for part in (*blocks, *attentive, *cells):
        part.compile(dynamic=True)
    objective.losses = torch.compile(objective.losses, dynamic=True)  # type: ignore[method-assign]
