"""Python code for a card: from plain text to a prepared corpus's subwords and back, without
fairseq_rskip. ``fairseq_rskip.pretrained.text`` does the same.

``config`` is config.json of an export in the project's own format.
"""

import json
from typing import Any

from fairseq_rskip.pretrained.text import moses_code

MOSES = "MosesTokenizer({}).tokenize(text, aggressive_dash_splits=True, return_str=True)"
SPLIT = {
    "subword-nmt": 'BPE(open({}, encoding="utf-8")).process_line(text).split()',
    "sentencepiece": "SentencePieceProcessor(model_file={}).encode(text, out_type=str)",
    "none": "text.split()",
}
JOINED = {
    "subword-nmt": '(" ".join(pieces) + " ").replace("@@ ", "").rstrip()',
    "sentencepiece": '"".join(pieces).replace("\\u2581", " ").strip()',
    "none": '" ".join(pieces)',
}
IMPORTS = {
    "subword-nmt": "from subword_nmt.apply_bpe import BPE\n",
    "sentencepiece": "from sentencepiece import SentencePieceProcessor\n",
    "none": "",
}


def imports(config: dict[str, Any]) -> str:
    """The imports of the lines below."""
    lines = IMPORTS[config["bpe"]]
    if config["tokenizer"] == "moses":
        classes = "MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer"
        return f"from sacremoses import {classes}\n{lines}"
    return lines


def split(config: dict[str, Any]) -> str:
    """Code that makes the list ``pieces`` of ``text``, a line of plain text."""
    language = json.dumps(moses_code(config["source"]))
    lines = []
    if config["tokenizer"] == "moses":
        if config["normalise_punctuation"]:
            lines.append(f"text = MosesPunctNormalizer({language}).normalize(text)")
        lines.append(f"text = {MOSES.format(language)}")
    file = json.dumps(f"DIR/{config['subwords'].get(config['source'])}")
    lines.append(f"pieces = {SPLIT[config['bpe']].format(file)}")
    return "\n".join(lines)


def joined(config: dict[str, Any]) -> str:
    """An expression: ``pieces`` as plain text."""
    text = JOINED[config["bpe"]]
    if config["tokenizer"] == "moses":
        language = json.dumps(moses_code(config["source"]))
        return f"MosesDetokenizer({language}).detokenize(({text}).split())"
    return text
