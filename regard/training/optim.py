"""AdamW over two groups of parameters, and one update that never applies a bad gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.layers.embedding import Embedding, Head
from regard.layers.positions import Positions


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices alone: a bias, a norm, a position or a rare word's embedding has no reason to shrink."""
    free = {id(p) for m in model.modules() if isinstance(m, (Embedding, Head, Positions)) for p in m.parameters()}
    decayed = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in free]
    others = [p for p in model.parameters() if p.dim() < 2 or id(p) in free]
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=torch.tensor(config.lr, device=device),
        betas=(config.beta1, config.beta2),
        eps=1e-9,
        fused=True,
        capturable=device.type == "cuda",  # may be recorded into a CUDA graph
    )


class Updater:
    """Clip, check, step. A loss or gradient that is not finite freezes the weights *before* the step, from then on.

    The fused kernel skips its work where `found_inf` is set, so the check costs no wait for the device; whoever asks
    `first_bad_step` later learns which step it was, and the weights are still those before it.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.optimizer = make_optimizer(model, config)
        self.parameters = list(model.parameters())
        self.clip = config.clip if config.clip > 0 else torch.inf
        device = self.parameters[0].device
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.frozen = torch.zeros((), device=device)  # 1.0 from the first bad step on
        self.optimizer.found_inf = self.frozen  # type: ignore[attr-defined]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)

    def step(self, loss: Tensor) -> Tensor:
        """One update from the gradients that are there; returns their norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip, foreach=True)
        self.frozen.copy_(torch.maximum(self.frozen, (~torch.isfinite(norm + loss)).float()))
        self.good_steps += (self.frozen == 0).to(torch.int64)
        self.optimizer.step()
        # A recorded step needs its gradients to stay where they are; elsewhere, dropping them saves clearing and adding.
        self.optimizer.zero_grad(set_to_none=self.frozen.device.type == "cpu")
        return norm

    def first_bad_step(self, start: int) -> int | None:
        """The step that was not finite, if one was; `start` is the step this updater began after. Waits for the device."""
        return start + int(self.good_steps) + 1 if self.frozen.item() else None
