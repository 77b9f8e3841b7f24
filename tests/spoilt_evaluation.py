"""What scripts/evaluate.sh must refuse, for test_evaluate.py: how to spoil data or model, and what the error says."""

import shutil

import torch
from exploits import Call, touch
from training_corpus import lengthen

from fairseq_rskip.safe_load import load_checkpoint


def edit(path, change):
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def without_copies(folder):
    for path in folder.glob("dict.*"):
        path.unlink()


def longer_dictionary(data, folder):
    without_copies(folder)
    for language in ("en", "de"):
        edit(data / f"dict.{language}.txt", lambda text: text + "neu 1\n")


def unsafe(data, folder):
    without_copies(folder)
    torch.save({"model": Call(touch, str(folder / "ran"))}, folder / "checkpoint_best.pt")


def refill(folder, change):
    """Change what checkpoint_best.pt holds."""
    path = folder / "checkpoint_best.pt"
    state = load_checkpoint(path)
    torch.save(change(state) or state, path)


def with_nan(state):
    state["model"]["decoder.layers.0.fc1.weight"][2, 3] = float("nan")


SPOILT = {
    "no preparation.json": (lambda d, m: (d / "preparation.json").unlink(), ["is not prepared", "preparation.json"]),
    "broken preparation.json": (lambda d, m: edit(d / "preparation.json", lambda t: t[:9]), ["cannot read", "json"]),
    "unknown tokenizer": (
        lambda d, m: edit(d / "preparation.json", lambda t: t.replace("moses", "spacy")),
        ["tokenizer 'spacy'", "moses, none"],
    ),
    "no target": (lambda d, m: edit(d / "preparation.json", lambda t: t.replace("tgt", "tr")), ["must give", "tgt"]),
    "no dictionary": (lambda d, m: (d / "dict.de.txt").unlink(), ["dict.de.txt is missing"]),
    "no subset": (lambda d, m: (d / "test.en-de.en.bin").unlink(), ["no subset 'test'", "it has train, valid"]),
    "no references": (lambda d, m: (d / "raw" / "test.de").unlink(), ["no raw references", "test.de is missing"]),
    "references longer": (
        lambda d, m: edit(d / "raw" / "test.de", lambda t: t + "mehr\n"),
        ["test.en-de.en.bin holds 33 sentences", "test.de 34"],
    ),
    "broken index": (
        lambda d, m: (d / "test.en-de.en.idx").write_bytes(b"MMIDIDX"),
        ["cannot read", "test.en-de.en.idx"],
    ),
    "no checkpoint folder": (lambda d, m: shutil.rmtree(m), ["CHECKPOINT-DIR", "is not a folder"]),
    "empty checkpoint folder": (
        lambda d, m: [shutil.rmtree(m), m.mkdir()],
        ["has no checkpoint: it holds nothing", "checkpoint_best.pt"],
    ),
    "only other files": (
        lambda d, m: [path.rename(path.with_suffix(".bak")) for path in m.glob("*.pt")],
        ["has no checkpoint: it holds checkpoint12.bak", "accepted are checkpoint<epoch>.pt"],
    ),
    "other dictionary": (
        lambda d, m: edit(m / "dict.de.txt", lambda t: "neu 9\n" + t.partition("\n")[2]),
        ["another vocabulary", "dict.de.txt differs, symbol 1 is", "'neu' with the checkpoint"],
    ),
    "other dictionary, no copies": (
        longer_dictionary,
        ["another vocabulary", "its encoder embeds", "dict.en.txt makes"],
    ),
    "cut checkpoint": (
        lambda d, m: (m / "checkpoint_best.pt").write_bytes((m / "checkpoint_best.pt").read_bytes()[:999]),
        ["cannot read checkpoint", "truncated"],
    ),
    "long source": (
        lambda d, m: lengthen(d / "test.en-de.en", 18, 1025),
        ["sentence 18 of test has 1025 tokens in its source (en)", "to take 1024", "--max-source-positions 1025"],
    ),
    "long target": (
        lambda d, m: lengthen(d / "test.en-de.de", 33, 2000),
        ["sentence 33 of test has 2000 tokens in its target (de)", "to take 1024", "--max-target-positions 2000"],
    ),
    "NaN checkpoint": (
        lambda d, m: refill(m, with_nan),
        ["checkpoint_best.pt is of no use: decoder.layers.0.fc1.weight holds NaN", "diverged", "checkpoint"],
    ),
    "checkpoint of train_cifar.py": (
        lambda d, m: refill(m, lambda _: {"format": "fairseq_rskip.vision 1", "model": {"w": torch.ones(1)}}),
        ["checkpoint_best.pt is not a fairseq checkpoint: it has no settings", "fairseq_rskip.vision 1", "checkpoint"],
    ),
    "empty checkpoint": (
        lambda d, m: refill(m, lambda state: state["model"].clear()),
        ["checkpoint_best.pt holds an empty model", "checkpoint"],
    ),
    "unsafe checkpoint": (unsafe, ["refused checkpoint", "checkpoint_best.pt"]),
}
