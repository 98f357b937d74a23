"""Looking into models that write: they search or sample as ever, then read once more what was written, and all of that is
kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.decode.batch_decoding import decode
from regard.errors import RegardError
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.change.compare import Hand, Translating, Writing, check_places, check_room
from regard.look.change.intervene import Replace, forced_target, other_source
from regard.look.live import Live
from regard.look.page.chain import alignment_chain
from regard.look.page.kinds import ALONE, Kept, Sight, keep, kind_of
from regard.look.page.seen import Prediction, Seen, Strip, Twig, attention_of, predictions_of, strip_of
from regard.look.tree import Node, Search
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer

SIDES = ("source", "target")


def translation(sight: Sight) -> Seen:
    """By a Transformer or by RNNsearch, with the tree of its search."""
    if not sight.text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    hand = Translating(Translator(sight.package), **sight.options)
    sight, source, forced = altered(sight, hand)
    start = [*hand.begun(source), *forced]
    with sight.changed():
        written, search = searched(hand, source, start)
    text = hand.writes.decode([*forced, *written])
    along, notes = followed(sight, [*start, *written], text)
    kept = keep(sight, sight.row(source), sight.row(along[:-1]))
    return sight.view(
        kind_of(sight.package),
        output=text,
        strips=sides(sight, source, along[:-1]),
        **aligned(kept) if sight.reader.is_recurrent else kept.parts(sight, SIDES),
        predictions=foretold("target", kept.result, along, hand.writes, len(start)),
        tree=[[twig(node, hand.writes) for node in step] for step in search.steps],
        written=tuple(along),
        notes=notes or agreement(search, kept),
    )


def language(sight: Sight) -> Seen:
    """A prompt, and what a GPT goes on with."""
    if not sight.text:
        raise RegardError("there is nothing to go on with: give the beginning of a text")
    hand = Writing(Generator(sight.package), **sight.options)
    first = hand.read(sight.text)
    sight, prompt, forced = altered(sight, hand)
    start = [*prompt, *forced]
    with sight.changed():
        written = [*start, *hand.write(prompt, forced)]
    text = hand.writes.decode(written).removeprefix(hand.writes.decode(prompt))
    along, notes = followed(sight, written, text, (first, prompt))
    kept = keep(sight, sight.row(sight.checked(along[:-1])))
    strip = strip_of("text", hand.writes, along[:-1])
    return sight.view(
        "language",
        output=text,
        strips={"tokens": replace(strip, special=(True, *strip.special[1:]))},  # much is looked at the first token
        **kept.parts(sight, ALONE),
        predictions=foretold("tokens", kept.result, along, hand.writes, len(start)),
        written=tuple(along),
        notes=(f"The prompt is the first {len(prompt)} tokens.", *notes),
    )


def altered(sight: Sight, hand: Hand) -> tuple[Sight, list[int], list[int]]:
    """What is read and what is written by force, under changes of tokens; and the other changes with their places."""
    source = hand.read(sight.text)
    if not sight.changes:
        return sight, source, []
    first = hand.write(source, [])
    sight = sight.placed(hand.strips(source, first))
    other = other_source(sight.changes, source, hand.reads.encode)
    begun = hand.begun(source)
    check_places(sight.changes, hand.reads, hand.writes, len(begun))
    forced = forced_target(sight.changes, [*begun, *first], hand.writes.encode)[len(begun) :]
    check_room(sight.package.model, [*begun, *forced])
    return sight, sight.checked(other), forced


def searched(hand: Translating, source: list[int], start: list[int]) -> tuple[list[int], Search]:
    """What a translator writes after `start`, and how it found that. A short-list is not used."""
    live = Live(hand.user.model, hand.options, len(start))
    token_template = SpecialTokenTemplate(after=(), start=tuple(start))
    (found,) = decode(
        live, [source], hand.options, hand.user.model.config.max_len, hand.device, token_template=token_template
    )
    written = [*found[0].tokens, *[hand.user.model.config.eos_token_id] * found[0].ended]
    return written, live.search(written)


# ---- parts ------------------------------------------------------------------------------------------------------------


def followed(
    sight: Sight, own: list[int], text: str, prompts: tuple[list[int], list[int]] = ([], [])
) -> tuple[list[int], tuple[str, ...]]:
    """What the model shall read: what it wrote itself, or what the first model wrote, if it knows these tokens.

    `prompts` are the one that was asked for and the one that is read under changes of tokens."""
    forced = any(isinstance(change, Replace) and change.strip == "target" for change in sight.changes)
    if sight.along is None or forced or list(sight.along.written) == own:
        return own, ()
    strips, other = sight.along.strips, list(sight.along.written)
    if not readable(sight, strips.get("target") or strips["tokens"], other):
        return own, ("The two models cut text into other pieces: weights stand side by side, without a difference.",)
    asked, read = prompts
    if other[: len(asked)] == asked:
        other = [*read, *other[len(asked) :]]
    note = f"By itself this model writes: {text}"
    reason = "Weights and predictions are those along what the first one wrote, so that the two can be compared."
    return other, (note, reason)


def readable(sight: Sight, strip: Strip, ids: Sequence[int]) -> bool:
    """Whether these ids are the same pieces in this model's vocabulary."""
    tokenizer = sight.tokenizers.target
    return max(ids) < len(tokenizer) and tuple(tokenizer.pieces(ids[:-1])) == strip.pieces


def sides(sight: Sight, source: Sequence[int], target: Sequence[int]) -> dict[str, Strip]:
    languages = dict(zip(SIDES, (sight.package.source, sight.package.target), strict=True))
    labels = {side: f"{side} ({name})" if name else side for side, name in languages.items()}
    return {
        "source": strip_of(labels["source"], sight.tokenizers.source, source),
        "target": strip_of(labels["target"], sight.tokenizers.target, target),
    }


def aligned(kept: Kept) -> dict[str, Any]:
    """The one layer of RNNsearch."""
    (only,) = kept.records.values()
    return {"attention": attention_of(kept.records, SIDES, alignment=True), "chain": alignment_chain(only, SIDES)}


def foretold(strip: str, logits: Tensor, written: Sequence[int], tokenizer: Tokenizer, given: int) -> list[Prediction]:
    """Of all that is written but the first token; the first `given` were not chosen by the model."""
    return predictions_of(strip, logits, written[1:], tokenizer, range(len(written) - 1), range(given - 1))


def twig(node: Node, tokenizer: Tokenizer) -> Twig:
    (piece,) = tokenizer.pieces([node.token])
    return Twig(node.token, piece, node.parent, node.log_prob, node.ended, node.best)


def agreement(search: Search, kept: Kept) -> tuple[str, ...]:
    """How far what was heard during the search is from what is shown."""
    both = [(search.weights[name], one.weights()[0]) for name, one in kept.records.items() if name in search.weights]
    if not both:
        return ()
    most = max(float((heard.to(shown) - shown).abs().max()) for heard, shown in both)
    return (f"Weights kept during the search differ from those shown by at most {most:.1e}.",)
