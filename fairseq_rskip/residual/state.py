"""What a state dict says of the rule that its parameters belong to, and that it is another rule's."""

import dataclasses
from typing import Any

from torch import nn

SAVED_AS = "was saved with"


class WithRule(nn.Module):
    """A module with ``kind`` and ``options`` that notes them in the metadata of its state dict (beside the keys, which
    stay what they are), and raises torch's ``RuntimeError`` when loaded from that of another rule: parameters of one
    mostly fit another by name and shape. A state without the note, of an earlier version, is loaded as it is.
    """

    def adopt(self, state: dict[str, Any], prefix: str) -> None:
        """Make the state of a related kind, in place, one of this module: names in ``state`` begin with ``prefix``."""

    def rule(self) -> dict[str, Any]:
        """The kind and those of its options that y depends on beside the parameters."""
        fields = [field.name for field in dataclasses.fields(self.options) if field.metadata["in_rule"]]
        return {"kind": self.kind, **{name: getattr(self.options, name) for name in fields}}

    def mismatch(self, noted: dict[str, Any] | None) -> str:
        """What in ``noted``, the :meth:`rule` of a state dict, is another than here; "" where nothing is, or None."""
        own = self.rule()
        if noted is None or own == noted:
            return ""
        names = ["kind"] if own["kind"] != noted.get("kind") else [n for n in own if n in noted and own[n] != noted[n]]
        return ", ".join(f"{name}={noted.get(name)!r}: expected {own[name]!r}" for name in names)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["skip"] = self.rule()

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        found = self.mismatch(metadata.get("skip"))
        if found and not any(SAVED_AS in error for error in errors):  # one line, not one for each block
            errors.append(f"{prefix[:-1] or type(self).__name__} {SAVED_AS} {found}")
        self.adopt(state, prefix)
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
