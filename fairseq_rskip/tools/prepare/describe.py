"""Write DATA-BIN/preparation.json, which training and evaluation read."""

import json
import re
from pathlib import Path
from typing import Any

from fairseq_rskip import files
from fairseq_rskip.errors import UserError

# "| [en] some/train.en: 29000 sents, 412893 tokens, 0.0% replaced (by <unk>)", as fairseq-preprocess logs it
COUNTS = re.compile(r"\[(\S+)\] (.+): (\d+) sents, (\d+) tokens, ([\d.e+-]+)% replaced")
TYPES = re.compile(r"\[(\S+)\] Dictionary: (\d+) types")


def describe(data_bin: Path, facts: str) -> None:
    """Write ``facts``, which are JSON, and what fairseq-preprocess logged in ``data_bin``: ``dictionary_types`` by
    language, and ``splits``, each with its pairs and by language its tokens and unknown words. Raises ``UserError``."""
    known, splits = json.loads(facts), {}
    log = (data_bin / "preprocess.log").read_text(encoding="utf-8")
    log = log.replace("[None]", f"[{known['src']}]")  # as fairseq-preprocess calls the language of a text
    for lang, path, sentences, tokens, unknown in COUNTS.findall(log):
        split: dict[str, Any] = {"pairs": int(sentences), "tokens": {}, "unknown_percent": {}}
        split = splits.setdefault(Path(path).name.rpartition(".")[0], split)
        split["tokens"][lang] = int(tokens)
        split["unknown_percent"][lang] = float(unknown)
    if missing := {"train", "valid", "test"} - splits.keys():
        raise UserError(f"fairseq-preprocess logged no counts for {', '.join(sorted(missing))}")
    types = {lang: int(count) for lang, count in TYPES.findall(log)}
    files.write_json(data_bin / "preparation.json", {**known, "dictionary_types": types, "splits": splits})
