"""scripts/demo.sh: its corpus of spelled-out numbers, and resuming after an interruption."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_command

pytest.importorskip("num2words")


@pytest.mark.slow
def test_the_demo_resumes_after_ctrl_c_and_fails_where_nothing_was_learned(tmp_path):
    """The real scripts on 300 pairs, which teach nothing. Ctrl-C is for every process of the terminal's foreground."""
    out, printed = tmp_path / "demo out", tmp_path / "printed"
    variables = {"DEMO_DIR": str(out), "DEMO_PAIRS": "300", "DEMO_EPOCHS": "5", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    model, demo = out / "model-300-5", ROOT / "scripts" / "demo.sh"
    how = {"env": {**os.environ, **variables, "PATH": path}, "stderr": subprocess.STDOUT, "start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(printed, "wb") as file, subprocess.Popen([demo], stdout=file, **how) as running:
        deadline = time.time() + 180
        while not (model / "checkpoint2.pt").exists() and running.poll() is None and time.time() < deadline:
            time.sleep(0.02)
        assert "\nepoch 1, " in printed.read_text(encoding="utf-8")  # as it comes, not when it ends
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=60) == 130, printed.read_text(encoding="utf-8")[-2000:]
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)

    resumed = run_command([demo], env=variables)
    assert resumed.returncode == 1 and "BLEU" in resumed.stderr.splitlines()[-1]
    epochs = [int(number) for number in re.findall(r"^epoch (\d+), ", resumed.stdout, re.MULTILINE)]
    assert "Loaded checkpoint" in resumed.stdout and 2 <= epochs[0] <= epochs[-1] == 5
    shown = [line[4:] for line in resumed.stdout.splitlines() if line.startswith("en  ")]
    pairs = {}
    for split, size in {"test": 500, "valid": 500, "train": 300}.items():
        sides = [(out / "corpus-300" / f"{split}.{side}").read_text("utf-8").splitlines() for side in ("en", "vi")]
        assert list(map(len, sides)) == [size, size]
        pairs.update(zip(*sides))
    assert len(pairs) == len(set(pairs.values())) == 1300 and shown == list(pairs)[:10]  # no sentence in two splits

    trained = (model / "checkpoint_last.pt").stat().st_mtime_ns
    again = run_command([demo], env={**variables, "DEMO_LEAST_BLEU": "0"})
    assert again.returncode == 0 and again.stdout.count("up to date") >= 2, again.stderr
    assert (model / "checkpoint_last.pt").stat().st_mtime_ns == trained
