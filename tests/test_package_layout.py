"""The layout of the package: few modules at the top, unique names, and documentation that names files that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "regard"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def test_the_top_level_holds_the_rooms_and_at_most_eight_modules() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert len(modules) <= 8, modules
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rooms = {room for line in contract["layers"] for room in re.split(r"[ |:]+", line)}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == packages | modules - {"__main__"}
    assert contract["exhaustive"]
    assert "ignore_imports" not in contract


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert [name for name, n in names.items() if n > 1] == []
    packages = {path.parent.name for path in PACKAGE.rglob("__init__.py")}
    assert names.keys() & packages == set()


def test_no_two_public_classes_share_a_name() -> None:
    """A search for a class finds one; the classes inside others, such as the Settings of a part, do not count."""
    where: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", page.read_text(encoding="utf-8")))
    every = {path.name for folder in (PACKAGE, ROOT / "benchmarks", ROOT / "recipes") for path in folder.rglob("*.py")}
    theirs = {"my_parts.py", "found_cell.py"}  # what a reader or a study writes
    named -= theirs
    missing = [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists() or name in every)]
    assert sorted(missing) == []


def test_the_glossary_has_fifty_words_and_their_files() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(rows) >= 50
    words = [word for word, _, _ in rows]
    assert words == sorted(words, key=str.lower)
    for word, _, file in rows:
        assert (PACKAGE / file).exists(), word
