"""The command line as a user meets it: results on stdout, one-line errors on stderr, exit codes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import call

import regard
from regard.cli import main
from regard.errors import RegardError
from regard.inference.translator import bundled_translator

RECIPE = """
[data]
train = "toy:300"
valid = "toy:20"
test = "toy:20"
[tokenizer]
kind = "word"
vocab_size = 2000
[model]
preset = "transformer-tiny"
n_encoder_layers = 1
n_decoder_layers = 1
d_model = 32
n_heads = 2
d_ff = 32
max_len = 64
[train]
steps = 4
batch_tokens = 256
valid_every = 2
save_every = 2
log_every = 1
[decode]
beam = 2
max_len_a = 0.0
max_len_b = 6
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished (hardly trained) run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(RECIPE)
    return regard.train(folder / "tiny.toml", folder / "run", quiet=True)


def test_help_does_not_import_torch() -> None:
    code = "import sys, regard.cli.main; from typer.testing import CliRunner; "
    code += "r = CliRunner().invoke(regard.cli.main.app, ['--help']); "
    code += "assert r.exit_code == 0 and 'translate' in r.output; "
    code += "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_translate_sentences_files_and_stdin(run: Path, capfd, monkeypatch, tmp_path: Path) -> None:
    code, out, _ = call(capfd, monkeypatch, "translate", "-m", str(run), "I ate an apple.", "", "They sleep.")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert out.splitlines()[1] == ""
    text = "I ate an apple.\n\nThey sleep.\n"
    assert call(capfd, monkeypatch, "translate", "-m", str(run), stdin=text.encode())[1] == out
    (tmp_path / "in.txt").write_text(text)
    arguments = ["translate", "-m", str(run), "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.txt")]
    assert call(capfd, monkeypatch, *arguments)[:2] == (0, "")
    assert (tmp_path / "out.txt").read_text() == out


def test_translate_json_and_nbest(run: Path, capfd, monkeypatch) -> None:
    _, out, _ = call(capfd, monkeypatch, "translate", "-m", str(run), "--json", "--nbest", "2", "I ate an apple.")
    answer = json.loads(out)
    assert answer["source"] == "I ate an apple."
    assert len(answer["nbest"]) == 2
    assert answer["nbest"][0]["score"] >= answer["nbest"][1]["score"]
    _, out, _ = call(capfd, monkeypatch, "translate", "-m", str(run), "--nbest", "2", "I ate an apple.")
    numbers, scores, _ = zip(*(line.split("\t") for line in out.splitlines()), strict=True)
    assert numbers == ("0", "0")
    assert float(scores[0]) >= float(scores[1])


@pytest.mark.parametrize("weights", ["fp32", "int8", "bf16"])
def test_weights_may_be_rounded(run: Path, capfd, monkeypatch, weights: str) -> None:
    words = ["translate", "-m", str(run), "--json", "I ate an apple."]
    plain = json.loads(call(capfd, monkeypatch, *words)[1])
    found = json.loads(call(capfd, monkeypatch, *words, "--weights", weights)[1])
    assert (found["score"] == plain["score"]) == (weights == "fp32")
    assert found["score"] == pytest.approx(plain["score"], abs=0.5)


def test_sampling_is_seeded(run: Path, capfd, monkeypatch) -> None:
    words = ["translate", "-m", str(run), "--temperature", "2", "I ate an apple."]
    first, again, other = (call(capfd, monkeypatch, *words, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


def test_evaluate_prints_scores_with_signatures_and_keeps_hypotheses(run: Path, capfd, monkeypatch) -> None:
    code, out, _ = call(capfd, monkeypatch, "evaluate", str(run))
    assert code == 0
    assert "tok:13a" in out
    assert "chrF" in out
    assert "perplexity" in out
    assert len((run / "hypotheses" / "toy-20.de").read_text().splitlines()) == 20
    _, out, _ = call(capfd, monkeypatch, "evaluate", str(run), "--json", "--beam", "1")
    assert {"bleu", "chrf", "perplexity", "by_length", "hypotheses"} <= json.loads(out).keys()


def test_training_again_finds_it_finished_and_overrides_are_checked(run: Path, capfd, monkeypatch) -> None:
    recipe = str(run.parent / "tiny.toml")
    code, out, err = call(capfd, monkeypatch, "train", recipe, "--run", str(run))
    assert code == 0
    assert out.strip() == str(run)
    assert "resuming at step 4" in err
    code, _, err = call(capfd, monkeypatch, "train", recipe, "--run", str(run), "--train.lr", "0.5")
    assert code == 2
    assert "train.lr" in err
    assert "--overwrite" in err


def test_tokenizer_commands(tmp_path: Path, capfd, monkeypatch) -> None:
    (tmp_path / "text.txt").write_text("low lower lowest\nnew newer newest\n" * 5)
    path = str(tmp_path / "t.json")
    words = ["tokenizer", "train", str(tmp_path / "text.txt"), "-o", path, "--kind", "byte-bpe", "--vocab-size", "280"]
    assert call(capfd, monkeypatch, *words)[0] == 0
    _, ids, _ = call(capfd, monkeypatch, "tokenizer", "encode", path, "newest lower 🍎")
    assert call(capfd, monkeypatch, "tokenizer", "decode", path, *ids.split())[1] == "newest lower 🍎\n"
    assert call(capfd, monkeypatch, "tokenizer", "decode", path, stdin=ids.encode())[1] == "newest lower 🍎\n"
    _, shown, _ = call(capfd, monkeypatch, "tokenizer", "show", path, "newest lower")
    assert "▁lower" in shown
    _, out, _ = call(capfd, monkeypatch, "tokenizer", "show", path, "newest lower", "--json")
    assert json.loads(out)["decoded"] == "newest lower"


def test_doctor_and_settings(capfd, monkeypatch) -> None:
    assert "torch" in json.loads(call(capfd, monkeypatch, "doctor", "--json")[1])
    assert "train.steps" in call(capfd, monkeypatch, "settings")[1]
    assert call(capfd, monkeypatch, "--version")[1].strip() == regard.__version__


def test_doctor_explains_kernels(run: Path, capfd, monkeypatch) -> None:
    code, out, _ = call(capfd, monkeypatch, "doctor", "--explain", str(run), "--device", "cuda", "--length", "256")
    header, *lines = out.splitlines()
    assert code == 0
    assert header.split() == ["layer", "positions", "when", "kernel", "why"]
    assert [line.split()[0] for line in lines[::2]] == ["encoder.0.self", "decoder.0.self", "decoder.0.cross"]
    assert "training, 256 tokens" in lines[0]
    words = ["doctor", "--explain", str(run / "model"), "--json", "--model.positions=alibi", "--device", "cuda"]
    _, out, _ = call(capfd, monkeypatch, *words)
    first = json.loads(out)["layers"][0]
    assert (first["positions"], first["when"], first["fast"]) == ("alibi", "training, 64 tokens", True)
    _, out, _ = call(capfd, monkeypatch, "doctor", "--explain")
    assert "! decoder.0-5.self  cope" in out


def test_look_positions_writes_a_picture_or_numbers(capfd, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capfd, monkeypatch, "look", "positions", "alibi", "--length", "9")
    assert (code, out) == (0, "positions-alibi.png\n")
    assert (tmp_path / "positions-alibi.png").read_bytes().startswith(b"\x89PNG")
    words = ["look", "positions", "kerple-log", "--output", "here/k.png", "--length", "9"]
    assert call(capfd, monkeypatch, *words)[1] == "here/k.png\n"
    assert (tmp_path / "here" / "k.png").exists()
    words = ["look", "positions", "alibi", "--json", "--length", "3", "--model.n_heads", "2"]
    panel = json.loads(call(capfd, monkeypatch, *words)[1])["panels"][0]
    assert panel["at"] == [-2, -1, 0]
    assert panel["lines"] == {"head 0": [-0.125, -0.0625, 0], "head 1": [-0.0078125, -0.00390625, 0]}


def test_look_positions_shows_what_a_model_has(run: Path, capfd, monkeypatch) -> None:
    words = ["look", "positions", "sinusoidal", "--json", "--length", "2", "--model", str(run)]
    code, out, _ = call(capfd, monkeypatch, *words)
    (panel,) = json.loads(out)["panels"]
    assert code == 0
    assert [row[:2] for row in panel["values"]] == [[0, 1], [0.841471, 0.540302]]


def test_studies_are_listed_and_run(capfd, monkeypatch, tmp_path: Path) -> None:
    code, out, _ = call(capfd, monkeypatch, "study")
    assert code == 0
    trained = ["filters", "long-range", "positions", "pretraining", "roformer", "sentence-length", "translation-cost"]
    trained += ["cell-search", "lstm-odyssey"]
    assert {line.split()[2] for line in out.splitlines()} == {"dictionary", "gradient-flow", "three-ways", *trained}
    assert "order_110" in call(capfd, monkeypatch, "study", "dictionary")[1]
    assert isinstance(json.loads(call(capfd, monkeypatch, "study", "dictionary", "--json")[1]), dict)

    import regard.studies.position_study as position_study

    asked: dict[str, object] = {}
    monkeypatch.setattr(position_study, "study", lambda **options: asked.update(options) or options["out"])
    words = ["study", "positions", "--output", str(tmp_path / "s"), "--schemes", "rope,none", "--steps", "7", "--quick"]
    assert call(capfd, monkeypatch, *words)[:2] == (0, f"{tmp_path / 's'}\n")
    expected = {"out": tmp_path / "s", "data": None, "steps": 7, "schemes": ("rope", "none"), "jobs": 1}
    assert asked == {**expected, "device": "auto", "quick": True}


@pytest.mark.parametrize("name", ["sentence-length", "translation-cost"])
def test_a_study_of_translations_is_given_its_data_and_its_table_printed(capfd, monkeypatch, tmp_path, name) -> None:
    module, asked = importlib.import_module(f"regard.studies.{name.replace('-', '_')}"), []
    (tmp_path / "table.md").write_text("| a table |\n")
    monkeypatch.setattr(module, "study", lambda *options: asked.append(options) or options[0])
    words = ["study", name, "--data", "pairs", "--output", str(tmp_path), "--jobs", "2", "--device", "cpu", "--quick"]
    assert call(capfd, monkeypatch, *words)[:2] == (0, "| a table |\n\n")
    assert [call[:5] for call in asked] == [(tmp_path, Path("pairs"), 2, "cpu", True)]
    if name == "translation-cost":
        call(capfd, monkeypatch, *words, "--systems", "gnmt, mbr")
        assert [call[5:] for call in asked] == [(None,), (["gnmt", "mbr"],)]


BAD = [
    (["translate", "x"], "no model given"),
    (["translate", "-m", "nowhere", "x"], "no model at nowhere"),
    (["evaluate", "nowhere"], "no model at nowhere"),
    (["resume", "nowhere"], "no run at nowhere"),
    (["train", "nowhere.toml"], "no recipe at nowhere.toml"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--train.stepz", "3"], "did you mean 'train.steps'"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--train.steps"], "--train.steps needs a value"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--train.patience.x", "3"], "train.patience"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--train.steps", "inf"], "train.steps"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--tokenizer.joint=false"], "set tokenizer.joint true"),
    (["translate", "-m", "{run}", "--train.steps", "3", "x"], "--train.steps does not belong here"),
    (["translate", "-m", "{run}", "--decode.beem", "3", "x"], "decode.beem"),
    (["translate", "-m", "{run}", "--top-k", "3", "x"], "give a --temperature"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--model.d_model", "33"], "cannot be split into model.n_heads 2"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--data.train", "none.tsv"], "none.tsv"),
    (["train", "{recipe}", "--run", "{tmp}/r", "--train.device", "cuda:99"], "device"),
    (["translate", "-m", "{run}", "--beam", "0", "x"], "beam"),
    (["translate", "-m", "{run}", "--nbest", "9", "--beam", "2", "x"], "widen the beam"),
    (["translate", "-m", "{run}", "they sleep " * 40], "longer"),
    (["translate", "-m", "{run}", "-i", "none.txt"], "none.txt"),
    (["tokenizer", "encode", "none.json", "x"], "none.json"),
    (["doctor", "{run}"], "add --explain"),
    (["doctor", "--explain", "nowhere"], "no model at nowhere"),
    (["doctor", "--explain", "--train.steps", "3"], "--train.steps does not belong here"),
    (["doctor", "--explain", "--model.positions", "rotary"], "model.positions"),
    (["look", "positions", "none"], "nothing to draw"),
    (["look", "positions", "rope", "--length", "1"], "--length"),
    (["look", "positions", "rope", "--model.d_head", "33"], "even width"),
    (["look", "positions", "rope", "--model.d_hed", "32"], "model.d_head"),
    (["look", "positions", "rope", "--model", "{run}"], "it has sinusoidal"),
    (["look", "positions", "rope", "--model", "{run}", "--model.d_head", "8"], "leave out --model.d_head"),
    (["look", "positions", "alibi", "--output", "{recipe}/x.png"], "cannot write"),
    (["study", "dictionary", "--model.d_model", "8"], "--model.d_model does not belong here"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words)[:60] for words, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(run: Path, capfd, monkeypatch, tmp_path, words, message) -> None:
    places = {"recipe": run.parent / "tiny.toml", "run": run, "tmp": tmp_path}
    monkeypatch.setattr("regard.pretrained.FOLDER", tmp_path)  # as if no model were bundled
    bundled_translator.cache_clear()  # a test before this one may have loaded it
    code, out, err = call(capfd, monkeypatch, *(word.format(**places) for word in words))
    said = [line for line in err.splitlines() if line.startswith("regard: ")]
    assert (code, out, len(said)) == (2, "", 1)
    assert message in said[0] if message != "longer" else "split it into shorter sentences" in said[0]
    assert "Traceback" not in err


def test_invalid_utf8_on_stdin_names_the_line(run: Path, capfd, monkeypatch) -> None:
    code, _, err = call(capfd, monkeypatch, "translate", "-m", str(run), stdin=b"good\n\xff\n")
    assert code == 2
    assert "line 2 of stdin" in err


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\n", b"x\n", "2"),
        (b"", b"x\n", "empty"),
        (b"a\0b\n", b"x\n", "binary"),
        (b"a\n\xff\n", b"x\ny\n", "UTF-8"),
    ],
)
def test_bad_corpora_stop_before_anything_is_lost(run, capfd, monkeypatch, tmp_path, source, target, message) -> None:
    (tmp_path / "t.en").write_bytes(source)
    (tmp_path / "t.de").write_bytes(target)
    words = ["train", str(run.parent / "tiny.toml"), "--run", str(tmp_path / "r"), "--data.root", str(tmp_path)]
    code, _, err = call(capfd, monkeypatch, *words, "--data.train", "t.{lang}")
    assert code == 2
    assert message in err
    assert "t.en" in err or "t.de" in err


def test_a_start_that_failed_does_not_bind_the_next_one(run: Path, capfd, monkeypatch, tmp_path: Path) -> None:
    words = ["train", str(run.parent / "tiny.toml"), "--run", str(tmp_path / "r")]
    assert call(capfd, monkeypatch, *words, "--data.train", "typo.tsv")[0] == 2
    assert call(capfd, monkeypatch, *words, "--tokenizer.vocab_size", "3")[0] == 2
    code, out, _ = call(capfd, monkeypatch, *words, "--train.steps", "2")
    assert (code, out.strip()) == (0, str(tmp_path / "r"))


def test_settings_may_stand_anywhere(run: Path, capfd, monkeypatch, tmp_path: Path) -> None:
    recipe = str(run.parent / "tiny.toml")
    code, _, err = call(capfd, monkeypatch, "train", "--train.steps=0", recipe, "--run", str(tmp_path / "r"))
    assert code == 2
    assert "'train.steps' must be a number from 1 up" in err
    words = ["translate", "--decode.max_len_a", "0", "They sleep.", "--json", "--decode.max_len_b=1", "-m", str(run)]
    code, out, _ = call(capfd, monkeypatch, *words)
    assert code == 0
    assert len(json.loads(out)["tokens"]) <= 1


def test_a_plain_word_too_many_is_refused(run: Path, capfd, monkeypatch) -> None:
    assert call(capfd, monkeypatch, "train", str(run.parent / "tiny.toml"), "word")[0] == 2


def test_scores_are_printed_even_where_hypotheses_cannot_be_kept(run: Path, capfd, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = call(capfd, monkeypatch, "evaluate", str(run), "-o", str(tmp_path / "file" / "below.txt"))
    assert code == 2
    assert "BLEU" in out
    assert "cannot write" in err


def test_stdin_may_begin_with_a_mark_but_not_hold_nul(run: Path, capfd, monkeypatch) -> None:
    plain = call(capfd, monkeypatch, "translate", "-m", str(run), stdin=b"They sleep.\n")[1]
    assert call(capfd, monkeypatch, "translate", "-m", str(run), stdin=b"\xef\xbb\xbfThey sleep.\n")[1] == plain
    code, _, err = call(capfd, monkeypatch, "translate", "-m", str(run), stdin=b"a\0b\n")
    assert code == 2
    assert "line 1 of stdin is binary" in err


def test_debug_shows_the_traceback(capfd, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["regard", "--debug", "translate", "-m", "nowhere", "x"])
    monkeypatch.delenv("REGARD_DEBUG", raising=False)
    with pytest.raises(RegardError, match="nowhere"):
        main.main()
