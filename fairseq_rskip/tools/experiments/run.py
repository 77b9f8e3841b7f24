"""``rskip run FILE``: one YAML file, from its data to its report."""

from . import main as experiments


def main(argv: list[str] | None = None) -> int:
    return experiments.main(argv, prog="rskip run")
