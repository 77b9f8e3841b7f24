"""Store the rule in the state dict, and refuse the state of another rule."""

import functools
import logging
from typing import Any

from torch import nn

from . import own_rules

SAVED_AS = "was saved with"
logger = logging.getLogger(__name__)


def check_file(noted: dict[str, Any]) -> str:
    """Warn if a rule in a file of your own was saved when the file was another.

    ``noted`` is a module's part of a state dict's metadata. Returns the file's checksum now, "" for
    a rule of this package.
    """
    saved = noted.get("file", "")
    if not saved:
        return ""
    kind = noted.get("skip", {}).get("kind", "")
    present = own_rules.checksum(kind)
    if present and present != saved:
        _warn_of_file(str(own_rules.file_of(kind)), saved, present)
    return present


def rule_files(state: Any) -> dict[str, str]:
    """Kind -> checksum of its file, of the rules in files of your own that a state dict notes."""
    files = {}
    for noted in getattr(state, "_metadata", {}).values():
        if noted.get("file"):
            files[noted["skip"]["kind"]] = noted["file"]
    return files


@functools.cache  # one line for a model, not one for each block
def _warn_of_file(file: str, saved: str, present: str) -> None:
    logger.warning(
        f"the model was saved with another version of {file} (SHA-256 {saved[:8]}, now "
        f"{present[:8]}): if the equation has changed, the weights do not fit it"
    )


class WithRule(nn.Module):
    """A module that stores its :meth:`rule` in its state dict's metadata.

    Loading the state dict of another rule raises torch's ``RuntimeError``, even if names and shapes
    of the parameters fit. A state without a rule is loaded.
    """

    def upgrade(self, state: dict[str, Any], prefix: str, stored: dict[str, Any] | None) -> None:
        """Convert, in place, the state of a related kind to one of this module.

        The names of this module in ``state`` begin with ``prefix``; ``stored`` is the
        :meth:`rule` that was saved with it, None if there was none.
        """

    def rule(self) -> dict[str, Any]:
        """The kind and those of its options that change the output in evaluation.

        Constants of the place (DeepNorm's λ from the depth) are not among them.
        """
        raise NotImplementedError

    def mismatch(self, stored: dict[str, Any] | None) -> str:
        """The difference between ``stored``, the :meth:`rule` in a state dict, and this module's.

        "" if there is none. An option that only one of the two knows is a difference if the state
        has it: this module cannot do what it asks for.
        """
        own = self.rule()
        if stored is None or own == stored:
            return ""
        if own["kind"] != stored.get("kind"):
            names = ["kind"]
        else:
            names = [name for name in stored if stored[name] != own.get(name, "no such option")]
        differences = []
        for name in names:
            expected = repr(own[name]) if name in own else "no such option"
            differences.append(f"{name}={stored.get(name)!r}: expected {expected}")
        return ", ".join(differences)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            rule = self.rule()
            noted = destination._metadata.setdefault(prefix[:-1], {})
            noted["skip"] = rule
            checksum = own_rules.checksum(rule["kind"])
            if checksum:
                noted["file"] = checksum

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, *strict_and_keys: Any
    ) -> None:
        check_file(metadata)
        errors = strict_and_keys[-1]
        stored = metadata.get("skip")
        difference = self.mismatch(stored)
        # one line for a model, not one for each block
        is_first = not any(SAVED_AS in error for error in errors)
        if difference and is_first:
            errors.append(f"{prefix[:-1] or type(self).__name__} {SAVED_AS} {difference}")
        self.upgrade(state, prefix, stored)
        super()._load_from_state_dict(state, prefix, metadata, *strict_and_keys)
