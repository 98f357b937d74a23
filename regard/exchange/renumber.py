"""A tokenizer.json with our ids, and back again with its own.

The rules that cut text stay as they are. The five special tokens get our names and ids; rows of the embedding that no piece
stands for get one that no text contains, so that every row has a piece.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import tokenizers

from regard.errors import RegardError
from regard.exchange.numbering import Numbering
from regard.text.vocabulary import SPECIALS, UNK

Json = dict[str, Any]


def pieces_of(data: Json) -> dict[str, int]:
    """All pieces of a tokenizer.json and their ids, added tokens included."""
    return {**model_pieces(data["model"]), **{token["content"]: token["id"] for token in data["added_tokens"]}}


def model_pieces(model: Json) -> dict[str, int]:
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}


def to_ours(data: Json, numbering: Numbering) -> Json:
    data = copy.deepcopy(data)
    model, there = data["model"], {i: piece for piece, i in pieces_of(data).items()}
    in_model = set(model_pieces(model).values())
    last = max(in_model - set(numbering.special), default=-1)
    names = dict(enumerate(SPECIALS))
    for i, old in list(enumerate(numbering.theirs))[len(SPECIALS) :]:
        assert old is not None
        names[i] = there.get(old, f"<unused-{old}>")
        if names[i] in SPECIALS:
            raise RegardError(f"the tokenizer has a piece {names[i]!r} that is not what Regard means by that name")
    if model.get("unk_token") is not None:
        model["unk_token"] = names[numbering.ours[id_of(model["unk_token"], data)]]
    if model.get("unk_id") is not None:
        model["unk_id"] = numbering.ours[model["unk_id"]]
    scores = {} if isinstance(model["vocab"], dict) else dict(enumerate(score for _, score in model["vocab"]))
    kept = [i for i in names if i < len(SPECIALS) or numbering.theirs[i] <= last]  # type: ignore[operator]
    set_vocab(model, {names[i]: i for i in kept}, {i: scores.get(numbering.theirs[i], 0.0) for i in kept})  # type: ignore[arg-type]
    data["added_tokens"] = added(data["added_tokens"], numbering, names, there)
    return data | {"post_processor": None, "truncation": None, "padding": None}


def id_of(unknown: str, data: Json) -> int:
    try:
        return pieces_of(data)[unknown]
    except KeyError:
        raise RegardError(f"the tokenizer's unknown token {unknown!r} is not in its vocabulary") from None


def set_vocab(model: Json, pieces: dict[str, int], scores: dict[int, float]) -> None:
    """Into whichever form this kind of model has: a dictionary, or pieces with scores in the order of their ids."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = pieces
    else:
        model["vocab"] = [[piece, scores[i]] for piece, i in sorted(pieces.items(), key=lambda item: item[1])]


def added(old: list[Json], numbering: Numbering, names: dict[int, str], there: dict[int, str]) -> list[Json]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [{"id": i, "content": name, **flags} for i, name in enumerate(SPECIALS)]
    tokens += [{**t, "id": numbering.ours[t["id"]]} for t in old if t["id"] not in numbering.special]
    unused = [i for i, t in enumerate(numbering.theirs) if t is not None and t not in there]
    tokens += [{"id": i, "content": names[i], **flags} for i in unused]
    return sorted(tokens, key=lambda token: token["id"])


def guarded(data: Json) -> Json:
    """A text that reads "<eos>" is five characters. Where the model of a vocabulary would find the piece of that name in it,
    the text is cut after its first character."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    backend.encode_special_tokens = True
    said = {i for name in SPECIALS for i in backend.encode(f"a {name} b{name}", add_special_tokens=False).ids}
    if not said & (set(range(len(SPECIALS))) - {UNK}):
        return data
    inside = "|".join(name[1:] for name in SPECIALS)
    cut = {"type": "Split", "pattern": {"Regex": f"<(?={inside})"}, "behavior": "MergedWithPrevious", "invert": False}
    first = [data["pre_tokenizer"]] if data["pre_tokenizer"] else []
    return data | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, cut]}}


def memory(data: Json, numbering: Numbering) -> Json:
    """What `to_theirs` needs beside our tokenizer.json."""
    there = {i: piece for piece, i in pieces_of(data).items()}
    in_model = set(model_pieces(data["model"]).values())
    scores = None if isinstance(data["model"]["vocab"], dict) else [s for _, s in data["model"]["vocab"]]
    special = [
        {
            "id": i,
            "content": there[i],
            "score": scores[i] if scores and i in in_model else None,
            "in_model": i in in_model,
        }
        for i in numbering.special
        if i in there
    ]
    tokens = [token for token in data["added_tokens"] if token["id"] in numbering.special]
    same = {name: data.get(name) for name in ("post_processor", "truncation", "padding", "pre_tokenizer")}
    unk = {name: data["model"][name] for name in ("unk_token", "unk_id") if name in data["model"]}
    return {"special": special, "added_tokens": tokens, "same": same, "unk": unk}


def to_theirs(data: Json, numbering: Numbering, kept: Json) -> Json:
    data = copy.deepcopy(data)
    model = data["model"]
    back = {piece: numbering.theirs[i] for piece, i in model_pieces(model).items() if i >= len(SPECIALS)}
    pieces: dict[str, int] = {p: i for p, i in back.items() if i is not None and p != f"<unused-{i}>"}
    scores = {} if isinstance(model["vocab"], dict) else {back.get(piece): score for piece, score in model["vocab"]}
    for special in kept["special"]:
        if special["in_model"]:
            pieces[special["content"]], scores[special["id"]] = special["id"], special["score"]
    set_vocab(model, dict(sorted(pieces.items(), key=lambda item: item[1])), scores)  # type: ignore[arg-type]
    model |= kept["unk"]
    others = [
        {**token, "id": numbering.theirs[token["id"]]}
        for token in data["added_tokens"]
        if token["id"] >= len(SPECIALS) and token["content"] != f"<unused-{numbering.theirs[token['id']]}>"
    ]
    data["added_tokens"] = sorted(others + kept["added_tokens"], key=lambda token: token["id"])
    return data | kept["same"]
