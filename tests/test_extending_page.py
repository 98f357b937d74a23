"""The examples of docs/extending.md: the module of parts is imported, its recipes are trained, and its check passes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.config.registry import MADE_OF, PARTS, unregister
from regard.models.architectures import ARCHITECTURES, PRESETS

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
NEW = {"positions": ["slope"], "mixer": ["decay"], "feedforward": ["sparse"], "cell": ["mgu", "leaky"]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    python = blocks("python")
    module = "\n\n".join(block for block in python if "@register(" in block or "from regard.layers.cells" in block)
    (tmp_path / "my_parts.py").write_text(module)
    (tmp_path / "tiny.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 60)
    for recipe in blocks("toml"):
        (tmp_path / recipe.split()[1]).write_text(recipe)
    try:
        __import__("my_parts")
        assert all(name in PARTS[kind] for kind, names in NEW.items() for name in names)
        regard.train("gpt.toml", quiet=True, model={"decay": {"rate": 0.5}})
        regard.train("rnn.toml", quiet=True)
        regard.train("gpt.toml", "runs/slope", quiet=True, model={"positions": "slope", "slope": {"rate": 0.2}})
        check = next(block for block in python if "model.begin(prompts)" in block)
        exec(compile(check, str(PAGE), "exec"), {"torch": torch})
        assert regard.load("runs/rnn", device="cpu").generate("the", max_new_tokens=4).tokens
    finally:
        sys.modules.pop("my_parts", None)
        for kind, names in NEW.items():
            for name in names:
                if name in PARTS[kind]:
                    unregister(kind, name)


def test_the_architecture_of_the_page_is_complete_enough_to_be_registered() -> None:
    (example,) = [block for block in blocks("python") if "register_architecture" in block]
    tables: list[dict[str, Any]] = [ARCHITECTURES, PRESETS, MADE_OF]  # type: ignore[list-item]
    before = [dict(table) for table in tables]
    try:
        exec(compile(example, str(PAGE), "exec"), {"ModelConfig": regard.config.ModelConfig})
        assert set(ARCHITECTURES) - set(before[0]) == {"mine"}
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)
