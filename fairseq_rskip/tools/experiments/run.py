"""``rskip run FILE``: one YAML file, from its data to its report."""

from . import main as experiments


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    return experiments.main(argv, prog="rskip run")
