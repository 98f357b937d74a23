"""Errors of one process of several: written to the file from which torch's elastic launcher reads them.

torchrun, and `regard train --nproc-per-node` alike, name a file for each rank in the environment. The launcher of Regard
prints one error for all ranks, so ranks that it started print none themselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's launcher for each rank
LAUNCHED = "REGARD_LAUNCHED"  # set by Regard's launcher, which prints the errors of its ranks


def is_launched() -> bool:
    """Return whether Regard's launcher started this process, and prints its error."""
    return LAUNCHED in os.environ and "LOCAL_RANK" in os.environ


def record_error(message: str, exit_code: int) -> None:
    """Write the error that is being handled to the file of this rank, in torch's form; without torchrun do nothing."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    details = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": details, "errorCode": exit_code}}, file)
    except OSError as error:  # the error itself matters more than that its file cannot be written
        print(f"regard: {path}: {error.strerror}", file=sys.stderr)


def print_error(message: str) -> None:
    """Print an error as one line on stderr, with the rank where there are several; the launcher prints it for its ranks."""
    if is_launched():
        return
    rank = f"rank {os.environ.get('RANK')}: " if "LOCAL_RANK" in os.environ else ""
    print(f"regard: {rank}{message}", file=sys.stderr)
