"""Sums over the 32 lanes of a warp on the tensor cores, for Triton kernels whose lanes each hold 16 numbers.

The sums of 16 numbers over 32 lanes take 80 shuffles, or 31 shuffles and as many selections. Five matrix products (`mma`)
do the same: a lane's registers are taken for what the hardware expects there, columns of the second factor, and the first
factor has ones where a number is to be counted.

    1. Register r of lane l is entry (2 (l % 4), l // 4) of a matrix (16, 8), and three more are the entries below and eight
       rows further. Two products sum 8 numbers each over four lanes: number m in row m of the result, column l // 4.
    2. A lane adds its two neighbouring columns of the result, and one product sums these over the four lanes that have the
       rest of the row.

The first step rounds numbers to bf16, the second truncates sums to TF32. Sums are in fp32, and the result is rounded to
bf16. The layouts of factors and results are those of mma.m16n8k16 and mma.m16n8k8 in NVIDIA's description of PTX.

Tiles are (16, 32), and each lane must have one column. Triton gives that to a program of one warp, unless it knows that the
pointers to what it loads are aligned: kernels need `do_not_specialize_on_alignment` for these.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, NUMBERS = 32, 16
ONE = 0x3F80  # the bits of 1 in bf16; 1 in fp32 is the same with 16 zeros behind


@functools.cache
def matrices(device: torch.device) -> Tensor:
    """Return the first factors, (16, 32) as bits, for each lane: two of step 1 (rows 0 to 7) and that of step 2 (8 to 11).

    They are loaded from memory so that the compiler keeps them in neighbouring registers: what it can compute, such as
    zeros, it would compute again for every product."""
    found = torch.zeros(NUMBERS, LANES, dtype=torch.int64)
    group = torch.arange(LANES) // 4  # the row that a lane has of a first factor
    for product in range(2):
        for half in range(2):
            # columns 0 to 7, then 8 to 15; a register has two of them, for the numbers `first` and `first + 1`
            first = 4 * product + 2 * half
            found[4 * product + 2 * half] = torch.where(
                group == first, ONE, torch.where(group == first + 1, ONE << 16, 0)
            )
    found[8], found[10] = (torch.where(group == row, ONE << 16, 0) for row in range(2))  # columns 0 to 3, then 4 to 7
    return found.to(torch.int32).to(device)


def first_step() -> str:
    """Return the PTX of the first step: inputs $16 to $31 are the numbers, $32 to $47 the matrices; outputs $0 to $3."""
    lines = [f"cvt.rn.bf16x2.f32 v{k}, ${17 + 2 * k}, ${16 + 2 * k};" for k in range(8)]
    for product, factor in enumerate(("{$32, $33, $34, $35}", "{$36, $37, $38, $39}")):
        for half, result in enumerate(("{$0, $1, p2, p3}", "{$2, $3, q2, q3}")):
            before = result if product else "{zero, zero, zero, zero}"
            v = 4 * half + 2 * product
            kind = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            lines.append(f"{kind} {result}, {factor}, {{v{v}, v{v + 1}}}, {before};")
    unused = [f"mov.f32 ${k}, zero;" for k in range(4, NUMBERS)]
    registers = ".reg .f32 p2, p3, q2, q3, zero; .reg .b32 v<8>; mov.f32 zero, 0f00000000;"
    return "\n".join(["{", registers, *lines, *unused, "}"])


def second_step() -> str:
    """Return the PTX of the second step: inputs $16 to $19 are results of the first, $32 to $47 the matrices; output $0."""
    kind = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    lines = [
        ".reg .f32 p<4>, low, high, zero; .reg .b32 l, h, both; mov.f32 zero, 0f00000000;",
        "add.f32 low, $16, $17; add.f32 high, $18, $19; mov.b32 l, low; mov.b32 h, high;",
        f"{kind} {{p0, p1, p2, p3}}, {{$40, $41, $42, $43}}, {{l, h}}, {{zero, zero, zero, zero}};",
        "cvt.rn.bf16x2.f32 both, p1, p0; mov.b32 $0, both;",
    ]
    return "\n".join(["{", *lines, *(f"mov.f32 ${k}, zero;" for k in range(1, NUMBERS)), "}"])


FIRST: tl.constexpr = tl.constexpr(first_step())
SECOND: tl.constexpr = tl.constexpr(second_step())
REGISTERS: tl.constexpr = tl.constexpr(",".join(["=&f"] * NUMBERS + ["f"] * NUMBERS + ["r"] * NUMBERS))


@triton.jit
def sum_quads(tile, matrices):
    """Sum a tile (16, 32) over four lanes at a time; rows 0 to 3 of the result (16, 32) are for `sum_lanes`."""
    return tl.inline_asm_elementwise(FIRST, REGISTERS, [tile, matrices], dtype=tl.float32, is_pure=True, pack=16)


@triton.jit
def sum_lanes(quads, matrices):
    """Return the sums over all lanes, (32,): lanes 0 to 7 have two of them each, in bf16, as the bits of one number.

    The others have zeros."""
    found = tl.inline_asm_elementwise(SECOND, REGISTERS, [quads, matrices], dtype=tl.float32, is_pure=True, pack=16)
    first = (tl.arange(0, 16) == 0)[:, None]
    return tl.xor_sum(tl.where(first, found.to(tl.int32, bitcast=True), 0), 0)
