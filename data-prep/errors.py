"""How the tools of this folder fail: one line on stderr, exit status 1."""

import os
import sys


class UserError(Exception):
    """Something that the user can mend; the message says what was wrong and what is accepted."""


def run(main):
    """Call ``main()`` and end the process with its status; errors of the user or the disk become one line."""
    try:
        status = main()
    except UserError as error:
        status = f"error: {error}"
    except OSError as error:
        where = f" ({os.fspath(error.filename)})" if error.filename is not None else ""
        status = f"error: {error.strerror or error}{where}"
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
