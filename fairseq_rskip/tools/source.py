"""A MODEL on a command line; errors in its settings or weights name it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..errors import UserError
from ..safe_load import CheckpointError, diverged


class Source(NamedTuple):
    """One MODEL of the command line: a checkpoint, or a fresh network.

    ``path`` is the checkpoint's and ``state`` its content, of a ResNet's alone (fairseq reads those
    of Transformers). ``fresh`` has the options of a fresh network, else nothing.
    """

    label: str
    path: str = ""
    state: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    fresh: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.label} ({self.path or 'fresh:' + ' '.join(self.fresh)})"


def fit(model: nn.Module, weights: dict[str, Tensor], source: Source) -> None:
    """Load ``weights`` into ``model``.

    Raises ``CheckpointError`` unless they fit and are finite.
    """
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{source} does not fit its settings and the data: {reason}"
        ) from None
    bad = next((name for name, value in weights.items() if diverged(name, value)), None)
    if bad is not None:
        raise CheckpointError(
            f"{source} has values in {bad} that are not finite: its training diverged"
        )


def parsed(source: Source, parse: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``parse(*arguments)``; an error of its own names the model.

    Its ``UsageError``, too, becomes a plain ``UserError``: the words are part of the model's name.
    A help text, after which argparse ends the program, is refused.
    """
    try:
        return parse(*arguments)
    except SystemExit:
        raise UserError(f"{source}: expected options that change the model, not -h") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
