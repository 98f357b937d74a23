"""`regard serve`: a web page and HTTP APIs for models, and `regard serve key`: keys for them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard.cli.options import App, Device, Weights
from regard.errors import RegardError

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")


class RunFirst(TyperGroup):
    """A command group in which `regard serve MODEL` is `regard serve run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


serve_app = App(cls=RunFirst, help="Serve models: a web page and HTTP APIs.", invoke_without_command=True)


def limits(*names: str, help: str) -> Any:
    """Return an option that sets a limit, which help lists in a panel of its own."""
    return typer.Option(*names, help=help, rich_help_panel="Limits")


@serve_app.command("run")
def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders, runs or bundled models, as PATH or NAME=PATH; default: the bundled model."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to use; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to use.")] = 8000,
    keys: Annotated[Path | None, typer.Option(help="Require API keys: a file that `regard serve key` writes.")] = None,
    workers: Annotated[int, typer.Option(help="Decoding processes on a CPU; 0 = one for each core.")] = 0,
    device: Device = "auto",
    weights: Weights = "auto",
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (chain) for HTTPS, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the APIs (CORS); may be repeated.")
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Serve the web page.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Check settings and models, and exit.")] = False,
    timeout: Annotated[float, limits(help="Seconds for one request.")] = 60.0,
    file_timeout: Annotated[float, limits(help="Seconds for one file.")] = 600.0,
    drain: Annotated[float, limits(help="Seconds for requests in progress after SIGTERM.")] = 30.0,
    rate_per_key: Annotated[float, limits(help="Requests a minute of one API key; 0 = no limit.")] = 0.0,
    rate_per_address: Annotated[float, limits(help="Requests a minute of one address; 0 = no limit.")] = 0.0,
    queue_tokens: Annotated[int, limits(help="Tokens that may wait for decoding, for each model.")] = 1 << 16,
    memory_limit: Annotated[
        float, limits(help="GiB of loaded models; those least recently used are unloaded. 0 = no limit.")
    ] = 0.0,
    max_requests: Annotated[int, limits(help="Requests in progress.")] = 128,
    max_body: Annotated[int, limits(help="Bytes of a request.")] = 1 << 20,
    max_file: Annotated[int, limits(help="Bytes of a file to translate.")] = 2 << 20,
    max_buffered: Annotated[int, limits(help="Bytes of all requests in progress.")] = 256 << 20,
    max_texts: Annotated[int, limits(help="Texts of a request.")] = 256,
    max_characters: Annotated[int, limits(help="Characters of a text.")] = 50_000,
    max_alternatives: Annotated[int, limits(help="Alternative translations of a text.")] = 10,
    max_beam: Annotated[int, limits(help="Beam width that a request may ask for.")] = 16,
    max_samples: Annotated[int, limits(help="Samples of a prompt (n).")] = 8,
    max_new_tokens: Annotated[int, limits(help="Tokens that a language model writes.")] = 2_048,
) -> None:
    """Serve models: a web page, and APIs for clients of LibreTranslate, OpenAI and others.

    regard serve

    regard serve runs/gpt en-de-fr-zh --port 8080 --keys keys.txt

    The page is at the address that is printed, a list of all routes at /docs below it. `regard serve key NAME --keys FILE`
    makes an API key.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise RegardError(f"serving needs {', '.join(missing)}: install it with `pip install 'regard[serve]'`")
    from regard.serve.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        keys=keys,
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_origins=tuple(allow_origin or ()),
        page=page,
        device=device,
        weights=weights,
        workers=workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        queue_tokens=queue_tokens,
        memory_limit=round(memory_limit * (1 << 30)) or None,
        timeout=timeout,
        file_timeout=file_timeout,
        drain=drain,
        rate_per_key=rate_per_key,
        rate_per_address=rate_per_address,
        max_requests=max_requests,
        max_body=max_body,
        max_file=max_file,
        max_buffered=max_buffered,
        max_texts=max_texts,
        max_characters=max_characters,
        max_alternatives=max_alternatives,
        max_beam=max_beam,
        max_samples=max_samples,
        max_new_tokens=max_new_tokens,
    )
    from regard.serve.server import check_models, check_settings, is_local, serve

    check_settings(settings)
    store = make_store(model_paths(models or []), settings)
    if check:
        try:
            for name, seconds in check_models(store, store.entries):
                print(f"{name}\t{store.entries[name].task}\t{seconds:.3f} s")
        finally:
            store.close()
        return
    if not is_local(host) and keys is None:
        print(f"regard: anybody who can reach {host} can use this server: --keys FILE requires a key", file=sys.stderr)
    print(settings.url, flush=True)
    serve(settings, store)


def make_store(models: dict[str, Path], settings: Any) -> Any:
    """Return the store of the models to serve."""
    from regard.serve.model_store import ModelStore

    return ModelStore(
        models,
        device=settings.device,
        weights=settings.weights,
        workers=settings.workers,
        queue_tokens=settings.queue_tokens,
        memory_limit=settings.memory_limit,
    )


def model_paths(given: list[str]) -> dict[str, Path]:
    """Return the paths of models by their names: NAME=PATH, or the name of the folder, of runs/NAME/model NAME."""
    from regard.pretrained import DEFAULT

    found: dict[str, Path] = {}
    for text in given or [DEFAULT]:
        name, equals, path = text.partition("=")
        where = Path(path if equals else text)
        parts = [part for part in where.resolve().parts if part != "/"]
        own = parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1] if parts else text
        name = name if equals else own
        if not name or name in found:
            raise RegardError(f"two models cannot both be called {name!r}: name one of them, as in other={where}")
        found[name] = where
    return found


@serve_app.command("key")
def key(
    name: Annotated[str, typer.Argument(help="Name of the key, as logs show it: letters, digits and . _ @ -")],
    keys: Annotated[Path, typer.Option(help="File that the hash of the key is added to.")] = Path("keys.txt"),
) -> None:
    """Make an API key, print it, and add its hash to a key file.

    regard serve key alice --keys keys.txt

    The key is shown once. Remove its line from the file to revoke it; a running server notices that within a second.
    """
    from regard.serve.api_keys import create_key

    print(create_key(keys, name))
    print(f"regard: {keys} has the hash of this key; `regard serve --keys {keys}` requires it", file=sys.stderr)
