"""Numbers as people read them: columns side by side, bytes and FLOPs in a unit that suits them."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[tuple[str, ...]], right: int) -> list[str]:
    """Columns side by side, those from `right` on flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i >= right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def size(n: int) -> str:
    """Bytes in the unit that suits them."""
    power = min(max(0, (len(str(n)) - 1) // 3), 4)
    return f"{n / 1000**power:,.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def short(n: int) -> str:
    """Four digits and a unit: 79.05 G."""
    power = min(max(0, (len(str(n)) - 1) // 3), 5)
    return f"{n / 1000**power:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}".strip()
