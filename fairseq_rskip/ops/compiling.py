"""What torch.compile evaluates once."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_while_compiling(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function``: torch.compile calls it once, while it compiles, and takes the result
    as a constant instead of breaking the graph.

    ``torch.compiler.assume_constant_result`` sets the same mark, but imports torch._dynamo, which
    takes a second.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such attribute)
    return function
