"""`regard.load`: a trained model from its folder, as an object of the class for its task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import exists
from regard.models.architectures import architecture_of

if TYPE_CHECKING:
    from regard.inference.classifier import Classifier
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.translator import Translator
    from regard.vectors.word_vectors import WordVectors


@overload
def load(
    path: Literal["en-de-fr-zh"] | list[str] | list[Path], device: str = "auto", weights: str = "auto"
) -> Translator: ...
@overload
def load(
    path: str | Path, device: str = "auto", weights: str = "auto"
) -> Translator | Generator | Classifier | Embedder | WordVectors: ...
def load(
    path: str | Path | list[str] | list[Path], device: str = "auto", weights: str = "auto"
) -> Translator | Generator | Classifier | Embedder | WordVectors:
    """Load a trained model from a run or model folder, or a bundled model by its name. A list of translators is an ensemble.

    Examples:
        >>> import regard
        >>> type(regard.load("en-de-fr-zh")).__name__
        'Translator'

    Returns a `Translator` for an encoder-decoder, a `Generator` for a language model, a `Classifier` for a model trained on
    labels, an `Embedder` for other encoders, and `WordVectors` for a file or folder of word vectors. Where you know which,
    `Translator.load(path)` and so on have that type for a type checker too, and say what is wrong if the model is another.

    Args:
        path: A run or model folder, the name of a bundled model, or a file of word vectors. A list of folders of
            translators with one target vocabulary is an ensemble: each token has the mean of their probabilities.
        device: auto, cpu, cuda or cuda:N.
        weights: auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16; on a CPU also int8 and fp16.
    """
    several = isinstance(path, (list, tuple)) and all(isinstance(one, (str, Path)) for one in path)
    if not isinstance(path, (str, Path)) and not several:
        raise TypeError(f"load takes a path or the name of a bundled model, not {type(path).__name__}")
    from regard.inference.classifier import TASKS, Classifier
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.translator import Translator
    from regard.vectors.word_vectors import WordVectors, is_folder

    if not isinstance(path, (str, Path)):
        return Translator.load(path, device, weights)
    if (exists(Path(path)) and Path(path).is_file()) or is_folder(Path(path)):
        return WordVectors.load(path)
    package = load_model(Path(path), pick_device(device), weights)
    if package.task in TASKS:
        return Classifier(package)
    kind = architecture_of(package.config)
    if kind.translates:
        return Translator(package)
    if kind.generates:
        return Generator(package)
    if kind.embeds:
        return Embedder(package)
    raise RegardError(f"{path} holds a {package.config.architecture} that learned {package.task}; nothing here uses it")
