"""The bundled model: found by its name, and what `regard translate` uses when no model is given."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokens import EOS, SETTINGS

import regard
from regard import model_folder, pretrained
from regard.cli import main
from regard.cli.doctor_commands import examine
from regard.config import DecodeConfig, TokenizerConfig
from regard.errors import RegardError
from regard.files import find_damage
from regard.inference.translator import Translator, bundled_translator
from regard.layers.quantization import is_quantized
from regard.models.architectures import make_model, preset
from regard.text.language_identification import learn_profile
from regard.text.tokenizer import Tokenizer, Tokenizers

SIZES = {
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 32,
    "max_len": 64,
    **SETTINGS,
}
DIRECTIONS = ("en>de", "de>en", "en>fr")
TEXTS = {"en": "the man went to the house", "de": "der Mann und die Frau gehen nicht in das Haus"}
Call = Callable[..., tuple[int, str, str]]


def save_tiny(path: Path, directions: tuple[str, ...] = DIRECTIONS, endless: bool = False) -> None:
    """A model that learned nothing yet, with all that belongs to it; an endless one prefers any other token to EOS."""
    tags = tuple(dict.fromkeys(d.split(">")[1] for d in directions))
    tokenizer = Tokenizer.train(TEXTS.values(), TokenizerConfig(kind="char", vocab_size=60, language_tokens=tags))
    torch.manual_seed(1)
    model = make_model(preset("transformer-tiny", source_vocab=len(tokenizer), target_vocab=len(tokenizer), **SIZES))
    if endless:  # logits are products with the embeddings, and of many random ones some are positive
        torch.nn.init.zeros_(model.target_embedding.weight.data[EOS])  # type: ignore[union-attr,index]
    profiles = {lang: learn_profile([text]) for lang, text in TEXTS.items()}
    both, decode = Tokenizers(tokenizer, tokenizer), DecodeConfig(beam=2, max_len_a=0.0, max_len_b=6)
    own = model_folder.ModelPackage(
        model, both, "translation", decode, "en", "de", directions, languages=profiles if directions else {}
    )
    model_folder.save(path, own, "# A card\n", small=True)


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    save_tiny(tmp_path / "bundled" / "en-de-fr-zh")
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "bundled")
    bundled_translator.cache_clear()
    yield tmp_path / "bundled" / "en-de-fr-zh"
    bundled_translator.cache_clear()


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`regard WORDS` in this process: exit code, stdout, stderr."""

    def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["regard", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as stop:
            main.main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


def test_a_model_is_found_by_its_name(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = regard.load("en-de-fr-zh", "cpu")
    assert isinstance(translator, Translator)
    assert translator.directions == DIRECTIONS
    assert pretrained.bundled_models() == ["en-de-fr-zh"]
    assert examine()["models"] == "en-de-fr-zh"
    with pytest.raises(RegardError, match=r"no model at few: .*\(en-de-fr-zh\)"):
        regard.load("few", "cpu")
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "en-de-fr-zh", directions=())  # a folder of that name goes first
    assert regard.load("en-de-fr-zh", "cpu").directions == ()


def test_without_any_the_list_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    assert pretrained.bundled_models() == []
    assert examine()["models"] == "none bundled"


def test_translating_without_a_model_uses_it(bundled: Path, call: Call) -> None:
    expected = regard.load("en-de-fr-zh", "cpu", "int8").translate("the man went", to="de").text
    assert call("translate", "the man went", "--device", "cpu")[:2] == (0, expected + "\n")
    assert (
        call("translate", "the man went", "--device", "cpu", "-m", "en-de-fr-zh", "--weights", "int8")[1]
        == expected + "\n"
    )
    assert call("translate", "--device", "cpu", stdin=b"the man went\n")[1] == expected + "\n"


def test_its_weights_stay_quantized_on_a_cpu(bundled: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(Translator, "load", lambda *a: loaded.append(regard.load(*a)) or loaded[-1])
    call("translate", "the man went", "--device", "cpu")
    call("translate", "the man went", "--device", "cpu", "--weights", "fp32")
    assert [is_quantized(translator.model) for translator in loaded] == [True, False]
    asked: list[Any] = []
    monkeypatch.setattr(Translator, "load", lambda *a: asked.append(a))
    monkeypatch.setattr("regard.inference.translator.pick_device", lambda name: torch.device("cuda"))
    bundled_translator.cache_clear()
    bundled_translator()
    assert asked == [(bundled, "auto", "auto")]


def test_a_folder_of_its_name_is_not_taken_unasked(
    bundled: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = call("translate", "--device", "cpu", "--to", "fr", "the man went")
    save_tiny(tmp_path / "en-de-fr-zh", directions=())
    assert call("translate", "--device", "cpu", "--to", "fr", "the man went") == expected
    assert expected[0] == 0


def test_languages_can_be_said(bundled: Path, call: Call) -> None:
    words = ["translate", "--device", "cpu", "--weights", "fp32", "--json"]
    translator = regard.load("en-de-fr-zh", "cpu")
    for to, source, pair in (
        ("fr", None, ("en", "fr")),
        (None, None, ("en", "de")),
        ("en", "de", ("de", "en")),
        (None, "de", ("de", "en")),
    ):
        given = [*(["--to", to] if to else []), *(["--from", source] if source else [])]
        code, out, _ = call(*words, *given, "the man went")
        expected = translator.translate("the man went", to=pair[1], source=pair[0]).text
        assert code == 0
        found = json.loads(out)
        assert (found["line"], found["source"], found["text"]) == (1, "the man went", expected)
        assert (found["from"], found["to"]) == pair
        assert 0 <= found["confidence"] <= 1
        assert all(len(link) == 5 for link in found["alignment"])


def test_a_text_keeps_its_lines_and_a_file_its_numbers(bundled: Path, call: Call, tmp_path: Path) -> None:
    _, out, _ = call("translate", "--device", "cpu", "the man\n\n12\n")
    assert len(out.split("\n")) == 5
    assert out.split("\n")[1:3] == ["", "12"]
    (tmp_path / "in.txt").write_text("the man\n\n12\nhttps://a.org/b\n")
    assert call("translate", "--device", "cpu", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.txt"))[0] == 0
    assert (tmp_path / "out.txt").read_text().split("\n")[1:] == ["", "12", "https://a.org/b", ""]


def test_nbest_has_the_number_of_its_text(bundled: Path, call: Call) -> None:
    words = ["translate", "--device", "cpu", "--nbest", "2"]
    texts = ["the man went https://a.org/b", "", "der Mann und die Frau. Sie gehen nicht in das Haus"]
    code, out, _ = call(*words, *texts)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert list(dict.fromkeys(row[0] for row in rows)) == ["0", "1", "2"]
    assert all("https://a.org/b" in row[2] for row in rows if row[0] == "0")
    assert [row[2] for row in rows if row[0] == "1"] == [""]
    code, out, _ = call(*words, "--json", *texts)
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "zh", "the man went"], "does not translate to zh: it knows en>de, de>en, en>fr"),
        (["--to", "xx", "123"], "does not translate to xx: it knows en>de, de>en, en>fr"),
        (["--from", "fr", "le garçon"], "does not translate from fr: it knows"),
        (["--from", "de", "--to", "de", "der Mann"], "does not translate from de to de: it knows"),
    ],
)
def test_what_it_cannot_do_is_one_line_that_says_what_it_can(
    bundled: Path, call: Call, words: list[str], said: str
) -> None:
    code, out, err = call("translate", "--device", "cpu", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_pair_without_a_direction_goes_by_way_of_english_and_says_so_once(bundled: Path, call: Call) -> None:
    words = ["translate", "--device", "cpu", "--from", "german", "--to", "French"]
    code, out, err = call(*words, stdin=b"der Mann\ndie Frau\n")
    assert (code, out.count("\n")) == (0, 2)
    assert err.count("regard: de>fr is translated by way of English\n") == err.count("by way of") == 1


def test_what_it_cannot_read_passes_with_a_warning(bundled: Path, call: Call, tmp_path: Path) -> None:
    text = "Привет 漢字 ではない"
    warned = "left as it is: in Japanese, which this model does not know (--from LANG translates it anyway)"
    assert call("translate", "--device", "cpu", text) == (0, f"{text}\n", f"regard: {warned}: {text!r}\n")
    (tmp_path / "in.txt").write_text(f"the man\n{text}\n12\n{text}\n")
    code, out, err = call("translate", "--device", "cpu", "-i", str(tmp_path / "in.txt"))
    assert (code, out.split("\n")[1:]) == (0, [text, "12", text, ""])
    for line in (2, 4):
        assert f"regard: line {line}: {warned}: {text!r}\n" in err


def test_ten_lines_are_warned_of_and_the_others_counted(bundled: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Привет\n" * 30)
    _, _, err = call("translate", "--device", "cpu", "-i", str(tmp_path / "in.txt"))
    assert err.startswith("regard: line 1: left")
    assert err.count("\n") == 11
    assert "regard: 20 more: left" in err


def test_a_translation_that_was_cut_is_warned_of(bundled: Path, call: Call) -> None:
    save_tiny(bundled, endless=True)
    code, _, err = call("translate", "--device", "cpu", "--decode.max_len_b", "1", "the man went")
    assert code == 0
    assert err == "regard: cut off at the length limit (--decode.max_len_b N raises it): 'the man went'\n"


def test_code_between_lines_of_a_file_stays(bundled: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "in.md").write_text("the man\n```\nthe man\n```\n")
    _, out, _ = call("translate", "--device", "cpu", "-i", str(tmp_path / "in.md"))
    assert out.split("\n")[1:] == ["```", "the man", "```", ""]


def test_a_model_of_one_pair_is_told_its_own_languages_alone(tmp_path: Path, call: Call) -> None:
    save_tiny(tmp_path / "pair", directions=())
    words = ["translate", "--device", "cpu", "-m", str(tmp_path / "pair"), "the man"]
    assert call(*words, "--from", "en", "--to", "de") == call(*words)
    assert "from en to de, not from fr" in call(*words, "--from", "fr")[2]
    assert "from en to de, not to fr" in call(*words, "--to", "fr")[2]


def test_bundled_models_are_in_the_package() -> None:
    import tomllib

    packed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packed["package-data"]["regard.pretrained"]
    for name in pretrained.bundled_models():  # those that are really there
        assert find_damage(pretrained.FOLDER / name) is None
        kept = {file for pattern in patterns for file in pretrained.FOLDER.glob(pattern)}
        assert set((pretrained.FOLDER / name).iterdir()) <= kept
        assert sum(file.stat().st_size for file in (pretrained.FOLDER / name).iterdir()) <= 50e6
