"""Run fairseq's commands without their three seconds of imports.

A server imports fairseq once and forks for each command. What a command does, prints and ends with
is as in a fresh process. Run as a program, this file is the server: it reads one JSON object per
line, and answers the exit status of the command in it. The command ``python-with-fairseq PROGRAM``
runs a Python program.
"""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_server = None  # the one server of this test process


def serves(args):
    """Return whether the command is one of fairseq's that leaves a GPU alone.

    A forked process cannot use a GPU.
    """
    known = {
        "--cpu",
        "common.cpu=true",
        "fairseq-preprocess",
        "fairseq-score",
        "python-with-fairseq",
    }
    return "fairseq" in str(args[0]) and not known.isdisjoint(map(str, args))


def run(args, environment, timeout, cwd=None, input=""):
    """What ``subprocess.run`` gives, output as text, for a command that ``serves`` accepts."""
    global _server
    args = [str(arg) for arg in args]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")]
        Path(files[0]).write_text(input, encoding="utf-8")
        if _server is None or _server.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            _server = subprocess.Popen(
                [sys.executable, __file__], env=environment, start_new_session=True, **pipes
            )
        request = {
            "args": args,
            "cwd": str(cwd or os.getcwd()),
            "environment": environment,
            "files": files,
        }
        print(json.dumps(request), file=_server.stdin, flush=True)
        if not select.select([_server.stdout], [], [], timeout)[0]:
            os.killpg(_server.pid, signal.SIGKILL)
            _server.wait()
            raise subprocess.TimeoutExpired(args, timeout)
        status = int(_server.stdout.readline())
        return subprocess.CompletedProcess(
            args, status, *(Path(name).read_text("utf-8") for name in files[1:])
        )


def execute(args, cwd, environment, files):
    """Become the process of the command; never returns."""
    for descriptor, name in enumerate(files):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = args
    status = 0
    try:
        if args[0] == "python-with-fairseq":
            exec(args[1], {"__name__": "__main__"})
        else:
            importlib.import_module(
                "fairseq_cli." + args[0][len("fairseq-") :].replace("-", "_")
            ).cli_main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in (
        "fairseq_cli.train",
        "fairseq_cli.generate",
        "torch._dynamo",
    ):  # the last, when an optimizer is made
        importlib.import_module(module)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            execute(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
