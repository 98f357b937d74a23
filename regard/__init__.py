"""Sequence models in PyTorch: translate, train, evaluate and look inside.

Use a model:

    import regard

    regard.translate("I ate an apple.", to="fr").text       # the bundled model: English, German, French, Chinese
    translator = regard.load("runs/multi30k-en-de")         # any run or model folder
    translator.translate(["How are you?"], beam=4)[0].text
    regard.identify_language("¿Dónde está la estación?").language   # 'es', one of about a hundred

`regard.load` returns an object of the class for what the model does:

    Translator    translate                       encoder-decoders: Transformer, T5, BART, RNNsearch, ConvS2S, ...
    Generator     generate, stream, chat, score   language models: GPT, LLaMA, LSTM, ...
    Classifier    classify                        models trained on labels: texts, pairs, tags, images
    Embedder      embed                           encoders: BERT, RoBERTa, ...
    WordVectors   nearest, analogy, similarity    word2vec and GloVe files; WordVectors.train makes some

Train one:

    run = regard.train("toy-en-de", train={"steps": 500})   # a shipped recipe, or the path of a TOML file
    regard.resume(run, train={"steps": 1000})

Look inside:

    regard.summary("gpt2")                                   # parameters, FLOPs and memory, layer by layer
    with regard.record(translator.model, "decoder.*.cross") as tape:
        translator.translate("I ate an apple.")
    tape["decoder.1.cross"][-1].weights()                    # attention weights (sentences, heads, written, source)

Errors that you can fix are `RegardError`s; arguments of a wrong type are `TypeError`s. The command line has the same verbs:
`regard --help`. Names are imported when they are first used, so `import regard` is fast.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.inference.classifier import Classifier, Prediction
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generation, Generator
    from regard.inference.load import load
    from regard.inference.model_spec import summary
    from regard.inference.translator import Translation, Translator, translate
    from regard.look.record import record
    from regard.tasks.run import resume, train
    from regard.text.language_identification import Identification, identify_language
    from regard.vectors.word_vectors import WordVectors

# Let idle OpenMP threads of torch yield their core after microseconds, not milliseconds: beside busy processes a training
# step takes several times as long otherwise. GNU's OpenMP reads this once, when torch is imported, so it is set before that.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.2.0.dev0"
__all__ = [
    "Classifier",
    "Embedder",
    "Generation",
    "Generator",
    "Identification",
    "Prediction",
    "RegardError",
    "Translation",
    "Translator",
    "WordVectors",
    "identify_language",
    "load",
    "record",
    "resume",
    "summary",
    "train",
    "translate",
]

_MODULES = {
    "load": "regard.inference.load",
    "Embedder": "regard.inference.embedder",
    "Classifier": "regard.inference.classifier",
    "Prediction": "regard.inference.classifier",
    "WordVectors": "regard.vectors.word_vectors",
    "Generator": "regard.inference.generator",
    "Generation": "regard.inference.generator",
    "translate": "regard.inference.translator",
    "Translator": "regard.inference.translator",
    "Translation": "regard.inference.translator",
    "identify_language": "regard.text.language_identification",
    "Identification": "regard.text.language_identification",
    "train": "regard.tasks.run",
    "resume": "regard.tasks.run",
    "record": "regard.look.record",
    "summary": "regard.inference.model_spec",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
