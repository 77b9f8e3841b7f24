"""What several test files share.

That is commands in processes of their own, and small corpora with models trained on them.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import fairseq_server
import pytest
import torch

if threading.current_thread() is threading.main_thread():
    # a shell's background job ignores Ctrl-C, and so would every command that is tested with it
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
# commands that are given a HOME of their own find the operator that is built already
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
LETTERS = "abcdefghij"
SIZES = {"train": 600, "valid": 60, "test": 40}


def skip_lines(path):
    """Update -> tag -> value of a file ``skips.jsonl``."""
    return {
        values.pop("step"): values
        for values in map(json.loads, path.read_text("utf-8").splitlines())
    }


def unpack(archive, folder):
    """Unpack one of the project's archives; Python 3.11.2, that of Debian 12, has no filters."""
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **safely)


def run_command(args, timeout=300, env=None, **options):
    """Run ``args`` and return the CompletedProcess, stdout and stderr as text.

    A bare tool name means this venv's. The repository is importable, one thread computes (the sizes
    here gain nothing from more), ``env`` adds variables.
    """
    bin_dir = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": bin_dir + os.pathsep + os.environ.get("PATH", ""),
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    environment.update(env or {})
    args = [str(arg) for arg in args]
    if fairseq_server.serves(args):
        return fairseq_server.run(args, environment, timeout, **options)
    if (Path(bin_dir) / args[0]).is_file():
        args[0] = str(Path(bin_dir) / args[0])
    return subprocess.run(
        args,
        env=environment,
        timeout=timeout,
        encoding="utf-8",
        capture_output=True,
        check=False,
        **options,
    )


def run_checked(args, **options):
    """Call ``run_command`` for a command that must succeed.

    Returns stdout and stderr, one after the other.
    """
    done = run_command(args, **options)
    assert done.returncode == 0, (
        f"{args[0]} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def same_threads():
    """Scripts that a test calls may set the number of threads, on which the last bits of a later
    test's training depend.
    """
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def operators(monkeypatch):
    """Chooses a value of RSKIP_OPS as if the process had started with it."""

    def choose(name):
        monkeypatch.setenv("RSKIP_OPS", name)
        monkeypatch.setattr("fairseq_rskip.ops.dispatch._backends", {})

    return choose


@pytest.fixture(scope="session")
def built_operator():
    from fairseq_rskip.ops import cpu

    try:
        return cpu.load(build_it=True)
    except ValueError as error:
        pytest.skip(f"no CPU operator here: {error}")


@pytest.fixture
def cpu_operator(built_operator, operators):
    """The C++ operator computes, whatever RSKIP_OPS the tests run under."""
    operators("cpu")


@pytest.fixture
def stock_operators(operators):
    """Let skip connections compute as with RSKIP_OPS=torch.

    There λ = 1 is stock fairseq's skip bit for bit.
    """
    operators("torch")


@pytest.fixture
def float64_casts(monkeypatch):
    """Let ``x.float()`` convert to float64, for other authors' code that always computes in fp32.

    The package calls it only for fp16 and bf16.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture
def exact_attention(monkeypatch):
    """Let fairseq's attention compute in the model's own type.

    Its softmax computes in float32 even in a float64 model, which makes a sentence depend on its
    padding at 1e-7, more or less by the processor's vector width.
    """
    monkeypatch.setattr("fairseq.utils.softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))


@pytest.fixture(scope="session")
def raw_corpus(tmp_path_factory):
    """Write {train,valid,test}.{src,tgt}: 600, 60 and 40 pairs of letters.

    A target is its source read backwards.
    """
    folder, rng = tmp_path_factory.mktemp("raw"), random.Random(1)
    for split, count in SIZES.items():
        sentences = [[rng.choice(LETTERS) for _ in range(rng.randint(2, 8))] for _ in range(count)]
        for suffix, step in (("src", 1), ("tgt", -1)):
            lines = (" ".join(sentence[::step]) + "\n" for sentence in sentences)
            (folder / f"{split}.{suffix}").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(raw_corpus, tmp_path_factory):
    """Binarise the same corpus, with a joined dictionary.

    That is what fairseq's commands take as data.
    """
    data = tmp_path_factory.mktemp("corpus") / "data-bin"
    command = [
        "fairseq-preprocess",
        "-s",
        "src",
        "-t",
        "tgt",
        "--joined-dictionary",
        "--destdir",
        data,
    ]
    run_checked(
        [*command, *(word for split in SIZES for word in (f"--{split}pref", raw_corpus / split))]
    )
    return data


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """--data of a folder of 12 training and 12 test images in three classes."""
    from vision_helpers import write_folder

    return f"imagefolder:{write_folder(tmp_path_factory.mktemp('ảnh nhỏ') / 'set')}"


@pytest.fixture(scope="session")
def whole(tmp_path_factory, images):
    """The folder of a run of train_cifar that nothing interrupts."""
    from vision_helpers import train

    output = tmp_path_factory.mktemp("whole") / "run"
    assert train(None, output, images)[0] == 0
    return output / "seed1"


@pytest.fixture(scope="session")
def stopped(tmp_path_factory, images):
    """The output of a run that was stopped after 3 of 6 iterations, its checkpoint there."""
    from vision_helpers import stop_at, train

    output = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch, stop_at(patch, 3):
        assert train(None, output, images, save_interval=1)[0] == 130
    return output


@pytest.fixture
def stopped_copy(stopped, tmp_path):
    """A copy of the output of a stopped run, which a test may change."""
    return shutil.copytree(stopped, tmp_path / "stopped_copy")


@pytest.fixture(scope="session")
def translator(tmp_path_factory):
    """Train a small English-German model.

    Returns the folder around its data-bin, and its checkpoints, as train.sh leaves them.
    """
    from evaluation_corpus import TRAINING, prepare

    base = tmp_path_factory.mktemp("eval") / "größere Übung 1"
    data = prepare(base / "Daten" / "data-bin")
    folder = base / "Modell λ=2"
    run_checked(
        [
            "fairseq-train",
            data,
            "--user-dir",
            ROOT / "fairseq_rskip",
            *TRAINING,
            "--save-dir",
            folder,
        ]
    )
    for language in ("en", "de"):
        shutil.copy(data / f"dict.{language}.txt", folder)
    return data.parent, folder


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """The data-bin of a small text, as ``rskip prepare`` makes one."""
    import text_corpus

    return text_corpus.prepare(tmp_path_factory.mktemp("text") / "größere Übung 1" / "letters")


@pytest.fixture(scope="session")
def language_model(letters):
    """That data-bin, and the checkpoints of a small language model, as train.sh leaves them."""
    import text_corpus

    folder = letters.parent.parent / "model"
    text_corpus.train(letters, folder, "rskip_ln_tiny", "--seed", 3)
    shutil.copy(letters / "dict.txt", folder)
    return letters, folder


@pytest.fixture(scope="session")
def translated(translator):
    """Run evaluate.sh as a user does, with no option, and return what it printed.

    Its results are in the default place.
    """
    done = run_command([ROOT / "scripts" / "evaluate.sh", *translator], cwd=translator[0].parent)
    assert done.returncode == 0, done.stderr
    return done.stdout, translator[1] / "evaluation-test"
