"""Rooms outside of layers/ name no part's class: they know parts by the registry and by what parts declare."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import regard
import regard.layers
from regard.config.registry import PARTS

ROOT = Path(regard.__file__).parent
CLASSES = {
    (part.__module__, part.__name__)
    for kind in PARTS.values()
    for part in kind.values()
    if part.__module__.startswith(regard.layers.__name__)
}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_no_room_but_layers_imports_the_class_of_a_part() -> None:
    rooms = [path for path in ROOT.rglob("*.py") if path.parent != ROOT / "layers"]
    found = {path: names for path in rooms if (names := CLASSES.intersection(imported(path)))}
    assert len(CLASSES) > 20
    assert len(rooms) > 100
    assert found == {}
