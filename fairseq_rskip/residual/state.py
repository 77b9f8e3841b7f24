"""State dicts: the rule that they belong to, and what earlier versions named otherwise."""

from typing import Any

from torch import nn

SAVED_AS = "was saved with"
RENAMED = {"pre_norm.": "pre.", "branch_norm.": "branch.", "norms.": "post."}  # names of earlier versions


def upgrade_scalars(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give parameters that earlier versions saved without a dimension shape ``(1,)``, in place."""
    for name, parameter in module.named_parameters():
        value = state.get(f"{prefix}{name}")
        if value is not None and value.dim() == 0 and parameter.dim() == 1:
            state[f"{prefix}{name}"] = value.reshape(1)


class WithRule(nn.Module):
    """A module that stores its :meth:`rule` in its state dict's metadata. Loading the state dict of another rule raises
    torch's ``RuntimeError``, even if names and shapes of the parameters fit. A state without a rule is loaded.
    """

    def upgrade(self, state: dict[str, Any], prefix: str) -> None:
        """Convert, in place, the state of an earlier version or a related kind to one of this module, whose names in
        ``state`` begin with ``prefix``."""
        for name in [name for name in state if name.startswith(prefix)]:
            for before, now in RENAMED.items():
                if name.startswith(prefix + before):
                    state[prefix + now + name[len(prefix + before) :]] = state.pop(name)
        upgrade_scalars(self, state, prefix)

    def rule(self) -> dict[str, Any]:
        """The kind and those of its options that change the output in evaluation. Constants of the place (DeepNorm's λ
        from the depth) are not among them."""
        raise NotImplementedError

    def mismatch(self, noted: dict[str, Any] | None) -> str:
        """The difference between ``noted``, the :meth:`rule` in a state dict, and this module's; "" for none."""
        own = self.rule()
        if noted is None or own == noted:
            return ""
        names = ["kind"] if own["kind"] != noted.get("kind") else [n for n in own if n in noted and own[n] != noted[n]]
        return ", ".join(f"{name}={noted.get(name)!r}: expected {own[name]!r}" for name in names)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {})["skip"] = self.rule()

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *strict_and_keys: Any) -> None:
        errors = strict_and_keys[-1]
        difference = self.mismatch(metadata.get("skip"))
        if difference and not any(SAVED_AS in error for error in errors):  # one line, not one for each block
            errors.append(f"{prefix[:-1] or type(self).__name__} {SAVED_AS} {difference}")
        self.upgrade(state, prefix)
        super()._load_from_state_dict(state, prefix, metadata, *strict_and_keys)
