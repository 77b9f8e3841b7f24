"""What rskip evaluate must refuse, for test_evaluate.py.

This says how to spoil data or model, and what the error says.
"""

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


def with_nan(data, folder):
    state = load_checkpoint(folder / "checkpoint_best.pt")
    state["model"]["decoder.layers.0.fc1.weight"][2, 3] = float("nan")
    torch.save(state, folder / "checkpoint_best.pt")


SPOILT = {
    "no preparation.json": (
        lambda d, m: (d / "preparation.json").unlink(),
        ["cannot read", "preparation.json"],
    ),
    "no subset": (
        lambda d, m: (d / "test.en-de.en.bin").unlink(),
        ["no binarised subset 'test'", "has train, valid"],
    ),
    "no references": (
        lambda d, m: (d / "raw" / "test.de").unlink(),
        ["no raw references", "test.de is missing"],
    ),
    "only other files": (
        lambda d, m: [path.rename(path.with_suffix(".bak")) for path in m.glob("*.pt")],
        ["has no checkpoint: it holds checkpoint12.bak", "accepted are checkpoint<epoch>.pt"],
    ),
    "other dictionary": (
        lambda d, m: edit(m / "dict.de.txt", lambda t: "neu 9\n" + t.partition("\n")[2]),
        ["another vocabulary", "dict.de.txt is not that of"],
    ),
    "NaN checkpoint": (
        with_nan,
        [
            "checkpoint_best.pt cannot be used: decoder.layers.0.fc1.weight holds NaN",
            "diverged",
            "checkpoint",
        ],
    ),
    "unsafe checkpoint": (unsafe, ["refused checkpoint", "checkpoint_best.pt"]),
}
