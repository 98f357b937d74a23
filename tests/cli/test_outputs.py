"""What commands write: an input is never replaced, names do not collide, and --output is written with --json too."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import call
from PIL import Image

import regard
from regard.errors import RegardError

RECIPE = """
[data]
train = "pairs.tsv"
[tokenizer]
kind = "word"
[model]
preset = "transformer-tiny"
n_encoder_layers = 1
n_decoder_layers = 1
d_model = 16
n_heads = 2
d_ff = 16
[train]
steps = 2
warmup = 1
samples = 0
device = "cpu"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "pairs.tsv").write_text("".join(f"a b {i % 7} c\tx y {i % 5} z\n" for i in range(40)))
    return regard.train(folder / "tiny.toml", folder / "tiny", data={"root": str(folder)}, quiet=True)


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "RUN", "--data", "mine.tsv", "--root", ".", "-o", "mine.tsv"],
        ["look", "statistics", "RUN", "--file", "mine.tsv", "--csv", "mine.tsv"],
        ["look", "heads", "RUN", "--source", "mine.tsv", "--target", "mine.tsv", "-o", "mine.png"],
        ["translate", "-m", "RUN", "-i", "mine.tsv", "-o", "mine.tsv"],
        ["embed", "RUN", "-i", "mine.tsv", "-o", "mine.tsv"],
        ["filter", "gaussian", "mine.png", "-o", "clean.png", "--compare", "clean.png"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_input_is_not_replaced(words: list[str], run: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.tsv").write_text("a b 1 c\tx y 2 z\na b 2 c\tx y 3 z\n")
    for name in ("mine.png", "clean.png"):
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(name)
    if "heads" in words:  # its picture is a .png file, so the input is called so
        Path("mine.png").write_text("a b 1 c\na b 2 c\n")
        words = [word.replace("mine.tsv", "mine.png") for word in words]
    before = {path: path.read_bytes() for path in Path().iterdir()}
    code, _, err = call(capfd, monkeypatch, *(str(run) if word == "RUN" else word for word in words))
    assert (code, "is an input of this command and would be replaced" in err) == (2, True), err
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_results_of_pictures_with_one_name_are_different_files(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for k, folder in enumerate(("a", "b")):
        Path(folder).mkdir()
        Image.fromarray(np.full((8, 8), 100 * k, np.uint8)).save(f"{folder}/x.png")
    code, out, _ = call(capfd, monkeypatch, "filter", "gaussian", "a/x.png", "b/x.png", "--sigma", "1")
    assert (code, out.split()) == (0, ["x-gaussian.png", "x-gaussian-2.png"])
    assert [np.asarray(Image.open(name)).max() for name in out.split()] == [0, 100]


def test_a_folder_is_no_file_to_write(run: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("here").mkdir()
    code, _, err = call(capfd, monkeypatch, "translate", "-m", str(run), "a b", "-o", "here")
    assert (code, err) == (2, "regard: here is a folder: give the name of a file to write\n")


@pytest.mark.parametrize(
    "words",
    [
        ["look", "page", "RUN", "a b", "-o", "new/out.html"],
        ["look", "alignment", "RUN", "a b", "-o", "new/out.png"],
        ["look", "positions", "rope", "-o", "new/out.png"],
        ["embed", "RUN", "a b", "-o", "new/out.npy"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_output_is_written_with_json_too(
    words: list[str], run: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capfd, monkeypatch, *(str(run) if w == "RUN" else w for w in words), "--json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)
    assert [path.stem for path in Path("new").iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hi", "--beam"], "requires an argument"),
        (["hi", "--json=1"], "does not take a value"),
        (["hi", "--bem", "3"], "no option --bem: did you mean --beam?"),
    ],
)
def test_errors_of_options_say_what_is_wrong(
    words: list[str], expected: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capfd, monkeypatch, "translate", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err


def test_a_folder_of_the_same_name_hides_neither_a_recipe_nor_the_bundled_model(run: Path) -> None:
    Path("hello").mkdir()
    assert regard.train("hello", train={"steps": 1, "device": "cpu"}, quiet=True) == Path("runs/hello")
    Path("en-de-fr-zh").symlink_to(run)
    assert regard.translate("I ate an apple.", device="cpu").source == "en"


def test_shipped_recipes_have_their_names_everywhere(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs/" not in str(regard.summary("toy-en-de"))
    code, out, _ = call(capfd, monkeypatch, "settings", "hello")
    assert code == 0
    Path("mine.toml").write_text(out)
    assert regard.train("mine.toml", train={"steps": 1, "device": "cpu"}, quiet=True) == Path("runs/mine")


def test_arguments_of_a_wrong_type_are_type_errors(run: Path) -> None:
    translator = regard.Translator.load(run, "cpu")
    for wrong in (
        lambda: translator.translate("a", to=5),  # type: ignore[call-overload]
        lambda: translator.translate("a", source=3),  # type: ignore[call-overload]
        lambda: translator.translate_sentences("ab"),
        lambda: translator.translate_sentences([1]),  # type: ignore[list-item]
        lambda: regard.load(run, device=3),  # type: ignore[call-overload]
        lambda: regard.train("hello", train=5),  # type: ignore[arg-type]
        lambda: regard.Embedder.load(run, "cpu").embed("a", pooling=3),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"takes a|is a string"):
            wrong()


def test_as_many_hypotheses_as_are_asked_for(run: Path) -> None:
    translator = regard.Translator.load(run, "cpu")
    assert len(translator.translate("a b", nbest=7).nbest) == 7
    with pytest.raises(RegardError, match=r"nbest 7 is more than decode\.beam 2"):
        translator.translate("a b", nbest=7, beam=2)
