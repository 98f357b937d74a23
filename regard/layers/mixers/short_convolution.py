"""A short causal depthwise convolution: y[t, c] = b[c] + sum over i < kernel of w[c, kernel - 1 - i] x[t - i, c].

Recurrences such as Mamba read each channel through one, and through silu after it. Tokens that do not exist count as zero:
before the beginning of a text, and in another document of a packed row. kernels/causal_convolution.py computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.kernels.causal_convolution import causal_convolution, step
from regard.kernels.masks import PAD_POSITION
from regard.layers.decoding_state import PerRow


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over the last `kernel` tokens, followed by silu if asked for, and its decoding step.

    Decoding keeps the last kernel - 1 inputs of a row, the earliest first: `storage()` declares them, the mixer that owns
    the convolution names them in its `state()` and passes the tensor back."""

    def __init__(self, width: int, kernel: int, bias: bool = True, silu: bool = False) -> None:
        super().__init__()
        self.width, self.kernel, self.silu = width, kernel, silu
        self.weight = nn.Parameter(torch.empty(width, kernel))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def reset_parameters(self) -> None:
        """Draw weights and biases as torch's Conv1d does, from U(-1/sqrt(kernel), 1/sqrt(kernel))."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.kernel**-0.5), self.kernel**-0.5)

    def storage(self) -> PerRow:
        """Return the declaration of the inputs that decoding keeps."""
        return PerRow((self.kernel - 1, self.width))

    def forward(self, x: Tensor, starts: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Convolve whole rows, (B, T, C) -> (B, T, C).

        starts: (B, T), the column at which each token's document begins (`kernels.masks.document_starts`).
        inputs: (B, kernel - 1, C), the tokens before the first column where a text continues; None: zeros."""
        return causal_convolution(x, self.weight, self.bias, starts, self.silu, inputs)

    def store_last(self, x: Tensor, positions: Tensor, inputs: Tensor) -> None:
        """Put the last kernel - 1 inputs of each row of prompts x (B, T, C) into `inputs`, which holds those before x.

        positions: (B, T), PAD_POSITION on padding, which stands at the end of a row."""
        both = torch.cat([inputs, x.to(inputs.dtype)], 1)
        count = (positions > PAD_POSITION).sum(1, keepdim=True)  # (B, 1)
        columns = count + torch.arange(self.kernel - 1, device=x.device)  # (B, kernel - 1)
        inputs.copy_(both.gather(1, columns[..., None].expand(-1, -1, self.width)))

    def step(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Convolve one more token of each row, (N, C) -> (N, C), and move `inputs` on by one, in place."""
        return step(x, self.weight, self.bias, self.silu, inputs)
