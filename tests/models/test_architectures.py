"""Architectures differ by what their classes declare: their names are in one place, and a new one needs no other edit."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import regard
from regard.config import ModelConfig
from regard.config.registry import MADE_OF
from regard.errors import RegardError
from regard.exchange.huggingface import write_huggingface
from regard.inference.embedder import Embedder
from regard.look import trace
from regard.model_folder import load
from regard.models.architectures import ARCHITECTURES, PRESETS, architecture_of, make_model, preset, register
from regard.models.gpt import GPT
from regard.models.model import LanguageModel, Model, TranslationModel, names_learning, names_where
from regard.tasks import TASKS

PACKAGE = Path(regard.__file__).parent
NAMES = ("transformer", "gpt", "bert", "vit", "rnn", "seq2seq")

ALLOWED = {
    "models/architectures.py": "names them",
    "models/presets.py": "tables of presets by architecture; rnn is the name of a cell too",
    "config/schema.py": "rnn is the name of a cell, seq2seq and vit are tables of settings",
    "layers/cells.py": "rnn is the name of a cell",
    "exchange/*.py": "a Family names the architecture that it becomes, and model types of other libraries",
    "studies/*.py": "labels of a study's rows, and the cell rnn",
}


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """The line and value of each string that is the name of an architecture."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno, str(node.value)


def test_names_of_architectures_stand_in_one_place() -> None:
    assert set(NAMES) <= set(ARCHITECTURES)
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.relative_to(PACKAGE).match(pattern) for pattern in ALLOWED)
        for line, name in literals(path)
    ]
    assert not found


def test_exchange_names_an_architecture_only_in_families() -> None:
    """Elsewhere in the exchange an architecture is never compared with a name."""
    for path in sorted((PACKAGE / "exchange").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                names = [x for x in ast.walk(node) if isinstance(x, ast.Constant) and x.value in NAMES]
                assert not names, f"{path.name}:{node.lineno}"


# ---- what classes declare ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_declarations_agree_with_each_other_and_with_the_model(name: str) -> None:
    kind = ARCHITECTURES[name]
    assert kind.name == name
    assert set(kind.tasks) <= set(TASKS)
    assert {"source": "encoder", "target": "decoder"}.keys() >= set(kind.vocabularies)
    assert kind.translates == (kind.sides == ("encoder", "decoder"))
    with torch.device("meta"):
        model = make_model(preset(next(iter(kind.presets)), source_vocab=50, target_vocab=50, n_classes=3))
    assert isinstance(model, kind)
    assert isinstance(model, TranslationModel) == kind.translates == hasattr(model, "read_target")
    assert isinstance(model, LanguageModel) == kind.generates
    assert hasattr(model, "begin") == hasattr(model, "step") == (kind.translates or kind.generates)
    assert kind.packs_documents == hasattr(model, "packed_head_input")
    assert kind.embeds == (type(model).last_hidden_state is not Model.last_hidden_state)
    assert isinstance(model.config, ModelConfig)
    assert architecture_of(model.config) is kind is architecture_of(ModelConfig(preset=next(iter(kind.presets))))


WITH_HEADS = [(name, head) for name in ("gpt", "bert", "rnn") for head in ("sequence", "token")]


@pytest.mark.parametrize(("name", "head"), [*((name, "none") for name in NAMES), *WITH_HEADS])
def test_example_inputs_have_the_lengths_that_were_asked_for(name: str, head: str) -> None:
    kind = ARCHITECTURES[name]
    vocabularies = {f"{side}_vocab": 50 for side in kind.vocabularies}
    config = preset(next(iter(kind.presets)), n_classes=3, prediction_head=head, **vocabularies)
    s, t = (5 if side in kind.sides else 0 for side in ("encoder", "decoder"))
    inputs = kind.example_inputs(config, 2, s, t, torch.empty(0))
    assert kind.lengths(config, *inputs) == (s, t)
    outputs = make_model(config).eval()(*inputs)
    assert outputs.shape[0] == 2
    assert outputs.shape[-1] == (3 if kind.gives_classes(config) else kind.output_vocabulary(config))


def test_messages_list_names() -> None:
    assert names_where("generates") == "gpt or rnn"
    assert names_where("sees_images") == "vit"
    assert names_learning("classification") == "gpt, bert or rnn"


def test_an_unknown_architecture_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RegardError, match=r"unknown model\.architecture 'seqseq': did you mean 'seq2seq'\?"):
        make_model(ModelConfig(architecture="seqseq"))


# ---- a new one ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """An architecture for one test."""

    name: str

    def __enter__(self) -> type[Model]:
        class Projected(GPT):
            """A GPT whose embeddings go through a linear layer."""

            presets: ClassVar = {"projected-tiny": {"n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}}

            def __init__(self, config: ModelConfig) -> None:
                super().__init__(config)
                self.embedding_norm = torch.nn.Linear(self.config.d_model, self.config.d_model)

        return register(self.name)(Projected)

    def __exit__(self, *_: object) -> None:
        for name in ARCHITECTURES.pop(self.name).presets:
            del PRESETS[name]
        del MADE_OF[self.name]


TRAINED = {
    "model.preset": "projected-tiny",
    "model.max_len": 32,
    "tokenizer.kind": "char",
    "train.steps": 4,
    "train.batch_tokens": 128,
    "train.valid_every": 2,
    "train.save_every": 2,
    "train.samples": 1,
    "train.device": "cpu",
}


def test_a_new_architecture_is_trained_saved_loaded_and_used_by_declaring_itself(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 20)
    recipe = tmp_path / "new.toml"
    recipe.write_text('task = "causal-lm"\n[data]\ntrain = ["text.txt"]\nvalid = ["text.txt"]\ntest = ["text.txt"]\n')
    settings = {**TRAINED, "data.root": str(tmp_path)}
    with Registered("projected") as kind:
        run = regard.train(recipe, tmp_path / "run", settings=settings, quiet=True)
        writer = regard.load(run, device="cpu")
        assert isinstance(writer.model, kind)
        assert writer.model.config.architecture == "projected"
        assert len(writer.generate("the cat", max_new_tokens=5).tokens) <= 5
        assert writer.score("the cat").total < 0
        assert "A projected model for causal-lm" in (run / "model" / "README.md").read_text()
        assert regard.summary(run).total.parameters == sum(p.numel() for p in writer.model.parameters())
        view = trace(run, "the cat", max_new_tokens=3)
        assert (view.kind, view.model["architecture"], view.model["layers"]) == (
            "language",
            "projected",
            {"decoder": 1},
        )
        with pytest.raises(RegardError, match="no family of models elsewhere is a projected"):
            write_huggingface(tmp_path / "elsewhere", load(run, torch.device("cpu")))
        assert names_where("generates") == "gpt, rnn or projected"
        with pytest.raises(
            RegardError, match=r"masked-lm trains a bert, but model\.preset projected-tiny is a projected"
        ):
            regard.train(recipe, tmp_path / "other", settings={**settings, "task": "masked-lm"}, quiet=True)
        with pytest.raises(
            RegardError, match=r"model\.cell is for rnn, seq2seq models, and projected-tiny is a projected"
        ):
            regard.train(recipe, tmp_path / "other", settings={**settings, "model.cell": "gru"}, quiet=True)
    with pytest.raises(RegardError, match=r"unknown model\.architecture 'projected'"):
        regard.load(run, device="cpu")


def test_a_new_architecture_answers_and_embeds(tmp_path: Path) -> None:
    (tmp_path / "film.tsv").write_text("text\tlabel\n" + "a good film\tgood\na bad film\tbad\n" * 8)
    recipe = tmp_path / "new.toml"
    recipe.write_text('task = "classification"\n[data]\ntrain = ["film.tsv"]\nvalid = ["film.tsv"]\n')
    with Registered("projected"):
        run = regard.train(recipe, tmp_path / "run", settings={**TRAINED, "data.root": str(tmp_path)}, quiet=True)
        assert regard.load(run, device="cpu").classify("a good film").label in ("good", "bad")
        assert Embedder.load(run, device="cpu").embed(["a good film"]).shape == (1, 16)


def test_two_architectures_or_presets_of_one_name_are_refused() -> None:
    class Other(GPT):
        presets: ClassVar = {"gpt-tiny": {}}

    with pytest.raises(RegardError, match="two architectures are called 'gpt'"):
        register("gpt")(Other)
    with pytest.raises(RegardError, match="two presets are called 'gpt-tiny'"):
        register("other")(Other)
