"""Small tasks for recurrent cells: sequences of ids whose next id is to be predicted at some places.

A task is a table of sequences (N, T + 1) and a mask (N, T) of the places that are scored. All tasks have the same length and
vocabulary, so that one batched training can learn several of them.

| task       | a sequence                                    | scored                                             |
|------------|-----------------------------------------------|----------------------------------------------------|
| repeat     | four symbols, a mark, the same symbols        | the symbols after the mark                         |
| memory     | eight symbols, a mark, the same symbols       | the symbols after the mark                         |
| arithmetic | sums such as 72+58=211, lowest digits first   | the digits of the result                           |
| brackets   | nested tags such as <ab><c></c></ab>          | what closes a tag: its name and its end            |
| text       | characters of a text                          | all characters after the first few                 |
| reverse    | eight symbols, a mark, the symbols reversed   | the symbols after the mark                         |
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from regard.data import toy
from regard.data.parallel_corpus import read_lines
from regard.errors import RegardError

VOCABULARY = 48
LENGTH = 16  # T
PAD = 0
LETTERS = "0123456789+=;abcdef<>/|"  # id 1 and on
FIRST_SCORED = 4  # of a text


@dataclass(frozen=True)
class Examples:
    """Sequences of one task."""

    ids: np.ndarray  # (N, T + 1)
    scored: np.ndarray  # (N, T), True where the next id is scored


@lru_cache(maxsize=32)
def make_examples(task: str, count: int, seed: int, data: Path | None = None) -> Examples:
    """Return `count` sequences of a task, always the same ones for a seed."""
    if task == "text":
        return cut_windows(count, seed, data)
    rng = random.Random(f"{task} {seed}")
    rows = [TASKS[task](rng) for _ in range(count)]
    ids, scored = np.full((count, LENGTH + 1), PAD), np.zeros((count, LENGTH), dtype=bool)
    for i, (text, marks) in enumerate(rows):
        codes = [LETTERS.index(letter) + 1 for letter in text][: LENGTH + 1]
        ids[i, : len(codes)] = codes
        scored[i, : len(codes) - 1] = marks[1 : len(codes)]
    return Examples(ids, scored)


Row = tuple[str, list[bool]]  # the letters, and which of them are scored


def copy(rng: random.Random, length: int, step: int = 1) -> Row:
    """Return symbols, a mark, and the symbols again, forwards or (step -1) backwards."""
    symbols = "".join(rng.choices("01234567", k=length))
    return f"{symbols}|{symbols[::step]}", [False] * (length + 1) + [True] * length


def add(rng: random.Random) -> Row:
    """Return sums of two numbers; all digits are written from the lowest, so that carries move with the reader."""
    text, marks = "", []
    while len(text) <= LENGTH:
        a, b = rng.randrange(100), rng.randrange(100)
        question, answer = f"{a:02}"[::-1] + "+" + f"{b:02}"[::-1] + "=", f"{a + b:03}"[::-1]
        text += question + answer + ";"
        marks += [False] * len(question) + [True] * len(answer) + [False]
    return text, marks


def nest(rng: random.Random) -> Row:
    """Return nested tags with names of one or two letters; a name that is closed can be known from the one opened."""
    text, marks, opened = "", [], list[str]()
    while len(text) <= LENGTH:
        if not opened or (len(opened) < 4 and rng.random() < 0.5):
            opened.append("".join(rng.choices("abcdef", k=rng.choice((1, 2)))))
            piece = f"<{opened[-1]}>"
            known = 0
        else:
            piece = f"</{opened.pop()}>"
            known = len(piece) - 2
        text += piece
        marks += [False] * (len(piece) - known) + [True] * known
    return text, marks


TASKS: dict[str, Callable[[random.Random], Row]] = {
    "repeat": partial(copy, length=4),
    "memory": partial(copy, length=8),
    "arithmetic": add,
    "brackets": nest,
    "reverse": partial(copy, length=8, step=-1),
}


def cut_windows(count: int, seed: int, data: Path | None) -> Examples:
    """Return windows of a text; even seeds take them from its first nine tenths, odd seeds from the rest."""
    codes = encode(check_text(data))
    cut = len(codes) * 9 // 10
    part = codes[cut:] if seed % 2 else codes[:cut]
    starts = np.random.default_rng(seed).integers(0, len(part) - LENGTH, count)
    ids = part[starts[:, None] + np.arange(LENGTH + 1)]
    scored = np.tile(np.arange(LENGTH) >= FIRST_SCORED, (count, 1))
    return Examples(ids, scored)


def check_text(data: Path | None) -> str:
    """Return the text of `read_text`; raise a RegardError if it is too short to be cut into windows."""
    text = read_text(data)
    if len(text) < 100 * LENGTH:
        raise RegardError(f"the text has {len(text):,} characters: give one of at least {100 * LENGTH:,}")
    return text


@lru_cache(maxsize=2)
def read_text(data: Path | None) -> str:
    """Return the beginning of a text file, or English sentences of the embedded corpus, in lower case."""
    lines = read_lines(data) if data else (english for english, _ in toy.pairs(4000))
    return "\n".join(lines)[:400_000].lower()


def encode(text: str) -> np.ndarray:
    """Return a text as ids: the most frequent characters from 2 on, all others 1."""
    known = [letter for letter, _ in Counter(text).most_common(VOCABULARY - 2)]
    ids = {letter: i + 2 for i, letter in enumerate(known)}
    return np.array([ids.get(letter, 1) for letter in text])
