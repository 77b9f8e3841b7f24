"""The steps of data-prep/common.sh: ``python -m fairseq_rskip.tools.prepare STEP WORD ...``; no torch, no fairseq."""

import sys
from pathlib import Path

from fairseq_rskip.errors import RESUME, exit_status
from fairseq_rskip.tools.prepare import subwords, text


def documents(source: str, ends: str, held_out: str, *targets: str) -> None:
    """Draw a text's documents."""
    text.draw_documents(Path(source), [*map(Path, targets)], float(held_out or 0), ends)


def encode(kind: str, source: str, target: str, model: str, normalise: str, language: str, workers: str, *names: str):
    """Encode files of a folder."""
    options = {"lang": language, "normalise_punctuation": bool(normalise), "model": Path(model)}
    text.encode(kind, Path(source), Path(target), names, int(workers or text.all_cores()), **options)


def learn(kind: str, size: str, model: str, *texts: str) -> None:
    """Learn subwords from training text."""
    subwords.LEARNERS[kind]([*map(Path, texts)], Path(model), int(size))


def filter_pairs(max_length: str, max_ratio: str, *paths: str) -> None:
    """Drop training pairs of impossible lengths."""
    files = [*map(Path, paths)]
    text.filter_pairs(files[:2], files[2:], int(max_length), float(max_ratio))


STEPS = {"files": text.join, "parts": text.join_parts, "documents": documents, "encode": encode, "learn": learn}
STEPS |= {"filter": filter_pairs, "describe": text.describe}

if __name__ == "__main__":
    sys.exit(exit_status(lambda: STEPS[sys.argv[1]](*sys.argv[2:]), RESUME))
