"""Join the published parts of one split into PREFIX.SRC and PREFIX.TGT, one sentence a line.

A part is a prefix, too: PART.SRC and PART.TGT, plain or gzip (PART.SRC.gz), or WMT SGML (PART-src.SRC.sgm and
PART-ref.TGT.sgm); or it is the two files of --files. Both files of a part have as many sentences.
"""

import html
import os
import re
import sys
from collections.abc import Iterator

from fairseq_rskip.console import Parser
from fairseq_rskip.errors import RESUME, UserError, exit_status
from fairseq_rskip.tools import lines

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.I)


def find(part: str, lang: str, role: str) -> str:
    """The file of ``part`` in ``lang``; ``role`` is src or ref. Raises ``UserError`` naming all that would do."""
    names = [f"{part}.{lang}", f"{part}.{lang}.gz", f"{part}-{role}.{lang}.sgm"]
    for name in names:
        if os.path.isfile(name):
            return name
    raise UserError(f"none of these files exists: {', '.join(names)}")


def published(path: str) -> Iterator[str]:
    """The sentences of one published file; a carriage return at a line's end is not part of them."""
    if not path.endswith(".sgm"):
        return (line.rstrip("\r") for line in lines.read(path))
    return (html.unescape(text).strip() for line in lines.read(path) for text in SEGMENT.findall(line))


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("prefix", help="where the two files go, without the language")
    parser.add_argument("--src", required=True)
    parser.add_argument("--tgt", required=True)
    parser.add_argument("--files", nargs=2, action="append", default=[], metavar=("SOURCE", "TARGET"))
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args(argv)
    source, target = f"{options.prefix}.{options.src}", f"{options.prefix}.{options.tgt}"
    found = [(find(part, options.src, "src"), find(part, options.tgt, "ref")) for part in options.parts]
    with lines.writing(source) as source_file, lines.writing(target) as target_file:
        for names in (*options.files, *found):
            for source_line, target_line in lines.paired(*map(published, names), names):
                source_file.write(source_line + "\n")
                target_file.write(target_line + "\n")


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
