"""Discrete linear systems x[t] = A x[t-1] + B u[t], y[t] = C x[t], one for each of H channels, over whole sequences.

The states of a channel are N/2 complex numbers that stand for N/2 conjugate pairs, as eigenvectors of a real matrix come.
They are stored as N real numbers, real parts first, and y = 2 Re(C x). So A is a real matrix (N, N).

A time-invariant system is a convolution with K[l] = C A^l B. Two short tables give the long kernel: with l = i m + j,
K[l] = (C A^(i m)) (A^j B) is one product of (L/m, N) with (N, m), where m is about sqrt(L). The same tables give the state
after a text and what a state adds to the outputs after it.

A `LinearSystem` says what its powers are; `DiagonalSystem` has them in closed form, `DenseSystem` computes them by squaring.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from regard.kernels.long_convolution import full_precision_product


def as_complex(x: Tensor) -> Tensor:
    """Return real and imaginary parts (..., N) as complex numbers (..., N/2)."""
    return torch.complex(*x.chunk(2, -1))


def as_real(x: Tensor) -> Tensor:
    """Return complex numbers (..., N/2) as real and imaginary parts (..., N)."""
    return torch.cat([x.real, x.imag], -1)


def split_length(length: int) -> tuple[int, int]:
    """Return two powers of 2, m and r, as equal as possible, with m r >= length."""
    bits = (length - 1).bit_length()
    return 1 << bits - bits // 2, 1 << bits // 2


class LinearSystem:
    """Linear systems of H channels with N real states each: B and C are (H, N), y = C x is a real product."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take B and C as complex numbers (H, N/2); an output is 2 Re(C x)."""
        self.inputs = as_real(inputs)
        self.outputs = 2 * as_real(outputs.conj())

    def step(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states (B, H, N) and the outputs (B, H) after one more input u (B, H)."""
        state = self.advance(state) + self.inputs * u[..., None]
        return state, (self.outputs * state).sum(-1)

    def advance(self, state: Tensor) -> Tensor:
        """Return A x for states x (..., H, N)."""
        raise NotImplementedError

    def columns(self, x: Tensor, n: int) -> Tensor:
        """Return x, A x, .. A^(n-1) x side by side, (..., H, N) -> (..., H, N, n), n a power of 2."""
        raise NotImplementedError

    def rows(self, every: int, n: int) -> Tensor:
        """Return C A^(i every) for i < n, (H, n, N); both numbers are powers of 2."""
        raise NotImplementedError

    def sum_blocks(self, blocks: Tensor, every: int) -> Tensor:
        """Return the sum over i of A^((n - 1 - i) every) x_i, (B, H, n, N) -> (B, H, N): what is left of n blocks."""
        raise NotImplementedError

    def advance_by(self, state: Tensor, counts: Tensor, most: int) -> Tensor:
        """Return A^count x for states x (B, H, N) and a number of tokens for each row, counts (B,), `most` at most."""
        raise NotImplementedError

    def kernel(self, length: int) -> Tensor:
        """Return K[l] = C A^l B for l < length, (H, length)."""
        m, r = split_length(length)
        return full_precision_product(self.rows(m, r), self.columns(self.inputs, m)).flatten(1)[:, :length]

    def outputs_after(self, state: Tensor, length: int) -> Tensor:
        """Return what states x (B, H, N) add to the next outputs: C A^(t+1) x for t < length, (B, H, length)."""
        m, r = split_length(length)
        columns = self.columns(self.advance(state), m)  # (B, H, N, m)
        return full_precision_product(self.rows(m, r), columns).flatten(2)[..., :length]

    def state_after(self, u: Tensor, counts: Tensor) -> Tensor:
        """Return the states (B, H, N) after the first `counts` (B,) inputs of each row u (B, H, T), from zeros."""
        m, r = split_length(u.shape[2])
        # The last input of every row moves to the last column, so that all rows end together.
        index = torch.arange(-m * r, 0, device=u.device) + counts[:, None]  # (B, m r)
        moved = u.gather(2, index.clamp(min=0)[:, None].expand(-1, u.shape[1], -1))
        moved = torch.where((index >= 0)[:, None], moved, 0)
        columns = self.columns(self.inputs, m).flip(-1)  # (H, N, m): the last input is multiplied by B alone
        return self.sum_blocks(full_precision_product(moved.unflatten(2, (r, m)), columns.mT), m)


class DiagonalSystem(LinearSystem):
    """Linear systems whose matrix is diagonal: powers are exponentials."""

    def __init__(self, log_diagonal: Tensor, inputs: Tensor, outputs: Tensor) -> None:
        """Take the complex logarithm of the diagonal, (H, N/2)."""
        super().__init__(inputs, outputs)
        self.log_diagonal = log_diagonal

    def powers(self, exponents: Tensor) -> Tensor:
        """Return the diagonal to some powers (n,), (n, H, N/2) complex."""
        return torch.exp(exponents[:, None, None] * self.log_diagonal)

    def advance(self, state: Tensor) -> Tensor:
        return as_real(as_complex(state) * torch.exp(self.log_diagonal))

    def columns(self, x: Tensor, n: int) -> Tensor:
        powers = self.powers(torch.arange(n, device=x.device)).movedim(0, -2)  # (H, n, N/2)
        return as_real(as_complex(x)[..., None, :] * powers).mT

    def rows(self, every: int, n: int) -> Tensor:
        powers = self.powers(torch.arange(n, device=self.outputs.device) * every).movedim(0, -2)
        return as_real(as_complex(self.outputs)[:, None] * powers.conj())  # C x as a real product: conj(C A) of pairs

    def sum_blocks(self, blocks: Tensor, every: int) -> Tensor:
        left = torch.arange(blocks.shape[2] - 1, -1, -1, device=blocks.device) * every
        return as_real((as_complex(blocks) * self.powers(left).movedim(0, -2)).sum(2))

    def advance_by(self, state: Tensor, counts: Tensor, most: int) -> Tensor:
        return as_real(as_complex(state) * self.powers(counts))


class DenseSystem(LinearSystem):
    """Linear systems whose matrix is not diagonal, given as a function of states; powers of the matrix by squaring."""

    def __init__(self, transition: Callable[[Tensor], Tensor], inputs: Tensor, outputs: Tensor) -> None:
        """Take the function that multiplies complex states (..., H, N/2) by A."""
        super().__init__(inputs, outputs)
        self.transition = transition

    def advance(self, state: Tensor) -> Tensor:
        return as_real(self.transition(as_complex(state)))

    @cached_property
    def squares(self) -> list[Tensor]:
        """The transposes of A, A^2, A^4, ... (H, N, N), as far as they have been used."""
        width, n = self.inputs.shape
        units = torch.eye(n, dtype=self.inputs.dtype, device=self.inputs.device)[:, None].expand(n, width, n)
        return [self.advance(units).transpose(0, 1)]

    def square(self, k: int) -> Tensor:
        """Return the transpose of A^(2^k), (H, N, N)."""
        while len(self.squares) <= k:
            self.squares.append(full_precision_product(self.squares[-1], self.squares[-1]))
        return self.squares[k]

    def columns(self, x: Tensor, n: int) -> Tensor:
        found = x[..., None]
        for k in range(n.bit_length() - 1):
            found = torch.cat([found, full_precision_product(self.square(k).mT, found)], -1)
        return found

    def rows(self, every: int, n: int) -> Tensor:
        found, first = self.outputs[:, None], every.bit_length() - 1
        for k in range(n.bit_length() - 1):
            found = torch.cat([found, full_precision_product(found, self.square(first + k).mT)], 1)
        return found

    def sum_blocks(self, blocks: Tensor, every: int) -> Tensor:
        k = every.bit_length() - 1
        while blocks.shape[2] > 1:
            earlier, later = blocks.unflatten(2, (-1, 2)).unbind(3)
            blocks, k = full_precision_product(earlier, self.square(k)) + later, k + 1
        return blocks[:, :, 0]

    def advance_by(self, state: Tensor, counts: Tensor, most: int) -> Tensor:
        for k in range(most.bit_length()):
            moved = full_precision_product(state[..., None, :], self.square(k))[..., 0, :]
            state = torch.where((counts >> k & 1).bool()[:, None, None], moved, state)
        return state
