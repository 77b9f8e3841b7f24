"""From a prepared corpus and a checkpoint folder to a table of scores."""

import hashlib
import shlex
from argparse import Namespace
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import fairseq_rskip
from fairseq_rskip.console import print_line
from fairseq_rskip.files import write_json, write_text
from fairseq_rskip.tools import cached
from fairseq_rskip.tools import score as metrics
from fairseq_rskip.tools.average import average, load_state, save
from fairseq_rskip.tools.evaluate import checkpoints, generation
from fairseq_rskip.tools.evaluate.prepared import (
    PAPER_TOKENISED,
    Prepared,
    check_lengths,
    check_sentences,
    find,
    read_references,
)


def data_identity(prepared: Prepared, subset: str) -> dict[str, str]:
    """The checksum of each file of DATA that decides what is generated."""
    files = [prepared.dictionary(language) for language in (prepared.src, prepared.tgt)]
    files += prepared.binarised(subset)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def translate(options, prepared: Prepared, references: list[str]) -> dict:
    """Have OUT/generate.log made, if it is not there yet; returns what scores.json says about it."""
    taken, which = checkpoints.choose(options.folder, options.average, options.checkpoint)
    print_line(f"== {which}")
    search = generation.search_options(prepared, options.subset, options.beam, options.lenpen, options.max_tokens)
    key = {
        "checkpoints": checkpoints.identity(taken),
        "data": data_identity(prepared, options.subset),
        "options": [*search, f"cpu={options.cpu}", f"fp32={options.fp32}"],
        "versions": {"fairseq": version("fairseq"), "fairseq_rskip": fairseq_rskip.__version__},
    }
    log = options.out / "generate.log"
    if cached.is_made(log, key):
        print_line(f"== translation: up to date ({log})")
    else:
        check_sentences(prepared, options.subset, references)
        checkpoint, limits = ready_checkpoint(options.out, prepared, taken)
        check_lengths(prepared, options.subset, limits, options.max_tokens)
        command = generation.command(prepared, checkpoint, [*search, *generation.position_options(limits)])
        command += generation.device_options(options.cpu, options.fp32)
        print_line(f"== translating {len(references):,} sentences\n{shlex.join(command)}")
        failed = options.out / "generate.failed.log"
        cached.make(log, key, lambda path: generation.run(command, path, len(references), failed))
    about = {"data": str(prepared.folder), "corpus": prepared.corpus, "subset": options.subset, "weights": which}
    return {**about, **key}


def ready_checkpoint(out: Path, prepared: Prepared, taken: list[Path]) -> tuple[Path, tuple[int, int]]:
    """The file to translate with, of DATA's vocabulary, and the lengths that it takes.

    An average is written to ``out``, cached.
    """
    checkpoints.check_dictionaries(prepared, taken[0].parent)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = taken[0]
    if len(taken) > 1:
        checkpoint, key = out / "averaged.pt", {"checkpoints": checkpoints.identity(taken)}
        if not cached.is_made(checkpoint, key):
            cached.make(checkpoint, key, lambda path: save(average(taken), path))
    state = load_state(checkpoint)  # what fairseq could not read is found here, in one line
    checkpoints.check_embeddings(prepared, checkpoint, state["model"])
    return checkpoint, checkpoints.positions(state)


def score(options, prepared: Prepared, hypotheses: list[str], references: list[str], about: dict) -> None:
    """Print the tables and write OUT/scores.json."""
    paths = (options.out / "hyp.txt", [prepared.reference(options.subset)])
    languages = (prepared.tgt, prepared.src)
    rows = metrics.compute(hypotheses, [references], *languages, tokenised=prepared.tokenised)
    title = "detokenised translations against the raw references" if prepared.tokenizer == "moses" else "text as it is"
    plain = detokenised(prepared, hypotheses, references)
    if plain:
        title = "text as published, which is tokenised already"
        if prepared.corpus == PAPER_TOKENISED:
            title += "; tensor2tensor scores this text: its intl rows stand beside the paper's figures"
    result = {**metrics.report(rows, *paths, len(references)), "text": title}
    text = [f"\n{prepared.src}-{prepared.tgt} {options.subset}, {len(references):,} sentences: {title}"]
    text.append(metrics.table(rows))
    if plain:
        title = "both sides detokenised, entities undone: what sacreBLEU expects, not comparable to the paper"
        rows = metrics.compute(*plain, *languages)
        result["detokenised"] = {"text": title, "scores": [asdict(row) for row in rows]}
        text += [f"\n{title}", metrics.table(rows)]
    write_json(options.out / "scores.json", {**result, "evaluation": about})
    text.append(f"\nwritten to {options.out}: generate.log, hyp.tok, hyp.txt, scores.json")
    print_line("\n".join(text))


def detokenised(prepared: Prepared, hypotheses: list[str], references: list[str]) -> list | None:
    """Both sides as plain text, for a corpus published as tokens; None where that changes nothing."""
    if not prepared.tokenised:
        return None
    both = [metrics.detokenise(lines, prepared.tgt) for lines in (hypotheses, references)]
    return None if both == [hypotheses, references] else [both[0], [both[1]]]


def evaluate(options: Namespace) -> None:
    """Do what ``arguments.parse`` read. Raises ``UserError``."""
    prepared = find(options.data)
    references = read_references(prepared, options.subset)
    about = translate(options, prepared, references)
    tokens = generation.hypotheses(options.out / "generate.log", len(references))
    hypotheses = metrics.detokenise(tokens, prepared.tgt) if prepared.tokenizer == "moses" else tokens
    for name, lines in (("hyp.tok", tokens), ("hyp.txt", hypotheses)):
        write_text(options.out / name, "".join(line + "\n" for line in lines))
    score(options, prepared, hypotheses, references, about)
