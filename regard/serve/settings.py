"""The settings of a server: where it is reached, who may use it, and its limits.

Every field is an option of `regard serve` (cli/serve_commands.py). Errors name the option of a limit, so that an operator
who reads one knows what to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from regard.errors import RegardError

KIB, MIB = 1 << 10, 1 << 20
TIMES = ("timeout", "file_timeout", "header_timeout", "body_timeout", "keep_alive", "queue_tokens")  # above 0


@dataclass(frozen=True)
class ServeSettings:
    """Everything that the command line can set. Sizes are numbers of bytes, times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None  # file of hashed API keys; None: no key is needed
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_origins: tuple[str, ...] = ()  # origins whose pages may call the server (CORS)
    page: bool = True  # serve the web page
    device: str = "auto"
    weights: str = "auto"
    workers: int = 0  # decoding processes on a CPU; 0: one for each core
    queue_tokens: int = 1 << 16  # tokens that wait for decoding, for each model
    memory_limit: int | None = None  # of loaded models
    timeout: float = 60.0  # from the arrival of a request to its answer
    file_timeout: float = 600.0  # the same for a file
    drain: float = 30.0  # after SIGTERM, for requests that have begun
    drain_delay: float = 1.0  # after SIGTERM, while new connections are still accepted
    header_timeout: float = 10.0
    body_timeout: float = 20.0
    keep_alive: float = 15.0
    rate_per_key: float = 0.0  # requests a minute of one API key; 0: no limit
    rate_per_address: float = 0.0
    max_requests: int = 128  # in progress at the same time
    max_body: int = MIB
    max_file: int = 2 * MIB
    max_buffered: int = 256 * MIB  # of the bodies of all requests in progress
    max_header_bytes: int = 32 * KIB
    max_headers: int = 100
    max_json_depth: int = 32
    max_texts: int = 256
    max_characters: int = 50_000  # of one text
    max_look_characters: int = 1_000  # of a text that is looked into, where every weight is recorded
    max_alternatives: int = 10
    max_beam: int = 16
    max_samples: int = 8
    max_stop: int = 8
    max_new_tokens: int = 2_048

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise RegardError("TLS needs a certificate and its key: give --tls-cert FILE and --tls-key FILE")
        if not 0 <= self.port < 1 << 16:
            raise RegardError(f"--port must be from 0 to 65535, not {self.port}")
        for name, value in vars(self).items():
            is_limit = name.startswith("max_") or name in TIMES
            if is_limit and value <= 0:
                raise RegardError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
            if name in ("rate_per_key", "rate_per_address", "workers", "drain", "drain_delay") and value < 0:
                raise RegardError(f"--{name.replace('_', '-')} must not be negative: 0 is the least")
        if wrong := [origin for origin in self.allow_origins if "://" not in origin]:
            raise RegardError(f"--allow-origin takes an origin such as https://example.org, not {wrong[0]!r}")

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"

    def numbers(self) -> dict[str, float]:
        """Return the limits that a client may want to know."""
        names = ("max_body", "max_file", "max_texts", "max_characters", "max_look_characters", "max_alternatives")
        return {name: getattr(self, name) for name in (*names, "max_beam", "max_samples", "max_new_tokens", "timeout")}
