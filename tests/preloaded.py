"""`regard` commands that start in milliseconds: a process that has imported everything forks one for each command.

Pages of documentation have some three hundred commands, and two seconds of each are imports of torch. `command_folder`
starts the process and returns a folder to put first in PATH. Its `regard` is a program that sends its arguments, folder,
environment and open files through a socket, passes signals on, and ends as the forked command does.

Since everything is imported, such a command does not notice an import that is missing. Tests of the wheel and of the command
line, and the README, run real processes.
"""

# ruff: noqa: SIM115 (files stay open until a command ends)
from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
server.sendall(message)
answers = server.makefile("r")
process = int(answers.readline())
for kind in (signal.SIGINT, signal.SIGTERM):
    signal.signal(kind, lambda kind, frame: os.kill(process, kind))
code = answers.readline()
sys.exit(int(code or 1))
"""


PROCESSES: list[subprocess.Popen[bytes]] = []  # their stdin stays open as long as this process lives


def command_folder(folder: Path) -> Path:
    """Start the process, which ends with this one, and return a folder with a program `regard`."""
    address, program = folder / "socket", folder / "bin" / "regard"
    program.parent.mkdir()
    program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    process = subprocess.Popen([sys.executable, __file__, str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    PROCESSES.append(process)
    assert process.stdout
    assert process.stdout.readline(), "the process that forks commands did not start"
    return program.parent


def main(address: str) -> None:
    """Import what commands import, and answer them until stdin is closed."""
    import regard

    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        if not module.name.endswith(("__main__", "_numba", "_triton")):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(module.name)
    server = socket.create_server(address, family=socket.AF_UNIX, backlog=64)  # type: ignore[arg-type]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these processes
    print("ready", flush=True)
    while server in select.select([server, sys.stdin], [], [])[0]:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            answer(client)
        client.close()


def answer(client: socket.socket) -> None:
    """Fork a command, wait for it, and send its process number and its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files = socket.recv_fds(client, 8, 3)[:2]
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        message += client.recv(1 << 16) or sys.exit("a command sent half a message")
    words, folder, environment = json.loads(message)
    process = os.fork()
    if process == 0:
        client.close()
        run(words, folder, environment, files)
    client.sendall(f"{process}\n".encode())
    threading.Thread(target=end_with, args=(client, process), daemon=True).start()
    for file in (0, 1, 2, *files):  # the reader of a pipe waits until all writers have closed it
        os.close(file)
    status = os.waitpid(process, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    os._exit(0)


def end_with(client: socket.socket, process: int) -> None:
    """Kill a command when the program that asked for it is gone, for example after a test's time limit."""
    if not client.recv(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def run(words: list[str], folder: str, environment: dict[str, str], files: Any) -> None:
    """Be the command `regard WORDS`."""
    for to, file in enumerate(files):
        os.dup2(file, to)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["regard", *words]
    from regard.cli.main import main

    code: Any = 1
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    with contextlib.suppress(OSError):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
