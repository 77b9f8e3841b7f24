"""What the tasks share: data, and the checksum of a rule of your own."""

import sys
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools.corpus import NAMES

from .records import Run

RSKIP = [sys.executable, "-m", "fairseq_rskip.tools"]


class Task:
    """What all tasks share.

    ``names`` are data sets. Any other data is a folder, which a command line has after ``prefix``.
    ``meanings`` explains metrics in a report, by name.
    """

    names = NAMES
    prefix = ""
    meanings: dict[str, str] = {}

    def find_data(self, data: str) -> str:
        """``data`` as the training command takes it. Raises ``UserError``."""
        if data in self.names:
            return data
        path = Path(data.removeprefix(self.prefix)).expanduser()
        if not path.is_dir():
            hint = did_you_mean(data, self.names, f"expected one of {', '.join(self.names)}")
            raise UserError(f"no corpus or folder named {data!r}; {hint}, or a folder")
        return f"{self.prefix}{path.resolve()}"

    def data_folder(self, data: str) -> Path:
        """The folder of ``data``; a relative path if it is no folder.

        A run's identity has only its name.
        """
        return Path(data.removeprefix(self.prefix))

    def data_checksum(self, data: str) -> str:
        """What distinguishes the present content of ``data``; "" where the training compares it."""
        return ""

    def check_data(self, data: str) -> None:
        """Raise ``UserError`` for data that a run would refuse only after hours."""

    def scores(self, run: Run) -> dict[str, Any] | None:
        """The evaluation of a trained run: ``values`` by metric, and further entries of a report.

        None if it has not finished.
        """


def own_rule(arch: str, options: dict[str, Any]) -> dict[str, str]:
    """The checksum of the file of the rule that is trained, if it is of your own, for an identity.

    With another text the rule is another one, and is trained again.
    """
    from fairseq_rskip.residual import own_rules

    kind = options.get("skip-kind")
    if kind is None and arch:
        from fairseq_rskip.models import default_kind

        kind = default_kind(arch)
    checksum = own_rules.checksum(str(kind))
    return {"rule": checksum} if checksum else {}
