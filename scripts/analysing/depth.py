"""Stacks of residual blocks at initialisation, with each skip connection, on a CPU in seconds: three panels.

Left, the norm of the loss gradient at each block's output, over that at the last one's, with lambda^(L-l), what He et
al. (2016b, Eq. 8) give for the skip path alone, dotted. Middle, ||F(x)||/||x||. Right, the mean cosine of two tokens in
a stack of self-attention. docs/analysis.md defines the stacks.
"""

import argparse
from pathlib import Path
from typing import Any, Dict, List, Optional

from analysing.columns import aligned
from analysing.progress import progress
from fairseq_rskip.analysis import depth
from fairseq_rskip.analysis.figures import check_stem, label_text, new_figure, save, style, write_csv

TITLES = {
    "gradient": r"gradient norm at block $l$ / at block $L$",
    "branch": r"$\|F(x)\|\,/\,\|x\|$",
    "similarity": "mean cosine of two tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    standard = depth.Settings()
    parser.add_argument("--output", required=True, type=Path, help="the figure's path without its ending")
    for name, kind, text in (
        ("blocks", int, "L, blocks of a stack"),
        ("dim", int, "features"),
        ("gain", float, "||F(x)||/||x|| of a branch without normalisation, in expectation"),
        ("seeds", int, "stacks to average over"),
        ("examples", int, "inputs of each stack to average over"),
        ("tokens", int, "tokens of an example, in the stacks of self-attention"),
    ):
        value = getattr(standard, name)
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{text} (default: {value})")


def run(options: argparse.Namespace) -> None:
    settings = depth.Settings(**{name: getattr(options, name) for name in vars(depth.Settings())})
    stem = check_stem(options.output)
    variants = progress(depth.VARIANTS, len(depth.VARIANTS), "stacks", "variant")
    profiles = depth.measure(settings, variants)
    write_csv(stem.with_name(f"{stem.name}.csv"), depth.rows(profiles, settings))
    save(draw(profiles, settings), stem)
    print(table(profiles, settings))
    print(f"{stem}.png, .pdf and .csv: {settings.blocks} blocks, mean of {settings.seeds} seeds, at initialisation")


def draw(profiles: List[depth.Profile], settings: depth.Settings) -> Any:
    """One panel a quantity, one line a variant, and lambda^(L-l) dotted beside the gradients."""
    figure, axes = new_figure(len(depth.QUANTITIES), width=4.8, height=4.2)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(p.variant.name for p in profiles))}
    for axis, quantity in zip(axes, depth.QUANTITIES):
        for profile in profiles:
            if profile.quantity == quantity:
                look = style(numbers[profile.variant.name])
                every = max(1, len(profile.blocks) // 10)
                axis.plot(profile.blocks, profile.mean, **look, markevery=every, label=label_text(profile.variant.name))
                if quantity == "gradient" and profile.variant.path is not None:
                    path = [profile.variant.path ** (settings.blocks - block) for block in profile.blocks]
                    axis.plot(profile.blocks, path, color="0.45", linestyle=":", marker="", linewidth=2, zorder=1)
        axis.set_xlabel(r"block $l$")
        axis.set_title(TITLES[quantity])
        positive = any(max(p.mean) > 0 for p in profiles if p.quantity == quantity)
        axis.set_yscale("log" if quantity != "similarity" and positive else "linear")
    axes[0].plot([], [], color="0.45", linestyle=":", marker="", linewidth=2, label=r"$\lambda^{L-l}$ (Eq. 8)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    return figure


def table(profiles: List[depth.Profile], settings: depth.Settings) -> str:
    """What the figure shows, in figures."""
    found: Dict[str, Dict[str, depth.Profile]] = {}
    for profile in profiles:
        found.setdefault(profile.variant.name, {})[profile.quantity] = profile
    lines = [
        ["", "gradient,", "rate per", "lambda", "sqrt(lambda^2", "||F||/||x||,", "token"],
        ["", "first / last", "block", "(Eq. 8)", "+ gain^2)", "first .. last", "similarity"],
    ]
    for name, each in found.items():
        gradient, branch, variant = each["gradient"], each["branch"].mean, each["gradient"].variant
        lines.append(
            [
                name,
                f"{gradient.mean[0]:.3g}",
                _number(depth.rate(gradient)),
                _number(variant.path),
                _number(depth.expected_rate(variant, settings.gain)),
                f"{branch[0]:.2g} .. {branch[-1]:.2g}",
                f"{each['similarity'].mean[-1]:.3f}",
            ]
        )
    return aligned(lines)


def _number(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.4g}"
