"""How deep the code is: the frames of Regard between a command and a matrix product, as docs/architecture.md prints them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import regard
from regard.cli import main

ROOT = Path(regard.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"
RECIPE = "toy-en-de"
PRODUCTS = {"linear", "addmm", "mm", "bmm", "matmul"}

Stack = list[tuple[str, str]]  # (file, function) of each frame, outermost first


def frames_of(frame: FrameType | None) -> Stack:
    found: Stack = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            found.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


def stacks_at_products(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Stack]:
    """Run a command and return the frames of Regard at each call of a matrix product, in order."""
    found: list[Stack] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and getattr(arg, "__name__", "") in PRODUCTS:
            found.append(frames_of(frame))

    monkeypatch.setattr(sys, "argv", ["regard", *words])
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with contextlib.suppress(SystemExit):
            main.main()
    finally:
        sys.setprofile(before)
    return found


def printed(stack: Stack) -> str:
    width = max(len(file) for file, _ in stack)
    return "\n".join(f"{i:2}  {file:<{width}}  {function}" for i, (file, function) in enumerate(stack, 1))


def on_page(name: str) -> str:
    text = PAGE.read_text(encoding="utf-8").split(f"<!-- call stack: {name} -->\n```\n")[1]
    return text.split("\n```")[0]


def test_from_train_to_a_matrix_product_are_at_most_twelve_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    settings = ["--train.steps", "1", "--train.device", "cpu", "--data.train", "toy:50", "--data.valid", "toy:5"]
    settings += ["--train.samples", "0", "--tokenizer.vocab_size", "200"]
    stacks = stacks_at_products(["train", RECIPE, "--quiet", *settings], monkeypatch)
    forward = [stack for stack in stacks if ("training/objective.py", "Objective.forward") in stack]
    forward = [stack for stack in forward if any(file.startswith("training/training_step") for file, _ in stack)]
    assert printed(forward[0]) == on_page("train")
    assert max(len(stack) for stack in forward if any(file == "layers/stack.py" for file, _ in stack)) <= 12


def test_the_frames_of_a_translated_sentence_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = stacks_at_products(
        ["translate", "I ate an apple.", "--to", "de", "--device", "cpu", "--weights", "fp32"], monkeypatch
    )
    steps = [stack for stack in stacks if ("layers/stack.py", "Stack.step") in stack]
    assert printed(steps[0]) == on_page("translate")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for stack in stacks_at_products(sys.argv[1:], patch):
            print(printed(stack), end="\n\n")
