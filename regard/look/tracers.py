"""Tracing one input through a model, according to the kind of model.

    trace("runs/multi30k-en-de", "A man is eating an apple.")

| kind           | models                             | what is read and predicted                                         |
|----------------|------------------------------------|--------------------------------------------------------------------|
| translation    | encoder-decoders: 2017, T5, BART   | the source and its translation, with the tree of the search        |
| alignment      | RNNsearch                          | the same, with one attention layer                                 |
| language       | GPT                                | the prompt and its continuation                                    |
| filling        | BERT                               | the tokens in the places of <mask>, or of all tokens               |
| classification | BERT and GPT with a class head     | a class, a number, or a tag for each word                          |
| picture        | ViT                                | the class of an image                                              |

Models of the first three kinds write: they search or sample, then what was written is read once more, and that forward
pass is recorded. The others only read (look/reading_tracers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.decode.batch_decoding import decode
from regard.errors import RegardError
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.beam_search_trace import BeamSearchTrace, SearchTracer
from regard.look.interventions import Intervention, Replace
from regard.look.model_trace import (
    ForwardPass,
    TokenPrediction,
    Trace,
    TraceRequest,
    body_of,
    package_of,
    predictions_of,
)
from regard.look.output_comparison import TextDecoder, TokenDecoder, TranslationDecoder
from regard.look.reading_tracers import ONE_SEQUENCE, READING_TRACERS
from regard.look.record import attention_layers
from regard.look.token_sequence import TokenSequence, token_sequence
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.classification_model import ClassificationModel
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer

SIDES = ("source", "target")
TRANSLATION_KINDS = {"translation", "alignment"}  # models that translate


def trace(
    model: Any,
    text: str | Path,
    changes: Sequence[Intervention] = (),
    along: Trace | None = None,
    own: bool = False,
    device: str = "cpu",
    unchanged: Trace | None = None,
    **options: Any,
) -> Trace:
    """Let a model read a text, or an image file, and record everything.

    `model` is a folder, a loaded ModelPackage, or a Translator, Generator, Classifier or Embedder. `changes` are
    interventions that are active while it runs (look/interventions.py). With `along`, a model that writes also reads
    what it wrote in another trace of its kind, so that the two can be compared token by token; its output is still its
    own, and with `own` so is what it reads. `unchanged` is the trace of the same model, text and options without changes:
    then it need not be decoded again. A folder is loaded on `device`. Options are those of `[decode]`, for models that
    write.
    """
    package, name = package_of(model, device)
    if along is not None:
        check_same_kind(along, package, name)
    request = TraceRequest(package, name, str(text), tuple(changes), None if own else along, options, unchanged)
    return tracer_for(package)(request)


def kind_of(package: ModelPackage) -> str:
    """Return the kind of a model, as in the table above."""
    if isinstance(package.model, ClassificationModel):
        return "classification"
    kind = architecture_of(package.config)
    if kind.translates:
        return "alignment" if kind.is_recurrent else "translation"
    return "filling" if kind.fills_blanks else "picture" if kind.sees_images else "language"


def check_same_kind(first: Trace, package: ModelPackage, name: str) -> None:
    """Check that a model is of a kind that can be compared with a first trace."""
    kinds = first.kind, kind_of(package)
    if kinds[0] != kinds[1] and not set(kinds) <= TRANSLATION_KINDS:
        names = first.name or first.model["architecture"], name or package.config.architecture
        both = " and ".join(f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True))
        raise RegardError(f"{both} are models of two kinds, which cannot be compared: look into each by itself")


def tracer_for(package: ModelPackage) -> Callable[[TraceRequest], Trace]:
    """Return the function that traces a model of this kind; a model without attention is an error."""
    found, config = attention_layers(body_of(package.model)), package.config
    if not found and kind_of(package) == "alignment":
        raise RegardError(
            f"this model has no attention (model.attention_score {config.attention_score}), so there is nothing to look "
            f"at: train one with model.attention_score additive, dot or general"
        )
    if not found:
        raise RegardError(f"no layer of this {config.architecture} attends to anything: there is nothing to look at")
    writing = {**dict.fromkeys(TRANSLATION_KINDS, trace_translation), "language": trace_language_model}
    return {**writing, **READING_TRACERS}[kind_of(package)]


# ---- models that write ------------------------------------------------------------------------------------------------


def trace_translation(request: TraceRequest) -> Trace:
    """Trace a translation by a Transformer or by RNNsearch, with the tree of its search."""
    if not request.text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    decoder = TranslationDecoder(Translator(request.package), **request.options)
    request, source, forced = replace_tokens(request, decoder)
    start = [*decoder.start(source), *forced]
    with request.intervene():
        written, search = search_after(decoder, source, start)
    tokenizer = decoder.target_tokenizer
    text = tokenizer.decode([*forced, *written])
    read, notes = choose_output(request, [*start, *written], text)
    done = request.run(request.to_batch(source), request.to_batch(read[:-1]))
    return request.trace(
        kind_of(request.package),
        output=text,
        sequences=source_and_target(request, source, read[:-1]),
        **request.layers(done, SIDES),
        predictions=next_token_predictions("target", done.logits, read, tokenizer, len(start)),
        tree=[[replace(node, piece=tokenizer.pieces([node.token])[0]) for node in step] for step in search.steps],
        written=tuple(read),
        notes=notes or search_agreement(search, done),
    )


def trace_language_model(request: TraceRequest) -> Trace:
    """Trace a prompt and its continuation by a GPT."""
    if not request.text:
        raise RegardError("there is nothing to continue: give the beginning of a text")
    decoder = TextDecoder(Generator(request.package), **request.options)
    asked = decoder.encode(request.text)
    request, prompt, forced = replace_tokens(request, decoder)
    start = [*prompt, *forced]
    with request.intervene():
        written = [*start, *decoder.decode(prompt, forced)]
    tokenizer = decoder.target_tokenizer
    text = tokenizer.decode(written).removeprefix(tokenizer.decode(prompt))
    read, notes = choose_output(request, written, text, (asked, prompt))
    done = request.run(request.to_batch(request.check_length(read[:-1])))
    return request.trace(
        "language",
        output=text,
        sequences={"tokens": token_sequence("text", tokenizer, read[:-1], first_is_sink=True)},
        **request.layers(done, ONE_SEQUENCE),
        predictions=next_token_predictions("tokens", done.logits, read, tokenizer, len(start)),
        written=tuple(read),
        notes=(f"The prompt is the first {len(prompt)} tokens.", *notes),
    )


def replace_tokens(request: TraceRequest, decoder: TokenDecoder) -> tuple[TraceRequest, list[int], list[int]]:
    """Return the request with resolved interventions, its source, and the forced beginning of its output."""
    source = decoder.encode(request.text)
    if not request.changes:
        return request, source, []
    if request.unchanged is None:
        first = decoder.decode(source, [])
    else:  # what it wrote, behind the tokens that it began with
        first = list(request.unchanged.written)[len(decoder.start(source)) :]
    request = request.resolve(decoder.words(source, first))
    other, forced = decoder.replace_tokens(request.changes, source, first)
    return request, request.check_length(other), forced


def search_after(decoder: TranslationDecoder, source: list[int], start: list[int]) -> tuple[list[int], BeamSearchTrace]:
    """Return the tokens that a translator writes after `start`, and the trace of the search."""
    tracer: Any = SearchTracer(decoder.model, decoder.options, len(start))
    template = SpecialTokenTemplate(after=(), start=tuple(start))
    longest = decoder.model.config.max_len
    (found,) = decode(tracer, [source], decoder.options, longest, decoder.device, token_template=template)
    written = [*found[0].tokens, *[decoder.model.config.eos_token_id] * found[0].ended]
    return written, tracer.trace(written)


def choose_output(
    request: TraceRequest, own: list[int], text: str, prompts: tuple[list[int], list[int]] = ([], [])
) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids that the model shall read, and notes on them: its own output, or that of the first model if possible.

    `prompts` are the one that was asked for and the one that is read under interventions that replace tokens."""
    forced = any(isinstance(change, Replace) and change.side == "target" for change in request.changes)
    if request.along is None or forced or list(request.along.written) == own:
        return own, ()
    sequences, other = request.along.sequences, list(request.along.written)
    if not has_same_pieces(request, sequences.get("target") or sequences["tokens"], other):
        return own, ("The two models cut text into other pieces: weights stand side by side, without a difference.",)
    asked, read = prompts
    if other[: len(asked)] == asked:
        other = [*read, *other[len(asked) :]]
    note = f"By itself this model writes: {text}"
    reason = "Weights and predictions are those along what the first one wrote, so that the two can be compared."
    return other, (note, reason)


def has_same_pieces(request: TraceRequest, sequence: TokenSequence, ids: Sequence[int]) -> bool:
    """Return whether these ids are the same pieces in the vocabulary of the requested model."""
    tokenizer = request.tokenizers.target
    return max(ids) < len(tokenizer) and tuple(tokenizer.pieces(ids[:-1])) == sequence.pieces


def source_and_target(request: TraceRequest, source: Sequence[int], target: Sequence[int]) -> dict[str, TokenSequence]:
    """Return the token sequences of a translation, labelled with their languages."""
    languages = dict(zip(SIDES, (request.package.source, request.package.target), strict=True))
    labels = {side: f"{side} ({name})" if name else side for side, name in languages.items()}
    return {
        "source": token_sequence(labels["source"], request.tokenizers.source, source),
        "target": token_sequence(labels["target"], request.tokenizers.target, target),
    }


def next_token_predictions(
    sequence: str, logits: Tensor, written: Sequence[int], tokenizer: Tokenizer, given: int
) -> list[TokenPrediction]:
    """Return the predictions of all tokens but the first; the first `given` were not chosen by the model."""
    return predictions_of(sequence, logits, written[1:], tokenizer, range(len(written) - 1), range(given - 1))


def search_agreement(search: BeamSearchTrace, done: ForwardPass) -> tuple[str, ...]:
    """Return a note on how far the weights recorded during the search are from those of the forward pass."""
    both = [(search.weights[name], one.weights()[0]) for name, one in done.records.items() if name in search.weights]
    if not both:
        return ()
    most = max(float((recorded.to(shown) - shown).abs().max()) for recorded, shown in both)
    return (f"Weights kept during the search differ from those shown by at most {most:.1e}.",)
