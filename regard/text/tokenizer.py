"""Tokenizers: text <-> token ids, for seven kinds of subword segmentation and for vocabularies from elsewhere.

The work is done by the `tokenizers` library. A tokenizer knows which of its tokens are special (`Tokenizer.special`): a
vocabulary that Regard trained by their names, one from elsewhere by the file vocabulary.json beside it. Every kind

* never takes text for a special token: a user who types "<eos>" gets five characters, not the end of the sentence,
* learns the same vocabulary from the same lines, in every process and with any number of threads.

What `decode(encode(text))` returns:

* `byte-bpe`: exactly the text (after NFC and lower-casing, where these are on), whatever it contains.
* `char`, `bpe`, `unigram`, `word`: exactly the text, spaces included, where its characters (`word`: its pieces) are in
  the vocabulary; others become `<unk>`, which decodes to nothing. One character is not kept: "▁" (U+2581) stands for a
  space and comes back as one.
* `split`: the words between white space, unchanged, with one space between any two; the end of a line is a word too.
  It is for texts that are already tokenized, and the only kind that reads "<unk>" in a text as the special token.
* `wordpiece`: the words, but not the spacing: runs of white space shrink to one space, and punctuation is spaced by rule.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unicodedata import combining, normalize

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.files import exists, read_json, read_text, shorten_path, write_text
from regard.text.special_tokens import SPECIAL_TOKEN_NAMES, SpecialTokens
from regard.text.tokenizer_training import KINDS, SPACE, check_text, library_errors, train_tokenizer

__all__ = ["KINDS", "Tokenizer", "TokenizerConfig", "Tokenizers"]


class Tokenizer:
    """A trained vocabulary with its segmentation rules; made by `train` or `load`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None, size: int | None = None
    ) -> None:
        """Wrap an object of the `tokenizers` library.

        `special`: its special tokens; None: those with Regard's names. `size`: how many ids the vocabulary has, some of
        which may have no piece; None: one id for each piece, without a gap.
        """
        self.special = special_tokens_by_name(backend) if special is None else special
        self._size = check_vocab_size(backend, self.special, size)
        self._text: str | None = None  # the original tokenizer.json, where the backend was changed after it was read
        if special is not None:
            self._text = backend.to_str(pretty=True)
            split_special_token_names(backend, special.unk)
        # These three must not depend on the file: it does not contain the first, and the others cut or pad sentences.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> "Tokenizer":
        """Learn a vocabulary from `lines`, which are read once and not kept."""
        return cls(train_tokenizer(lines, config))

    @classmethod
    def load(cls, path: Path, special: SpecialTokens | None = None, size: int | None = None) -> "Tokenizer":
        """Read a tokenizer.json; any file that is not one, or lacks its special tokens, is a `RegardError`."""
        try:
            text = read_text(Path(path))
        except OSError as error:
            raise RegardError(f"cannot read the tokenizer {shorten_path(path)}: {error.strerror or error}") from error
        except ValueError as error:
            raise RegardError(f"cannot read the tokenizer {path}: {error}") from error
        with library_errors(f"{path} is not a usable tokenizer.json (train one with `regard tokenizer train`)"):
            return cls(tokenizers.Tokenizer.from_str(text), special, size)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json in the format of the `tokenizers` library, atomically."""
        write_text(Path(path), self.to_str())

    def to_str(self) -> str:
        """Return the text of tokenizer.json; that of a tokenizer from elsewhere is the text it was read from."""
        return self._backend.to_str(pretty=True) if self._text is None else self._text

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without any special token but `<unk>`."""
        check_text(text, "the text")
        with library_errors("cannot encode the text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, encoded on all cores."""
        for number, text in enumerate(texts, start=1):
            check_text(text, f"text {number}")
        with library_errors("cannot encode the texts"):
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and the characters that each stands for."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, include_marks(text, encoding.offsets)

    def split_words(self, texts: Sequence[str]) -> list[tuple[list[int], list[str]]]:
        """Return the ids of many texts and what stands in the text for each, without white space around it, with accents
        in one character (NFC)."""
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (own.ids, [normalize("NFC", text[begin:end].strip()) for begin, end in include_marks(text, own.offsets)])
            for text, own in zip(texts, encoded, strict=True)
        ]

    def join_pieces(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces as `token` spells them."""
        decoder = self._backend.decoder
        return " ".join(pieces) if decoder is None else decoder.decode(list(pieces))

    @property
    def marks_spaces(self) -> bool:
        """Whether a piece that begins a word has the sign "▁" for the space before it."""
        return isinstance(self._backend.decoder, decoders.Metaspace)

    @property
    def lowercases(self) -> bool:
        """Whether texts are lower-cased before they are split into tokens, so that none has a capital letter."""
        normalizer = self._backend.normalizer
        return normalizer is not None and "A" not in normalizer.normalize_str("A")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; special tokens are skipped."""
        known = self._known(ids)
        with library_errors("cannot decode the ids"):
            return self._backend.decode(known, skip_special_tokens=True)

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """Return the texts of many lists of token ids."""
        known = [self._known(ids) for ids in batch]
        with library_errors("cannot decode the ids"):
            return self._backend.decode_batch(known, skip_special_tokens=True)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return each token in readable form: spaces as "▁", bytes that are only a part of a character as \\xNN."""
        tokens = [self.token(i) for i in self._known(ids)]
        byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        return [_readable(token) for token in tokens] if byte_level else tokens

    def token(self, id: int) -> str:
        """Return the token with this id as tokenizer.json spells it; the empty string for an id without a piece."""
        return self._backend.id_to_token(id) or ""

    def sentinels(self) -> list[int]:
        """Return the ids of <extra-0>, <extra-1>, ...: sentinel tokens that stand for masked spans (T5)."""
        added = self._backend.get_added_tokens_decoder()
        named = {i: re.fullmatch(r"<extra[-_](?:id_)?(\d+)>", token.content) for i, token in added.items()}
        return sorted((i for i, found in named.items() if found), key=lambda i: int(named[i][1]))  # type: ignore[index]

    def language_tokens(self) -> dict[str, int]:
        """Return the ids of <to-de>, <to-fr>, ... by language: special tokens that name the target language."""
        added = self._backend.get_added_tokens_decoder()
        named = {re.fullmatch(r"<to-(.+)>", token.content): i for i, token in added.items()}
        return {found[1]: i for found, i in named.items() if found}

    def positional_unknown(self) -> dict[int, int | None]:
        """Return the distances of <unk:-1>, <unk:+0>, ... by id: how many places after its source word an unknown word
        stands; None for <unk:null>, a word without a source word."""
        added = self._backend.get_added_tokens_decoder()
        named = {i: re.fullmatch(r"<unk:([+-]\d+|null)>", token.content) for i, token in added.items()}
        return {i: None if found[1] == "null" else int(found[1]) for i, found in named.items() if found}

    def __len__(self) -> int:
        return self._size

    def fingerprint(self) -> str:
        """Return a SHA-256 of the segmentation and the special tokens: equal fingerprints mean equal ids."""
        roles = json.dumps([asdict(self.special), self._size])
        return hashlib.sha256((self._backend.to_str() + roles).encode()).hexdigest()

    def _known(self, ids: Iterable[int]) -> list[int]:
        known = [int(i) for i in ids]
        if known and not 0 <= min(known) <= max(known) < self._size:
            wrong = next(i for i in known if not 0 <= i < self._size)
            raise RegardError(f"token id {wrong} is outside the vocabulary of {self._size}: use the model's tokenizer")
        return known


# A joint vocabulary, or one for each side.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json")
VOCABULARY_FILE = "vocabulary.json"  # only for a vocabulary from elsewhere: its special tokens and its size


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of the source and the target side; the same object twice when the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    def save(self, folder: Path) -> None:
        if self.source is self.target:
            self.source.save(folder / "tokenizer.json")
        else:
            self.source.save(folder / "tokenizer.source.json")
            self.target.save(folder / "tokenizer.target.json")
        if self.source._text is None:
            (folder / VOCABULARY_FILE).unlink(missing_ok=True)
        else:  # the names of its tokens do not say which are special
            values = {"size": len(self.source), "special_tokens": asdict(self.source.special)}
            write_text(folder / VOCABULARY_FILE, json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        joint_file, *files = (folder / name for name in TOKENIZER_FILES)
        roles = read_vocabulary_file(folder / VOCABULARY_FILE) if exists(folder / VOCABULARY_FILE) else (None, None)
        if exists(files[0]):
            return cls(*(Tokenizer.load(file, *roles) for file in files))
        joint = Tokenizer.load(joint_file, *roles)
        return cls(joint, joint)


def read_vocabulary_file(path: Path) -> tuple[SpecialTokens, int]:
    """Return the special tokens and the size of a vocabulary from elsewhere."""
    try:
        values = read_json(path)
        special, size = SpecialTokens(**values["special_tokens"]), values["size"]
        ids = [size, *(i for i in asdict(special).values() if i is not None)]
        if not all(type(i) is int and 0 <= i <= size for i in ids):
            raise ValueError(f"ids {ids[1:]} of a vocabulary of {size!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegardError(f"cannot read {path} ({type(error).__name__}: {error}); copy the folder anew") from None
    return special, size


def special_tokens_by_name(backend: tokenizers.Tokenizer) -> SpecialTokens:
    """Return the special tokens with Regard's names; a vocabulary without Regard's end token is a ValueError."""
    added = backend.get_added_tokens_decoder()
    by_name = {token.content: i for i, token in added.items() if token.special}
    eos = SPECIAL_TOKEN_NAMES["eos"]
    if eos not in by_name:
        raise ValueError(f"it has no special token {eos}: import the model it belongs to with `regard import`")
    return SpecialTokens(**{role: by_name.get(name) for role, name in SPECIAL_TOKEN_NAMES.items()})


def check_vocab_size(backend: tokenizers.Tokenizer, special: SpecialTokens, size: int | None) -> int:
    """Return how many ids a vocabulary has; an id of a piece or special token outside of them is a ValueError."""
    ids = set(backend.get_vocab().values())
    if size is None and ids != set(range(len(ids))):
        raise ValueError(f"its {len(ids)} tokens do not have the ids 0 to {len(ids) - 1}")
    size = len(ids) if size is None else size
    if max((*ids, *special.ids), default=0) >= size:
        raise ValueError(f"it has the id {max(*ids, *special.ids)}, outside a vocabulary of {size}")
    return size


def split_special_token_names(backend: tokenizers.Tokenizer, unknown: int | None) -> None:
    """Make a text that reads "</s>" four characters, not the special token of that name.

    Where the model of a vocabulary would match the special token's own piece, a pre-tokenizer is added that splits the
    name after its first character.
    """
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    backend.encode_special_tokens = True
    text = " ".join(f"a {name} b{name}" for name in special)
    encoded = set(backend.encode(text, add_special_tokens=False).ids)
    matched = [name for name, i in special.items() if i in encoded and i != unknown and len(name) > 1]
    if matched:
        patterns = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in matched)
        split = pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")
        first = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, split])


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each printable character stands for in a byte-level vocabulary.

    A byte whose Latin-1 character is printable is that character; the others are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE = _byte_of_char()


def include_marks(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans that end behind the marks of their last letter, where these are characters of their own.

    Normalization joins a letter and its accents, or the parts of a Korean syllable, to one character, which the library
    finds at the first of them alone."""
    if text.isascii() or not spans:
        return list(spans)
    found = []
    for (begin, end), (following, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        while begin < end < following and (combining(text[end]) or is_joined(text[begin:end], text[end])):
            end += 1
        found.append((begin, end))
    return found


def is_joined(before: str, character: str) -> bool:
    """Return whether normalization joins a character with those before it."""
    return len(normalize("NFC", before + character)) <= len(normalize("NFC", before))


def _readable(token: str) -> str:
    """Return a byte-level token as text: "Ġcaf" -> "▁caf", "Ã" (half of an "é") -> "\\xc3"."""
    if not _BYTE.keys() >= set(token):
        return token  # a word that was added to a vocabulary from elsewhere, which is not in byte-level form
    return bytes(_BYTE[char] for char in token).decode("utf-8", errors="backslashreplace").replace(" ", SPACE)
