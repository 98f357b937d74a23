"""The types that a type checker sees: mypy on code as a user writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import regard

one: regard.Translation = regard.translate("Good evening.", to="fr", beam=4)
several: list[regard.Translation] = regard.translate(["Good evening."])
translator: regard.Translator = regard.load("en-de-fr-zh")
own: regard.Translator = regard.Translator.load("runs/mine", device="cpu")
best: regard.Translation = own.translate("a", nbest=2, length_penalty=1)
text: str = regard.Generator.load("runs/gpt").generate("Once", temperature=0.8, stop=["."]).text
label: str = regard.Classifier.load("runs/s").classify("A film.").label
labels: list[regard.Prediction] = regard.Classifier.load("runs/s").classify([("a", "b")])
loaded = regard.load("runs/mine")
reveal_type(loaded)
regard.translate("a", beem=4)  # wrong
own.translate("a", beam="wide")  # wrong
regard.Generator.load("runs/gpt").generate(5)  # wrong
regard.train("toy-en-de", trian={"steps": 3})  # wrong
"""


def test_mypy_knows_the_types_and_finds_mistakes(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(CODE)
    words = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache")]
    words += ["--follow-imports", "silent", str(tmp_path / "user.py")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    wrong = [i for i, line in enumerate(CODE.splitlines(), 1) if line.endswith("# wrong")]
    found = re.findall(r"user\.py:(\d+): error", done.stdout)
    assert sorted(set(map(int, found))) == wrong, done.stdout
    union = re.search(r'Revealed type is "(.*)"', done.stdout)
    assert union is not None
    assert all(name in union[1] for name in ("Translator", "Generator", "Classifier", "Embedder", "WordVectors"))
