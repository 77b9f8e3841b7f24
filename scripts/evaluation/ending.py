"""How evaluate.sh and score.py end: what goes wrong is one line on standard error."""

import os
import sys
from typing import Callable

from evaluation.text import InputError

PIPE_CLOSED = 141  # as a shell reports SIGPIPE


def run(work: Callable[[], None]) -> int:
    """Do ``work``; returns the exit status. Raises only what is a mistake of ours."""
    try:
        work()
        sys.stdout.flush()
    except InputError as error:
        return _fail(str(error))
    except BrokenPipeError:  # whoever reads our output has seen enough, as `| head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return PIPE_CLOSED
    except OSError as error:
        return _fail(f"{error.filename or 'a file'}: {error.strerror or error}")
    except ValueError as error:  # a UserError, whose module takes seconds to import
        if not getattr(error, "one_line_for_user", False):
            raise
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; the next run goes on from what is complete")
        return 130
    return 0


def _fail(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 1
