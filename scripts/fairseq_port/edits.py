"""Edits of Python source by syntax tree: find a node, replace the bytes it spans, keep everything else as it was."""

import ast
import warnings
from typing import Iterable, Iterator, List, NamedTuple, Type


class Edit(NamedTuple):
    """Replace ``source[start:end]`` by ``text``; ``counts`` is False for a helper edit such as an added import."""

    start: int
    end: int
    text: str
    counts: bool = True


class Source:
    """A parsed module. Offsets are in bytes, because that is what ``ast`` reports."""

    def __init__(self, data: bytes):
        self.data = data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python complains here about the escapes that a rule repairs
            self.tree = ast.parse(data)
        self._line_start = [0]
        for line in data.splitlines(keepends=True):
            self._line_start.append(self._line_start[-1] + len(line))

    def nodes(self, kind: Type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

    def start(self, node: ast.AST) -> int:
        return self._line_start[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self._line_start[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def add_keyword(self, call: ast.Call, text: str) -> Edit:
        """Append ``text`` as the last argument of ``call``."""
        inside = self.data[self.start(call) : self.end(call) - 1].rstrip()
        position = self.start(call) + len(inside)
        if b"#" in inside.rsplit(b"\n", 1)[-1]:
            raise ValueError(f"line {call.lineno}: a comment stands where the new argument would go")
        separator = "" if inside.endswith(b"(") else " " if inside.endswith(b",") else ", "
        return Edit(position, position, separator + text)


def apply_edits(data: bytes, edits: Iterable[Edit]) -> bytes:
    """``data`` with all edits made; raises ValueError when two of them overlap."""
    parts: List[bytes] = []
    position = 0
    for edit in sorted(edits):
        if edit.start < position:
            raise ValueError(f"two edits overlap at byte {edit.start}")
        parts += [data[position : edit.start], edit.text.encode()]
        position = edit.end
    return b"".join(parts) + data[position:]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a Name or a chain of Attributes, else the empty string."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""
