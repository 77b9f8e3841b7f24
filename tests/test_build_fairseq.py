"""The program that rewrites and builds fairseq: its rules on small sources, its errors, its cache."""

import ast
import hashlib
import subprocess
import sys
import tarfile

import pytest
from conftest import ROOT, run_command

sys.path.insert(0, str(ROOT / "scripts"))

from fairseq_port import finders, main, metadata, rules  # noqa: E402
from fairseq_port.edits import Edit, Source, apply_edits  # noqa: E402

PROGRAM = ROOT / "scripts" / "build_fairseq.py"


def rewritten(find, text):
    source = Source(text.encode())
    return apply_edits(source.data, find(source)).decode()


REWRITINGS = [
    (
        finders.dataclass_factories,
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: Bee = Bee()\n    c: int = II('x')\n",
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n"
        "    b: Bee = field(default_factory=Bee)\n    c: int = II('x')\n",
    ),
    (
        finders.dataclass_factories,
        "@dataclass\nclass A:\n    b: Bee = field(default=Bee(), metadata={'help': 'é'})\n"
        "class C:\n    b: Bee = Bee()\n",
        "@dataclass\nclass A:\n    b: Bee = field(default_factory=Bee, metadata={'help': 'é'})\n"
        "class C:\n    b: Bee = Bee()\n",
    ),
    (
        finders.factory_defaults,
        "v = FairseqConfig.__dataclass_fields__[k].default\nw = self.__dataclass_fields__[k].default\n",
        "v = getattr(FairseqConfig(), k)\nw = self.__dataclass_fields__[k].default\n",
    ),
    (finders.hydra_import, "from hydra.experimental import compose\n", "from hydra import compose\n"),
    (
        finders.hydra_version_base,
        "@hydra.main(config_path=p)\ndef f(): pass\nwith initialize(config_path=p): pass\nself.initialize(x)\n",
        '@hydra.main(config_path=p, version_base="1.1")\ndef f(): pass\n'
        'with initialize(config_path=p, version_base="1.1"): pass\nself.initialize(x)\n',
    ),
    (
        finders.hydra_strict,
        "def f():\n    c = compose('config', overrides=o, strict=False)\n",
        "def f():\n    c = compose('config', overrides=o); OmegaConf.set_struct(c, False)\n",
    ),
    (
        finders.safe_load,
        "torch.load(f)\ntorch.load(\n    f,\n    map_location=(lambda s: s),\n)\ntorch.load(f, weights_only=False)\n",
        "torch.load(f, weights_only=True)\ntorch.load(\n    f,\n    map_location=(lambda s: s), weights_only=True\n)\n"
        "torch.load(f, weights_only=False)\n",
    ),
    (
        finders.literal_settings,
        "import re\nx = eval(a.b)\nmodel.eval()\n",
        "from fairseq import _today\nimport re\nx = _today.literal(a.b)\nmodel.eval()\n",
    ),
    (finders.numpy_aliases, "np.float(1); np.float32(1); np.compat.long\n", "float(1); np.float32(1); int\n"),
    (finders.numpy_aliases, "np.percentile(x, 1, interpolation='lower')\n", "np.percentile(x, 1, method='lower')\n"),
    (
        finders.amp,
        "with torch.cuda.amp.autocast(enabled=e): pass\n",
        'with torch.autocast("cuda", enabled=e): pass\n',
    ),
    (
        finders.unknown_architecture,
        'import os\ndef f(model):\n    assert model is not None, "x"\n',
        "from fairseq import _today\nimport os\ndef f(model):\n    if model is None:\n"
        "        raise _today.unknown_architecture(model_type)\n",
    ),
    (
        finders.data_parallel,
        "import os\nDistributedDataParallel(module=m, device_ids=[1])\nOther(module=m)\n",
        "from fairseq import _today\nimport os\n"
        "_today.data_parallel(DistributedDataParallel, module=m, device_ids=[1])\nOther(module=m)\n",
    ),
    (
        finders.whole_copies,
        "import shutil\nshutil.copyfile(a, b)\nshutil.move(a, b)\n",
        "from fairseq import _today\nimport shutil\n_today.copy_whole(a, b)\nshutil.move(a, b)\n",
    ),
    (
        finders.hydra_named_nodes,
        "import os\ndef cli_main():\n    hydra_main()\n",
        "import sys\nimport os\ndef cli_main():\n    sys.argv[1:] = _today.hydra_overrides(sys.argv[1:])\n"
        "    hydra_main()\n",
    ),
    (finders.raw_strings, "a = '\\d'\nb = '\\n'\nc = r'\\d'\n", "a = r'\\d'\nb = '\\n'\nc = r'\\d'\n"),
    (finders.last_set_bit, "n = util.rindex(a, 1)\n", "n = len(a) - 1 - a[::-1].index(1)\n"),
    (
        finders.no_fused_encoder,
        'x = False\nif "fb" in torch.__version__:\n    x = True\nelse:\n    x = 1\n',
        "x = False\n# torch's version no longer chooses the fused path: it stays off\n",
    ),
    (
        finders.requirements,
        'setup(setup_requires=["cython"], install_requires=["cffi", "hydra-core<1.1", "omegaconf<2.1", "numpy; x",'
        ' "torch", "tqdm", "torchaudio>=0.8.0"])\n',
        "setup(setup_requires=[], install_requires=['hydra-core>=1.3,<1.4', 'omegaconf>=2.3', 'numpy', 'torch>=2.1',"
        " 'tqdm'])\n",
    ),
]


@pytest.mark.parametrize(("find", "before", "after"), REWRITINGS)
def test_rewritings(find, before, after):
    assert rewritten(find, before) == after
    ast.parse(after)


@pytest.mark.parametrize("bits", ["1", "01", "0100", "1110000000"])
def test_the_expression_for_the_last_set_bit(bits):
    program = rewritten(finders.last_set_bit, "util.rindex(a, 1)\n")
    values = [int(bit) for bit in bits]
    assert eval(program, {"a": values, "len": len}) == max(i for i, bit in enumerate(values) if bit)


def test_edits_keep_everything_else_and_must_not_overlap():
    assert apply_edits("aé c".encode(), [Edit(4, 5, "d"), Edit(0, 1, "b")]).decode() == "bé d"
    with pytest.raises(ValueError, match="overlap"):
        apply_edits(b"abc", [Edit(0, 2, "x"), Edit(1, 3, "y")])


def test_an_argument_is_not_put_into_a_comment():
    source = Source(b"f(\n    a  # why\n)\n")
    with pytest.raises(ValueError, match="comment"):
        source.add_keyword(next(source.nodes(ast.Call)), "b=1")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("fairseq/data/data_utils.py", "x = 1\n", "rule numpy-alias: fairseq/data/data_utils.py has 0 .* expected 2"),
        ("fairseq/data/data_utils.py", "np.int; np.float; np.int\n", "rule numpy-alias: .* has 3 .*, expected 2"),
        ("fairseq/new.py", "y = np.bool\n", "rule numpy-alias: fairseq/new.py has 1 places to change, expected 0"),
        ("fairseq_cli/new.py", "eval(x)\n", "rule literal-settings: .* has 1 places to change, expected 0"),
    ],
)
def test_any_other_count_is_refused(name, text, message):
    with pytest.raises(rules.UnknownSourceError, match=message):
        rules.rewrite_module(name, text.encode())


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(rules.UnknownSourceError, match="is missing"):
        metadata.rewrite_tree(tmp_path, main.PACKAGE)


def test_rule_names_are_unique_and_documented():
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)
    page = (ROOT / "docs" / "fairseq.md").read_text(encoding="utf-8")
    for rule in rules.RULES:
        assert f"| `{rule.name}` |" in page, rule.name


def test_a_wrong_archive_is_one_line_with_both_hashes(tmp_path):
    wrong = tmp_path / "fairseq-0.12.2.tar.gz"
    wrong.write_bytes(b"something else")
    done = run_command([sys.executable, PROGRAM, "--sdist", wrong, "--cache", tmp_path / "cache"])
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert main.SHA256 in done.stderr and hashlib.sha256(b"something else").hexdigest() in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_source_that_differs_leaves_no_wheel(tmp_path, monkeypatch, capsys):
    (tmp_path / "fairseq-0.12.2" / "fairseq").mkdir(parents=True)
    (tmp_path / "fairseq-0.12.2" / "setup.py").write_text("from setuptools import setup\n")
    archive = tmp_path / "fairseq-0.12.2.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "fairseq-0.12.2", "fairseq-0.12.2")
    monkeypatch.setattr(main, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert main.main(["--sdist", str(archive), "--cache", str(tmp_path / "cache")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: not the source I know: rule" in printed.err
    assert not (tmp_path / "cache").exists()


def test_a_cached_wheel_is_printed_at_once_and_alone(tmp_path):
    place = tmp_path / main.cache_key()
    place.mkdir()
    wheel = place / "fairseq-0.12.2+rskip1-cp3-none-any.whl"
    wheel.touch()
    done = run_command([sys.executable, PROGRAM], env={"RSKIP_CACHE": str(tmp_path)}, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{wheel}\n", "")


def test_the_cache_key_follows_the_sources(monkeypatch, tmp_path):
    before = main.cache_key()
    for name in metadata.COPIES:
        (tmp_path / name).write_bytes((main.PACKAGE / name).read_bytes())
    package = main.PACKAGE
    monkeypatch.setattr(main, "PACKAGE", tmp_path)
    assert main.cache_key() == before
    for name in metadata.COPIES:
        (tmp_path / name).write_bytes((package / name).read_bytes() + b"\n")
        assert main.cache_key() != before
        (tmp_path / name).write_bytes((package / name).read_bytes())


@pytest.mark.parametrize("force", [False, True])
def test_storing_twice_keeps_one_whole_wheel(tmp_path, force):
    place = tmp_path / "cache" / "key"
    for content in ("first", "second"):
        wheel = tmp_path / "fairseq-1.whl"
        wheel.write_text(content)
        main.store(wheel, place, force)
    assert main.cached(place).read_text() == ("second" if force else "first")
    assert [entry.name for entry in place.parent.iterdir()] == ["key"]
    assert [entry.name for entry in place.iterdir()] == ["fairseq-1.whl"]


def test_the_program_needs_no_third_party_package():
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import fairseq_port.main"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
