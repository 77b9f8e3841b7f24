"""The file in which an evaluation leaves its scores."""

import json
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError

SCORES = "scores.json"
TRANSLATION = "hyp.txt"  # a line for each sentence, in the order of the subset


def read_scores(folder: Path) -> dict[str, Any]:
    """Return the content of the scores.json that ``rskip evaluate`` wrote to ``folder``.

    Raises ``UserError``.
    """
    try:
        scores = json.loads((folder / SCORES).read_text("utf-8"))
        return {"ref": [], "evaluation": {}, **scores}
    except (OSError, ValueError, TypeError) as error:
        accepted = "expected a file of translations, checkpoints, a folder of rskip evaluate, or "
        accepted += "RUN/seed1 of rskip run"
        problem = f"no readable {SCORES} ({error})"
        if isinstance(error, FileNotFoundError):
            problem = f"neither checkpoints nor {SCORES}"
        raise UserError(f"{folder} has {problem}: {accepted}") from None
