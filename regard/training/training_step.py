"""One training step: forward, backward, clipping and update, captured as a CUDA graph.

On a GPU the blocks are compiled, and the whole step is captured once for each batch shape and then replayed as one CUDA
graph: small models are limited by launching kernels, not by arithmetic. Nothing here waits for the device. While a model is
observed (layers/hooks.py) its steps run eagerly, and so do those of an objective that needs the host (`can_capture`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import autocast
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.cells import Cell
from regard.layers.experts import expert_loads, limited_layers
from regard.layers.hooks import is_observed
from regard.layers.recurrent_attention import AttentionCell
from regard.layers.stack import Stack
from regard.training.objective import Objective
from regard.training.optimizer import Updater, prepare_model
from regard.training.parallel import SingleProcess

DDP_WARM_UP = 11  # steps that torch asks for before DDP is captured in a CUDA graph


class TrainingStep:
    """One optimizer step over a fixed number of batches (gradient accumulation).

    A step of one batch is a single CUDA graph, which frees its gradients after the update. A step of several batches is one
    graph for the forward and backward pass of a batch, and one for the update.
    """

    def __init__(
        self,
        objective: Objective,
        config: TrainConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: SingleProcess | None = None,
    ) -> None:
        self.device, self.dtype, self.objective = device, dtype, objective
        self.ranks = ranks or SingleProcess()
        modules = [*objective.model.modules()]
        self.stacks = [module for module in modules if isinstance(module, Stack)]
        self.auxiliary_layers: list[Any] = [module for module in modules if hasattr(type(module), "auxiliary_loss")]
        self.accumulate = config.accumulate
        self.is_graphed = device.type == "cuda" and config.compile and self.ranks.can_capture and objective.can_capture
        several = self.ranks.count > 1
        if several and self.accumulate > 1:  # only the last batch of a step adds up gradients: no two are alike
            self.is_graphed = False
        prepare_model(objective.model, config)  # before it is compiled and cut
        if device.type == "cuda" and config.compile and config.mesh.tensor == 1:
            compile_blocks(objective, self.ranks.is_sharded)
        stream = torch.cuda.Stream() if self.is_graphed else None
        with torch.cuda.stream(stream):  # DDP adds up gradients on the stream that it was made on, where it is captured
            self.forward = self.ranks.wrap(objective, dtype)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        agree = self.ranks.agree_on_largest
        self.updater = Updater(objective.model, config, self.is_graphed and self.accumulate > 1, agree)
        # The sums of the objective over steps; the trainer reads and resets them.
        self.sums = torch.zeros(3 + objective.more_sums, device=device)
        self.label_weight = torch.zeros((), device=device)  # 1 / number of scored labels of the step
        self.loss = torch.zeros((), device=device)  # of the step in progress
        self.norm = torch.zeros((), device=device)  # of the last gradient
        self.has_auxiliary = any(getattr(module, "auxiliary", False) is True for module in objective.model.modules())
        self.auxiliary = torch.zeros((), device=device)  # the auxiliary loss of the last batch
        self.expert_loads = expert_loads(objective.model)  # over steps; the trainer reads and resets them
        self.limited_layers = limited_layers(objective.model)
        if self.is_graphed:
            self.graphed_forward_backward = GraphedCallable(self._forward_backward)
            self.graphed_update = GraphedCallable(self._update)
            warm_up = DDP_WARM_UP if several else 0
            self.graphed_step = GraphedCallable(self._forward_backward_update, stream, warm_up)

    def __call__(self, batches: list[Batch], lr: float) -> None:
        """Update the weights by the gradient of the mean loss over all scored labels of `batches`.

        The batches are those of all processes, each of which computes its share. torch takes the mean of their gradients,
        where their sum is wanted, so the loss is multiplied by the number of shares."""
        self.label_weight.fill_(self.ranks.data_count / sum(batch.tokens for batch in batches))
        self.updater.set_lr(lr)
        forward_backward: Callable[..., None] = self._forward_backward
        update: Callable[..., None] = self._update
        # Replaying a CUDA graph runs no Python, so a model that is observed or changed from outside runs eagerly.
        if self.is_graphed and not is_observed(self.objective.model) and not any(s.intervened for s in self.stacks):
            assert len(batches) == self.accumulate, "captured for another number of batches"
            if self.accumulate == 1:
                return self.graphed_step(*self.ranks.share(batches[0]).to(self.device).inputs)
            forward_backward, update = self.graphed_forward_backward, self.graphed_update
        for i, batch in enumerate(batches):  # gradient accumulation
            with self.ranks.synchronize(self.forward, i == len(batches) - 1):
                forward_backward(*self.ranks.share(batch).to(self.device).inputs)
        update()

    def _forward_backward_update(self, *inputs: Tensor) -> None:
        """Run a whole step of one batch, which is captured as one CUDA graph."""
        self._forward_backward(*inputs)
        self._update()

    def _forward_backward(self, *inputs: Tensor) -> None:
        """Run one batch forward and backward, and add its gradients to those of the step."""
        with autocast(self.device, self.dtype):
            sums = self.forward(*inputs)  # (3,), or more
        # The auxiliary loss of parts is weighted by the batch's share of the scored labels of the step.
        auxiliary = [found for layer in self.auxiliary_layers if (found := layer.auxiliary_loss) is not None]
        loss = sums[0] * self.label_weight
        if auxiliary:
            total = sum(auxiliary[1:], auxiliary[0])
            loss = loss + total * sums[2] * self.label_weight
            self.auxiliary.copy_(total.detach())
        loss.backward()
        self.loss += loss.detach()
        self.sums += sums.detach()

    def _update(self) -> None:
        """Clip the gradients of the step and update the weights."""
        self.norm.copy_(self.updater.step(self.loss))
        self.loss.zero_()


def compile_blocks(objective: Objective, is_sharded: bool = False) -> None:
    """Compile a model block by block: equal blocks share one compiled form, for any shape, so it takes seconds, not minutes.

    Of recurrent layers the one-token step of the scan is compiled.
    """
    # In modules of FSDP2 torch takes numbers, such as that of heads, for inputs, which makes slow kernels.
    torch._dynamo.config.specialize_int = is_sharded
    torch._dynamo.config.specialize_float = True  # dropout rates and scales are constants, not inputs
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
    objective.loss_from_outputs = torch.compile(objective.loss_from_outputs, dynamic=True)  # type: ignore[method-assign]
