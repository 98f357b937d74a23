"""API keys: random strings of which the server keeps only the hashes.

The key file has a line for each key, `NAME HASH`, the hash being the hexadecimal SHA-256 of the key. A key has 256 random
bits, so a plain hash of it cannot be searched for, as that of a password could. A line that begins with # is a comment. A
key is revoked by removing its line; the server reads the file again when it changes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

from regard.errors import RegardError
from regard.files import read_text

PREFIX = "regard-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
RELOAD_SECONDS = 1.0  # at most this long after a change of the file, it is read again
LONGEST_KEY = 512


def hash_key(key: str) -> str:
    """Return what the key file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def create_key(path: Path, name: str) -> str:
    """Return a new key, and append its name and hash to the key file, which only its owner can read."""
    if not NAME.fullmatch(name):
        raise RegardError(f"the name of a key has letters, digits and . _ @ -, not {name!r}")
    known = read_keys(path) if path.exists() else {}
    if name in known:
        raise RegardError(f"{path} has a key named {name}: remove its line to revoke that key, or choose another name")
    key = PREFIX + secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write(f"{name} {hash_key(key)}\n")
    return key


def read_keys(path: Path) -> dict[str, str]:
    """Return the hash of each key of a key file by its name."""
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not re.fullmatch("[0-9a-f]{64}", words[1]):
            raise RegardError(
                f"{path}:{number} is not `NAME SHA256`: `regard serve key NAME --keys {path}` makes a line"
            )
        if words[0] in found:
            raise RegardError(f"{path}:{number} has the name {words[0]} again: names of keys are unique")
        found[words[0]] = words[1]
    return found


class KeyRing:
    """The keys of a server, which are read again when their file changes."""

    def __init__(self, path: Path) -> None:
        """Read a key file; one without a key is an error, since nobody could use the server."""
        self.path = path
        self._hashes = read_keys(path)
        if not self._hashes:
            raise RegardError(f"{path} has no key: `regard serve key NAME --keys {path}` makes one")
        self._stamp, self._checked = self._file_stamp(), time.monotonic()

    def name_of(self, key: str) -> str | None:
        """Return the name of a key, or None for one that is not known.

        The hash is compared with those of all keys, each in constant time, so that the time tells nothing."""
        self._reload()
        given, found = hash_key(key[:LONGEST_KEY]), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(given, known):
                found = name
        return found

    def _file_stamp(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size

    def _reload(self) -> None:
        """Read the file again if it has changed. A file that cannot be read leaves the keys as they are."""
        if time.monotonic() - self._checked < RELOAD_SECONDS:
            return
        self._checked = time.monotonic()
        try:
            stamp = self._file_stamp()
            if stamp != self._stamp:
                self._hashes, self._stamp = read_keys(self.path), stamp
        except (OSError, RegardError):
            return


def key_in_headers(headers: dict[str, str]) -> str | None:
    """Return the key in the headers of a request: a bearer token, the password of basic authorization, or X-API-Key."""
    scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return ""
    return headers.get("x-api-key")
