"""From a prepared corpus and a folder of checkpoints to a table of scores."""

import shlex
from argparse import Namespace
from dataclasses import asdict
from importlib.metadata import version

import fairseq_rskip
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json, write_text
from fairseq_rskip.pretrained.text import detokenise
from fairseq_rskip.tools import cached
from fairseq_rskip.tools import score as metrics
from fairseq_rskip.tools.corpus import PAPER_TOKENISED, Corpus
from fairseq_rskip.tools.evaluate import generation, weights
from fairseq_rskip.tools.train.save import check_vocabulary


def translate(options: Namespace, corpus: Corpus, references: list[str]) -> dict:
    """Make OUT/generate.log unless it is up to date; returns what scores.json says about it."""
    taken, which = weights.choose(options.folder, options.average, options.checkpoint)
    print_line(f"== {which}")
    search = generation.search_options(corpus, options.subset, options.beam, options.lenpen, options.max_tokens)
    key = {
        "checkpoints": weights.identity(taken),
        "data": corpus.checksums(options.subset),
        "options": [*search, f"cpu={options.cpu}", f"fp32={options.fp32}"],
        "versions": {"fairseq": version("fairseq"), "fairseq_rskip": fairseq_rskip.__version__},
    }
    log = options.out / "generate.log"
    if cached.is_made(log, key):
        print_line(f"== translation: up to date ({log})")
    else:
        check_vocabulary(taken[0].parent, corpus, "name the corpus that it was trained on")
        options.out.mkdir(parents=True, exist_ok=True)
        checkpoint = weights.one_file(taken, options.out / "averaged.pt")
        weights.load_state(checkpoint)  # an unusable one ends in one line here
        count = len(corpus.lengths(options.subset, corpus.source))
        if count != len(references):
            raise UserError(
                f"{corpus.folder} holds {count} binarised sentences of {options.subset}, {len(references)} references"
                f" ({corpus.reference(options.subset)}): prepare the corpus again"
            )
        device = generation.device_options(options.cpu, options.fp32)
        command = generation.command(corpus, checkpoint, [*search, *device])
        print_line(f"== translating {len(references):,} sentences\n{shlex.join(command)}")
        failed = options.out / "generate.failed.log"
        cached.make(log, key, lambda path: generation.run(command, path, len(references), failed))
    about = {"data": str(corpus.folder), "corpus": corpus.name, "subset": options.subset, "weights": which}
    return {**about, **key}


def score(options: Namespace, corpus: Corpus, hypotheses: list[str], references: list[str], about: dict) -> None:
    """Print the tables and write OUT/scores.json."""
    paths = (options.out / "hyp.txt", [corpus.reference(options.subset)])
    languages = (corpus.target, corpus.source)
    rows = metrics.compute(hypotheses, [references], *languages, tokenised=corpus.tokenised)
    title = "detokenised translations against the raw references" if corpus.tokenizer == "moses" else "text as it is"
    plain = [detokenise(lines, corpus.target) for lines in (hypotheses, references)] if corpus.tokenised else None
    two_tables = plain not in (None, [hypotheses, references])
    if two_tables:
        title = "text as published, which is tokenised already"
        if corpus.name == PAPER_TOKENISED:
            title += "; tensor2tensor scores this text: its intl rows stand beside the paper's figures"
    result = {**metrics.report(rows, *paths, len(references)), "text": title}
    text = [f"\n{corpus.source}-{corpus.target} {options.subset}, {len(references):,} sentences: {title}"]
    text.append(metrics.table(rows))
    if two_tables:
        title = "both sides detokenised, entities undone: what sacreBLEU expects, not comparable to the paper"
        rows = metrics.compute(plain[0], [plain[1]], *languages)
        result["detokenised"] = {"text": title, "scores": [asdict(row) for row in rows]}
        text += [f"\n{title}", metrics.table(rows)]
    write_json(options.out / "scores.json", {**result, "evaluation": about})
    text.append(f"\nwritten to {options.out}: generate.log, hyp.tok, hyp.txt, scores.json")
    print_line("\n".join(text))


def evaluate(options: Namespace) -> None:
    """Do what ``arguments.parse`` read. Raises ``UserError``."""
    corpus = Corpus.find(options.data, prepared=True)
    references = corpus.references(options.subset)
    about = translate(options, corpus, references)
    tokens = generation.hypotheses(options.out / "generate.log", len(references))
    hypotheses = detokenise(tokens, corpus.target) if corpus.tokenizer == "moses" else tokens
    for name, lines in (("hyp.tok", tokens), ("hyp.txt", hypotheses)):
        write_text(options.out / name, "".join(line + "\n" for line in lines))
    score(options, corpus, hypotheses, references, about)
