"""The fixed angle beside pre-norm, each at its own learning rate: the registered answers.

``python experiments/angle_rates.py results/angle_rates.csv`` reads the report of
``angle-rates.yaml`` and prints, for each question of docs/depth-history.md ("the language model,
each rule at its own rate"): the difference at each depth by seed with its 95 % interval; whether a
rule has one rate for all depths; whether it gains from depth; whether another rule is ahead of the
fixed angle; what each rule loses from 3 to 48 layers.
"""

from pathlib import Path

import pandas

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.report.reading import Line, by_row, read_report
from fairseq_rskip.tools.report.sweep import listed
from fairseq_rskip.tools.significance import Difference, SeedModel

FIXED_ANGLE = "fixed angle"
PRE_NORM = "pre-norm"
RULES = (PRE_NORM, FIXED_ANGLE)  # of questions 1 to 3
SHALLOW, DEEP = "6 layers", "72 layers"
LEAST, MOST = "3 layers", "48 layers"  # every rule is run from the one to the other
NEIGHBOURS = 2.0  # the factor between neighbouring rates of the sweep
UNLEARNED = 1.0  # bits behind the best rule of a depth: a rule that did not learn
Depths = dict[str, Line]  # depth -> line of the report


def read(path: Path) -> dict[str, Depths]:
    """The lines of each rule. Raises ``UserError`` without the two of questions 1 to 3."""
    rules = by_row(read_report(path))
    for rule in RULES:
        if rule not in rules:
            raise UserError(f"{path}: no row {rule!r} with a result")
    return rules


def better_start(rules: dict[str, Depths]) -> pandas.DataFrame:
    """Question 1: the difference at each depth, by the pair alone."""
    rows = []
    for depth in rules[PRE_NORM]:
        if depth not in rules[FIXED_ANGLE]:
            continue
        lines = {rule: rules[rule][depth] for rule in RULES}
        losses = {rule: line.values for rule, line in lines.items()}
        row = {"depth": depth, "seeds": len(losses[PRE_NORM].keys() & losses[FIXED_ANGLE].keys())}
        for rule, line in lines.items():
            row[rule] = line.mean
            row[f"rate of {rule}"] = listed(line.chosen)
        tested = SeedModel(losses).difference(FIXED_ANGLE, PRE_NORM)
        if tested is not None:
            row |= {"difference": tested.value, "low": tested.low, "high": tested.high}
            row["answer"] = answer(tested, "better", "not better")
        rows.append(row)
    return pandas.DataFrame(rows)


def rates(lines: Depths) -> str:
    """Question 2: whether the chosen rates of a rule are neighbours."""
    chosen = [line.chosen["lr"] for line in lines.values() if "lr" in line.chosen]
    if not chosen:
        return "no rate was swept"
    one = max(chosen) <= NEIGHBOURS * min(chosen) * (1 + 1e-9)
    text = ", ".join(f"{rate:g}" for rate in chosen)
    return f"rates {text}: {'one rate' if one else 'no one rate'} for all depths"


def gain(lines: Depths) -> str:
    """Question 3: whether the deep model has the lower loss with each seed."""
    if SHALLOW not in lines or DEEP not in lines:
        return f"{SHALLOW} or {DEEP} is missing"
    shallow, deep = lines[SHALLOW].values, lines[DEEP].values
    seeds = sorted(shallow.keys() & deep.keys())
    differences = [deep[seed] - shallow[seed] for seed in seeds]
    text = ", ".join(f"{difference:+.3f}" for difference in differences)
    if not differences:
        return f"{DEEP} and {SHALLOW} share no seed"
    gains = all(difference < 0 for difference in differences)
    return f"{DEEP} minus {SHALLOW} {text}: {'gains' if gains else 'does not gain'} from depth"


def answer(difference: Difference, lower: str, higher: str) -> str:
    """``lower`` or ``higher`` where the interval is on that side of 0, otherwise "open"."""
    return {-1: lower, 0: "open", 1: higher}[difference.side]


def beside(baseline: str, rules: dict[str, Depths]) -> pandas.DataFrame:
    """Question 4: each rule minus ``baseline``, rule + seed over the rules of a depth.

    A rule that did not learn there is left out: its seeds scatter little, for want of learning, and
    the model needs residuals of one variance.
    """
    rows = []
    for depth in rules[baseline]:
        here = {rule: lines[depth] for rule, lines in rules.items() if depth in lines}
        means = {rule: line.mean for rule, line in here.items()}
        learned = {rule for rule, mean in means.items() if mean < min(means.values()) + UNLEARNED}
        model = SeedModel({rule: line.values for rule, line in here.items() if rule in learned})
        for rule, mean in means.items():
            row = {"depth": depth, "rule": rule, "loss": mean, "rate": listed(here[rule].chosen)}
            tested = model.difference(rule, baseline) if rule != baseline else None
            if rule not in learned:
                row["answer"] = "did not learn"
            elif tested is not None:
                row |= {f"minus {baseline}": tested.value, "low": tested.low, "high": tested.high}
                row["answer"] = answer(tested, "ahead", "behind")
                as_a_pair = {rule, baseline} & {*model.scattered}
                row["compared"] = "as a pair" if as_a_pair else "by rule + seed"
            rows.append(row)
    return pandas.DataFrame(rows)


def loss_by_depth(lines: Depths) -> str:
    """Question 5: what a rule loses from the fewest layers to the most."""
    if LEAST not in lines or MOST not in lines:
        return f"{LEAST} or {MOST} is missing"
    least, most = lines[LEAST].values, lines[MOST].values
    seeds = sorted(least.keys() & most.keys())
    if not seeds:
        return f"{MOST} and {LEAST} share no seed"
    mean = sum(most[seed] - least[seed] for seed in seeds) / len(seeds)
    return f"{MOST} minus {LEAST} {mean:+.3f} ({len(seeds)} seeds)"


def print_table(table: pandas.DataFrame) -> None:
    filled = table.astype(object).where(table.notna(), None)
    print_line(filled.to_markdown(index=False, floatfmt=".3f", missingval=""))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path)
    rules = read(parser.parse_args().report)
    print_table(better_start(rules))
    print_line("")
    for baseline in (FIXED_ANGLE, PRE_NORM):
        print_table(beside(baseline, rules))
        print_line("")
    for rule, lines in rules.items():
        print_line(f"{rule}: {rates(lines)}")
        print_line(f"{rule}: {gain(lines)}")
        print_line(f"{rule}: {loss_by_depth(lines)}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
