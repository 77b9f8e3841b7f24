"""How long a training is: its end, its warm-up, and the tokens of an update."""

import math
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.option_error import refused
from fairseq_rskip.tools.corpus import POSITIONS
from fairseq_rskip.tools.recipes import Recipe

MAX_TOKENS = 4096  # in a batch of one GPU, unless the user says otherwise
# the length of a training: if the user gives one of them, both of the recipe's are dropped
LENGTHS = {"max-update", "max-epoch"}
# the schedules of fairseq that do not take a rate for each epoch
WITH_ONE_RATE = {"inverse_sqrt", "cosine", "reduce_lr_on_plateau", "tri_stage", "triangular"}


class Schedule:
    """The end and the warm-up of a training, by ``user_options``, else by the recipe.

    ``end`` is the last of ``unit`` ("updates" or "epochs"), 0 for none; ``patience`` is fairseq's,
    0 for none. ``warm_up`` counts updates. The recipe's warm-up shrinks in proportion to a shorter
    training. It is at most a fifth of the training if only the user counts in updates, and does not
    shrink if only the recipe does. Raises ``UserError`` for a training without an end, and
    for no warm-up where fairseq needs one.
    """

    def __init__(self, recipe: Recipe, user_options: dict[str, Any]):
        self.whole, self.whole_unit = _find_end(recipe.options)
        self.end, self.unit = self.whole, self.whole_unit
        if LENGTHS & user_options.keys():
            self.end, self.unit = _find_end(user_options)
        self.patience = user_options.get("patience", recipe.options.get("patience", 0))
        if self.end == 0 and self.patience <= 0:
            raise UserError("the training has no end: expected --max-update or --max-epoch above 0")

        self.full_warm_up = recipe.options["warmup-updates"]
        self.is_own_warm_up = "warmup-updates" in user_options
        self.warm_up = user_options.get("warmup-updates", self._warm_up_of_recipe())
        scheduler = user_options.get("lr-scheduler", recipe.options["lr-scheduler"])
        rates = user_options.get("lr", [])
        if len(rates) > 1 and scheduler in WITH_ONE_RATE:
            listed = ",".join(map(str, rates))
            raise refused("lr", listed, f"one rate for --lr-scheduler {scheduler}")
        if self.warm_up < 1 and scheduler == "inverse_sqrt":  # fairseq divides by it
            raise refused(
                "warmup-updates", self.warm_up, "1 or more for --lr-scheduler inverse_sqrt"
            )

    def __str__(self) -> str:
        return f"{self.end:,} {self.unit}" if self.end else ""

    def _warm_up_of_recipe(self) -> int:
        share = 1.0
        if self.end and self.unit == self.whole_unit:
            share = min(1.0, self.end / self.whole)
        elif self.end and self.unit == "updates":
            share = min(1.0, self.end / (5 * self.full_warm_up))
        return max(1, round(self.full_warm_up * share))

    def notes(self) -> list[str]:
        """A line where the warm-up is not the recipe's, or is for a training of another unit."""
        is_recipes = self.warm_up == self.full_warm_up and self.unit == self.whole_unit
        if self.is_own_warm_up or is_recipes:
            return []
        whole = f"{self.whole:,} {self.whole_unit}"
        return [f"warm-up: {self.warm_up} updates; the recipe has {self.full_warm_up} for {whole}"]

    def warnings(self) -> list[str]:
        """A line where the warm-up takes more than half of the training."""
        if self.unit == "updates" and 0 < self.end < 2 * self.warm_up:
            return [
                f"the warm-up takes {self.warm_up} of {self.end} updates; "
                "--warmup-updates N changes it"
            ]
        return []


def _find_end(options: dict[str, Any]) -> tuple[int, str]:
    """When a training with ``options`` ends: a number, 0 for never, and "updates" or "epochs"."""
    if options.get("max-update"):
        return options["max-update"], "updates"
    return options.get("max-epoch") or 0, "epochs"


def step_options(target: int, processes: int, user_options: dict[str, Any]) -> dict[str, int]:
    """--max-tokens and --update-freq, whose product with ``processes`` is ``target``.

    The user's values stay. If both are missing, an update has the fewest batches of at most
    ``MAX_TOKENS`` tokens. Returns --max-tokens-valid, too; {} where the user counts sentences.
    """
    size = user_options.get("max-tokens")
    freq = user_options.get("update-freq", [0])[0]
    if user_options.get("batch-size") and not size:
        return {}
    valid = max(size or MAX_TOKENS, POSITIONS)  # the longest held-out sentence fits into a batch
    if not freq and size:
        freq = max(1, round(target / (processes * size)))
    elif not freq:
        freq = math.ceil(target / (processes * MAX_TOKENS))
    size = size or max(1, target // (processes * freq))
    return {"max-tokens": size, "update-freq": freq, "max-tokens-valid": valid}


def tokens_per_step(step: dict[str, int], processes: int, target: int) -> str:
    """A line that explains what ``step_options`` returned."""
    size, freq = step["max-tokens"], step["update-freq"]
    factors = f"{processes} (processes) x {size} (--max-tokens) x {freq} (--update-freq)"
    return f"tokens per step: {factors} = {processes * size * freq}; the recipe's: {target}"
