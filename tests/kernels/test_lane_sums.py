"""Sums over lanes by matrix products: their PTX, executed in NumPy by its description, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from regard.kernels import lane_sums_triton
from regard.kernels.lane_sums_triton import sum_lanes, sum_quads

CUDA = torch.cuda.is_available()
LANES, NUMBERS = 32, 16
GROUP, MEMBER = np.arange(LANES) // 4, np.arange(LANES) % 4  # groupID and threadID_in_group of the PTX manual
Registers = dict[str, np.ndarray]  # name -> the bits that each lane has there


def to_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32)


def from_bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return from_bits((x & 0xFFFF) << 16)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = to_bits(x).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32)  # to the nearest, ties to even


def halves(register: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    yield 0, from_bf16(register)
    yield 1, from_bf16(register >> np.uint32(16))


def product(kind: str, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """Return D = A B + C of one mma instruction, by the fragments of the PTX manual (matrix fragments for mma.m16n8k16 with
    bf16 and mma.m16n8k8 with tf32)."""
    k = 16 if "m16n8k16" in kind else 8
    first, second, third = np.zeros((16, k)), np.zeros((k, 8)), np.zeros((16, 8))
    for i, register in enumerate(a):
        row, column = GROUP + 8 * (i % 2), MEMBER + 4 * (i // 2)
        if k == 8:
            first[row, column] = from_bits(register)
            continue
        for half, value in halves(register):
            first[row, 2 * MEMBER + half + 8 * (i // 2)] = value
    for i, register in enumerate(b):
        if k == 8:
            second[MEMBER + 4 * i, GROUP] = from_bits(register)
            continue
        for half, value in halves(register):
            second[2 * MEMBER + half + 8 * i, GROUP] = value
    for i, register in enumerate(c):
        third[GROUP + 8 * (i // 2), 2 * MEMBER + i % 2] = from_bits(register)
    found = first @ second + third
    return [to_bits(found[GROUP + 8 * (i // 2), 2 * MEMBER + i % 2]) for i in range(4)]


def execute(ptx: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the output registers $0 to $15 of a warp; inputs are $16 and following."""
    registers: Registers = {f"${NUMBERS + k}": bits for k, bits in enumerate(inputs)}
    for line in re.split(r";\s*|\n", ptx.strip().strip("{}")):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name.startswith("mma"):
            groups = [[each.strip() for each in found.split(",")] for found in re.findall(r"\{([^}]*)\}", rest)]
            a, b, c = ([registers[each] for each in group] for group in groups[1:])
            registers.update(zip(groups[0], product(name, a, b, c), strict=True))
            continue
        to, *given = (each.strip() for each in rest.split(","))
        values = [
            np.full(LANES, int(each[2:], 16), np.uint32) if each.startswith("0f") else registers[each] for each in given
        ]
        if name.startswith("mov"):
            registers[to] = values[0]
        elif name == "add.f32":
            registers[to] = to_bits(from_bits(values[0]) + from_bits(values[1]))
        else:
            assert name == "cvt.rn.bf16x2.f32", name
            registers[to] = to_bf16(from_bits(values[0])) << np.uint32(16) | to_bf16(from_bits(values[1]))
    return [registers[f"${k}"] for k in range(NUMBERS)]


def whole_numbers(seed: int) -> np.ndarray:
    """Return numbers (16, 32) whose sums are exact in bf16."""
    return np.random.default_rng(seed).integers(-3, 4, (NUMBERS, LANES)).astype(np.float32)


def check(sums: np.ndarray, tile: np.ndarray) -> None:
    """`sums` (32,) are words of two bf16 numbers: lanes 0 to 7 have the sums of the tile, in their order."""
    found = np.stack([value for _, value in halves(sums.view(np.uint32))], 1)  # (32, 2)
    assert np.array_equal(found[:8].flatten(), tile.sum(1))
    assert not found[8:].any()


def test_the_instructions_sum_over_lanes() -> None:
    tile = whole_numbers(0)
    matrices = list(lane_sums_triton.matrices(torch.device("cpu")).numpy().view(np.uint32))
    quads = execute(lane_sums_triton.first_step(), [*map(to_bits, tile), *matrices])
    check(execute(lane_sums_triton.second_step(), [*quads, *matrices])[0], tile)


@triton.jit(do_not_specialize_on_alignment=["at", "matrices"])
def kernel(at, matrices, out):
    place = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    factors = tl.load(matrices + place)
    tl.store(out + tl.arange(0, 32), sum_lanes(sum_quads(tl.load(at + place), factors), factors))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_sums_over_lanes(seed: int) -> None:
    tile, device = whole_numbers(seed), torch.device("cuda")
    out = torch.empty(LANES, dtype=torch.int32, device=device)
    given = torch.from_numpy(tile).to(device)
    kernel[(1,)](given, lane_sums_triton.matrices(device), out, num_warps=1)
    check(out.cpu().numpy(), tile)
