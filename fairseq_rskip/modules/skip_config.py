"""The options of the skip connection, as fairseq reads them from the command line or from hydra."""

import argparse
import functools
import itertools
from dataclasses import field, make_dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_rskip.console import number_or_auto
from fairseq_rskip.errors import UserError
from fairseq_rskip.flags import flag, option_name, selected, settings
from fairseq_rskip.option_error import OptionError, RefusedOption, refused
from fairseq_rskip.residual import KINDS, Place, SkipConnection, create_skip, trial

SETTINGS = settings(KINDS)


def _fields() -> list[Any]:
    """--skip-kind, and every option of every kind; None leaves the kind's own default."""
    kinds = field(
        default="rskip",
        metadata={
            "help": "skip connection (README has each kind's equation); "
            "python -m fairseq_rskip describe ARCH"
        },
    )
    fields = [("skip_kind", ChoiceEnum(list(KINDS)), kinds)]
    for setting in SETTINGS:
        value_type = ChoiceEnum(list(setting.choices)) if setting.choices else setting.type
        if value_type is number_or_auto:
            value_type = str  # hydra has no type for both
        fields.append(
            (
                flag(setting.name),
                Optional[value_type],
                field(default=None, metadata={"help": setting.help}),
            )
        )
    return fields


class _SkipOptions:
    """The skip connection of every residual of the model; each architecture has its defaults."""

    def kind_options(self) -> dict[str, Any]:
        """The options of the kind that are set, by name."""
        values = {setting.name: getattr(self, flag(setting.name)) for setting in SETTINGS}
        for setting in SETTINGS:
            value = values[setting.name]
            if value is None:
                continue
            if setting.choices:
                values[setting.name] = str(value)
            elif setting.type is number_or_auto:
                try:
                    values[setting.name] = number_or_auto(value)
                except argparse.ArgumentTypeError:
                    expected = "a number, or auto"
                    raise refused(option_name(setting.name), value, expected) from None
        return selected(values)

    def build(
        self, dim: int, place: Optional[Place] = None, pre_norm: bool = False
    ) -> SkipConnection:
        """A skip connection over ``dim`` features; ``ValueError`` where the options are invalid."""
        options = {"place": place, "pre_norm": pre_norm, **self.kind_options()}
        return create_skip(str(self.skip_kind), dim, **options)

    def check(self, arch: str, place: Place, pre_norm: str) -> SkipConnection:
        """A skip connection of one feature at ``place``.

        ``pre_norm`` is the option that asks for a norm before the branch, without dashes before it,
        or "". Raises :class:`~fairseq_rskip.errors.UserError` where options contradict each other
        or the architecture.
        """
        build = functools.partial(self.build, place=place, pre_norm=bool(pre_norm))
        chosen = f"--arch {arch} with --skip-kind {self.skip_kind}"
        try:
            with torch.device("cpu"):  # the model may be built without memory, on meta
                trial.try_forward(str(self.skip_kind), functools.partial(build, 8))
            return build(1)
        except OptionError as error:
            spellings = {"pre_norm": pre_norm}
            renamed = error.renamed(lambda name: spellings.get(name, option_name(name)))
            raise RefusedOption(renamed, chosen) from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{chosen}: {error}") from None

    def check_layers(self, arch: str, sides: dict[str, Any]) -> None:
        """Refuse options that leave out layers where the rule cannot do without them.

        These are LayerDrop and --*-layers-to-keep where the kind passes several tensors from layer
        to layer, and --*-layers-to-keep where its constants or norms depend on a layer's number or
        the depth.

        Raises :class:`~fairseq_rskip.errors.UserError`. ``sides`` are parts of a
        ``TransformerConfig``.
        """

        # what depends on a layer's number or on the depth differs between two of these
        places = [
            Place(index=0, depth=1000, sublayers=2),
            Place(index=1, depth=1000, sublayers=2),
            Place(index=1998, depth=2000, sublayers=2),
        ]
        with torch.device("cpu"):  # the model may be built without memory, on meta
            built = [self.build(1, place) for place in places]
            decided = [_decided_by_place(skip) for skip in built]

        if built[1].widths[0] > 1:  # the first layer takes one tensor in every rule
            left_out_by = ("layerdrop", "layers_to_keep")
            reason = "hands several tensors from layer to layer"
        elif any(values != decided[0] for values in decided):
            left_out_by = ("layers_to_keep",)
            reason = "has constants or norms of a layer's number and depth, which change"
        else:
            return
        for (side, layers), name in itertools.product(sides.items(), left_out_by):
            value = getattr(layers, name)
            if value:
                chosen = f"--arch {arch} with --{side}-{name.replace('_', '-')} {value}"
                raise UserError(
                    f"{chosen}: --skip-kind {self.skip_kind} {reason}: expected no such option"
                )


def _decided_by_place(skip: SkipConnection) -> Any:
    """The values and parameters of a skip connection that its place may change."""
    return skip.constants(), skip.drop_rate, skip.pre is None, [*skip.state_dict()]


def check_sizes(name: str, side: Any) -> None:
    """Raise :class:`~fairseq_rskip.errors.UserError` for layers or a width < 1, or for heads that
    do not divide the width.
    """
    sizes = {
        "layers": side.layers,
        "embed-dim": side.embed_dim,
        "ffn-embed-dim": side.ffn_embed_dim,
        "input-dim": getattr(side, "input_dim", 1),  # of a decoder
        "output-dim": getattr(side, "output_dim", 1),
    }
    for option, size in sizes.items():
        if size < 1:
            raise refused(f"{name}-{option}", size, "an integer >= 1")
    if side.attention_heads < 1 or side.embed_dim % side.attention_heads:
        width = {f"{name}-embed-dim": side.embed_dim}
        heads = side.attention_heads
        error = OptionError(f"{name}-attention-heads", heads, "a divisor of the width", width)
        raise RefusedOption(error)


SkipConfig: type[Any] = make_dataclass(
    "SkipConfig",
    _fields(),
    bases=(_SkipOptions, FairseqDataclass),
    namespace={"__doc__": _SkipOptions.__doc__, "__module__": __name__},
)
