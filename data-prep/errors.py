"""How the tools of this folder fail: one line on stderr, exit status 1."""

import sys


class UserError(Exception):
    """Something that the user can mend; the message says what was wrong and what is accepted."""


def status_of(main, place="a file"):
    """Call ``main()``; returns the exit status. Errors of the user, or of the disk at ``place``, become one line."""
    try:
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or place}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 1


def run(main):
    """End the process with ``main()``'s status."""
    sys.exit(status_of(main))
