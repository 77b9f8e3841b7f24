"""What ``fairseq-train --arch`` says of an architecture before it parses its options.

fairseq parses twice, first to learn the architecture and then with its options added, but
``--help`` already ends the first pass: the options of a model never appear. The plugin adds them to
the parser before that first pass. A misspelt name would be answered with all 900 names of fairseq
and the plugin, a misspelt kind with all kinds; here it is the nearest one.
"""

import argparse
import functools
import sys
from collections.abc import Callable

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY


def wrap_parse_args(
    model_class, unknown: Callable[[str], str], with_nearest_kind: Callable[[str], str]
) -> None:
    """Wrap fairseq's parser: ``--help`` prints the options of the chosen architecture, or of
    ``model_class``; a name that fairseq does not know ends in the message ``unknown(name)``, any
    other mistake in ``with_nearest_kind(message)`` of argparse's message.

    The messages are those of the command line only. Where Python hands over the words, as ``rskip
    train`` does to collect all mistakes, fairseq's own error is raised.
    """
    parse = options.parse_args_and_arch
    if hasattr(parse, "shows_model_options"):
        return

    @functools.wraps(parse)
    def parse_with_help(parser, input_args=None, **kwargs):
        argv = list(sys.argv[1:] if input_args is None else input_args)
        if any(action.dest == "arch" for action in parser._actions):
            arch = _architecture(argv)
            if "-h" in argv or "--help" in argv:
                group = parser.add_argument_group(
                    f"Options of --arch {arch or 'transformer_rskip_ln and its kin'}"
                )
                ARCH_MODEL_REGISTRY.get(arch, model_class).add_args(group)
            elif input_args is None and arch and arch not in ARCH_MODEL_REGISTRY:
                parser.exit(2, f"{parser.prog}: error: {unknown(arch)}\n")
        if input_args is None:
            refuse = parser.error
            parser.error = lambda message: refuse(with_nearest_kind(message))
        return parse(parser, input_args=input_args, **kwargs)

    parse_with_help.shows_model_options = True
    options.parse_args_and_arch = parse_with_help


def _architecture(argv: list[str]) -> str | None:
    """The value of ``--arch``; None without one."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--arch", "-a", nargs="?")
    return chooser.parse_known_args(argv)[0].arch
