"""What rskip evaluate must refuse, for test_evaluate.py: how to spoil data or model, and what the error says."""

import torch
from exploits import Call, touch

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
    "no preparation.json": (lambda d, m: (d / "preparation.json").unlink(), ["cannot read", "preparation.json"]),
    "no target": (lambda d, m: edit(d / "preparation.json", lambda t: t.replace("tgt", "tr")), ["must give", "tgt"]),
    "no dictionary": (lambda d, m: (d / "dict.de.txt").unlink(), ["is no data-bin of a language pair: it lacks"]),
    "no subset": (lambda d, m: (d / "test.en-de.en.bin").unlink(), ["no binarised subset 'test'", "has train, valid"]),
    "no references": (lambda d, m: (d / "raw" / "test.de").unlink(), ["no raw references", "test.de is missing"]),
    "references longer": (
        lambda d, m: edit(d / "raw" / "test.de", lambda t: t + "mehr\n"),
        ["33 binarised sentences of test, 34 references"],
    ),
    "broken index": (lambda d, m: (d / "test.en-de.en.idx").write_bytes(b"MMIDIDX"), ["cannot read", "en.idx"]),
    "only other files": (
        lambda d, m: [path.rename(path.with_suffix(".bak")) for path in m.glob("*.pt")],
        ["has no checkpoint: it holds checkpoint12.bak", "accepted are checkpoint<epoch>.pt"],
    ),
    "other dictionary": (
        lambda d, m: edit(m / "dict.de.txt", lambda t: "neu 9\n" + t.partition("\n")[2]),
        ["another vocabulary", "dict.de.txt is not that of"],
    ),
    "NaN checkpoint": (
        lambda d, m: refill(m, with_nan),
        ["checkpoint_best.pt cannot be used: decoder.layers.0.fc1.weight holds NaN", "diverged", "checkpoint"],
    ),
    "checkpoint of train_cifar.py": (
        lambda d, m: refill(m, lambda _: {"format": "fairseq_rskip.vision 1", "model": {"w": torch.ones(1)}}),
        ["checkpoint_best.pt is not a fairseq checkpoint: it has no settings", "checkpoint"],
    ),
    "unsafe checkpoint": (unsafe, ["refused checkpoint", "checkpoint_best.pt"]),
}
