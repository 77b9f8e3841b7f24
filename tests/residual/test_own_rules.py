"""``RSKIP_RULES``: a rule in a file of the user's own, in processes of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "docs" / "rules.md"
BUILD = (
    "from fairseq_rskip.residual import create_skip\n"
    "print(create_skip('feature_gate', 2).weight.tolist())"
)


def run(folder, *words, rules="my_rule.py"):
    environment = {**os.environ, "RSKIP_RULES": rules}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True
    )


def rule_of_the_docs(kind):
    """The text of the file that docs/rules.md writes for ``kind``."""
    text = RULES.read_text("utf-8")
    blocks = re.findall(r"^   ```python\n(.*?)^   ```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [each for each in blocks if f'@register("{kind}")' in each]
    lines = [line.removeprefix("   ") for line in block.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with the rule that docs/rules.md writes, as ``my_rule.py``."""
    (tmp_path / "my_rule.py").write_text(rule_of_the_docs("feature_gate"), encoding="utf-8")
    return tmp_path


def test_the_rule_of_the_docs_is_built(folder):
    result = run(folder, "-c", BUILD)
    assert result.stdout == "[0.0, 0.0]\n", result.stderr


def test_the_rule_of_two_tensors_of_the_docs_is_its_equation(tmp_path):
    """Three blocks, against the recurrence in float64."""
    (tmp_path / "momentum.py").write_text(rule_of_the_docs("momentum"), encoding="utf-8")
    (tmp_path / "check.py").write_text(
        """
import torch
from fairseq_rskip.residual import skip_stack

torch.manual_seed(1)
x = torch.randn(4, 2, 8, dtype=torch.float64)
matrices = torch.randn(3, 8, 8, dtype=torch.float64)
y, expected, v = x, x, 0
skips = skip_stack("momentum", 8, layers=3, sublayers=("ffn",), momentum=0.7, dtype=x.dtype)
for layer, matrix in zip(skips, matrices):
    h, carried = layer["ffn"].prepare(y)
    y = layer["ffn"](y, h @ matrix, carried)
    v = 0.7 * v + 0.3 * torch.nn.functional.layer_norm(expected, [8]) @ matrix
    expected = expected + v
torch.testing.assert_close(y, expected)
print(y.shape)
"""
    )
    result = run(tmp_path, "check.py", rules="momentum.py")
    assert result.stdout == "torch.Size([4, 2, 8])\n", result.stderr
    describe = ["-m", "fairseq_rskip", "describe", "transformer_momentum_tiny"]
    described = run(tmp_path, *describe, rules="momentum.py")
    assert described.returncode == 0 and "v = c v + (1 - c) F(G(x))" in described.stdout


def test_a_mistake_in_the_file_is_one_line(folder):
    (folder / "broken.py").write_text("import os\n\nnothing()\n")
    (folder / "my.rule.py").write_text("")
    (folder / "plain.py").write_text("import os\n")
    (folder / "other").mkdir()
    (folder / "other" / "torch.py").write_text("")
    (folder / "other" / "my_rule.py").write_text("")
    for name, words in {
        "broken.py": "line 3: NameError: name 'nothing' is not defined",
        "other/torch.py": "there is another module torch, ",
        "my.rule.py": "expected a name that can be imported",
        "plain.py": "registers no rule",
        "none.py": "does not exist",
        "my_rule.py:other/my_rule.py": "there is another module my_rule, ",
    }.items():
        error = run(folder, "-c", BUILD, rules=name).stderr.splitlines()[-1]
        assert error.startswith("fairseq_rskip.errors.UserError: RSKIP_RULES: ") and words in error


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("init=init, ", "", "does not hand its option init to super().__init__"),
        ("torch.full((dim,)", "torch.full((dim + 1,)", "on x of shape [2, 3, 8]: RuntimeError: "),
        ("super().__init__(dim, init=init, **common)", "pass", "line 23: kind feature_gate cannot"),
        ("**common: Unpack[Common],", "", "unexpected keyword argument 'place'"),
        ("init=init, **common", "init=init", "does not hand **common to super().__init__"),
        ("self.weight = self.new_parameter", "weight = self.new_parameter", "AttributeError"),
        (
            "self.weight = self.new_parameter(torch.full((dim,), float(init)))",
            "self.weight = torch.full((dim,), float(init), requires_grad=True)",
            "self.weight would not be learned",
        ),
        (".sigmoid(), 1.0", ".log().log(), 1.0", "returns values that are not finite"),
        ('"initial g", affects="start"', '0.0, 1.0, "initial g"', "line 19: TypeError: Real(0.0, "),
    ],
)
def test_a_mistake_in_the_rule_is_one_line_of_describe(folder, before, after, words):
    pytest.importorskip("fairseq")
    text = (folder / "my_rule.py").read_text()
    assert before in text
    (folder / "my_rule.py").write_text(text.replace(before, after))
    result = run(folder, "-m", "fairseq_rskip", "describe", "transformer_feature_gate_tiny")
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and line.startswith("error: ") and words in line


def test_a_choice_without_values_is_refused(folder):
    """It would take every misspelt value."""
    text = (folder / "my_rule.py").read_text()
    text = text.replace("import Real", "import Choice").replace("Real(", "Choice(")
    (folder / "my_rule.py").write_text(text)
    line = run(folder, "-c", "import fairseq_rskip.residual").stderr.splitlines()[-1]
    assert "TypeError: option init: Choice('initial g') has no values: expected a Literal" in line


def test_a_number_of_a_rule_without_constants_is_described(folder):
    pytest.importorskip("fairseq")
    text = (folder / "my_rule.py").read_text()
    declared = 'init: Annotated[float, Real("initial g", affects="start")] = 0.0,'
    leak = 'leak: Annotated[float, Real("weight of F")] = 1.0,'
    assert declared in text
    text = text.replace(declared, f"{declared} {leak}")
    (folder / "my_rule.py").write_text(text.replace("init=init,", "init=init, leak=leak,"))
    arch = "transformer_feature_gate_tiny"
    result = run(folder, "-m", "fairseq_rskip", "describe", arch, "--skip-leak", "0.25")
    assert "leak=0.25" in result.stdout, result.stderr


def test_an_unknown_name_says_which_files_were_run(folder):
    hint = (
        "import os, fairseq_rskip.residual.own_rules as own\n"
        "if not own.paths_of_files():\n"
        "    print(own.hint())\n"
        "    os.environ['RSKIP_RULES'] = 'my_rule.py'\n"
        "print(own.hint())"
    )
    late = "; RSKIP_RULES was set after fairseq_rskip was imported: set it before"
    none = "; a rule of your own needs RSKIP_RULES=FILE"
    assert run(folder, "-c", hint, rules="").stdout.splitlines() == [none, late]
    loaded = f"; rules of your own are those of RSKIP_RULES={folder / 'my_rule.py'}"
    assert run(folder, "-c", hint).stdout.splitlines() == [loaded]


def test_a_file_is_run_once_by_whatever_name_it_is_reached(folder):
    """Through a link to its folder, and as the program that is run."""
    (folder / "link").symlink_to(folder)
    result = run(folder, "-c", BUILD, rules="link/my_rule.py")
    assert result.stdout == "[0.0, 0.0]\n", result.stderr
    with open(folder / "my_rule.py", "a") as file:
        file.write(BUILD + "\n")
    result = run(folder, "my_rule.py")
    assert result.stdout == "[0.0, 0.0]\n", result.stderr


@pytest.mark.slow
def test_a_name_that_an_architecture_has_is_refused(folder):
    pytest.importorskip("fairseq")
    text = (folder / "my_rule.py").read_text()
    for kind in ("rmsnorm", "align", "preln_tiny"):
        (folder / "taken.py").write_text(text.replace("feature_gate", kind))
        done = run(folder, "-m", "fairseq_rskip.tools", "train", "--archs", rules="taken.py")
        assert f"registers '{kind}', but there is an architecture transformer_{kind}" in done.stderr
        assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rule_is_not_taken_for_a_built_in_one_whose_name_begins_with_its_own(folder):
    pytest.importorskip("fairseq")
    text = (folder / "my_rule.py").read_text()
    (folder / "delta.py").write_text(text.replace("feature_gate", "delta"))
    script = (
        "import fairseq_rskip.models\n"
        "from fairseq_rskip.tools.experiments.task import own_rule\n"
        "print(own_rule('transformer_delta_attnres_tiny', {}),"
        " own_rule('transformer_delta_tiny', {'skip-kind': 'xskip'}),"
        " len(own_rule('transformer_delta_tiny', {})))"
    )
    done = run(folder, "-c", script, rules="delta.py")
    assert done.stdout == "{} {} 1\n", done.stderr


@pytest.mark.slow
def test_the_commands_know_it_and_a_changed_rule_is_trained_again(folder):
    pytest.importorskip("fairseq")
    command = ["-m", "fairseq_rskip.tools"]
    shown = run(folder, *command, "describe", "transformer_feature_gate_tiny")
    assert shown.returncode == 0 and "feature_gate weight=0" in shown.stdout, shown.stderr

    script = (
        "from fairseq_rskip.tools.experiments.task import own_rule\n"
        "print(own_rule('transformer_lm_feature_gate_tiny', {}), own_rule('transformer_preln', {}),"
        " own_rule('', {'skip-kind': 'feature_gate'}))"
    )
    before = run(folder, "-c", script).stdout
    assert re.fullmatch(r"(\{'rule': '\w{64}'\}) \{\} \1\n", before)
    with open(folder / "my_rule.py", "a") as file:
        file.write("# changed\n")
    assert run(folder, "-c", script).stdout != before


def test_a_state_of_another_version_of_the_file_is_loaded_with_a_warning(folder):
    save = "import torch; torch.save(create_skip('feature_gate', 2).state_dict(), 's.pt')"
    load = "import torch; create_skip('feature_gate', 2).load_state_dict(torch.load('s.pt'))"
    start = "from fairseq_rskip.residual import create_skip; "
    assert run(folder, "-c", start + save).returncode == 0
    assert run(folder, "-c", start + load).stderr == ""
    with open(folder / "my_rule.py", "a") as file:
        file.write("# changed\n")
    done = run(folder, "-c", start + load)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "was saved with another version of" in line and "my_rule.py (SHA-256 " in line


def test_a_name_of_an_option_that_is_taken_is_refused(folder):
    text = (folder / "my_rule.py").read_text()
    for name in ("kind", "skip_init"):
        (folder / "my_rule.py").write_text(re.sub(r"\binit\b", name, text))
        script = "from fairseq_rskip import flags; flags.settings(flags.KINDS)"
        error = run(folder, "-c", script).stderr.splitlines()[-1]
        flag = "skip-kind" if name == "kind" else "skip-init"
        assert f"option {name} of kind feature_gate: --{flag} is taken" in error


def test_what_was_trained_by_an_earlier_file_is_told_from_what_is_now(folder):
    """An image run's identity, and what a state dict notes for an export or a finished training."""
    save = "import torch; torch.save(create_skip('feature_gate', 2).state_dict(), 's.pt')"
    start = "from fairseq_rskip.residual import create_skip, own_rules, state; "
    assert run(folder, "-c", start + save).returncode == 0
    script = (
        "import torch; files = state.rule_files(torch.load('s.pt'));"
        "print(list(files), [name.split('/')[-1] for name in own_rules.changed_files(files)])"
    )
    assert run(folder, "-c", start + script).stdout == "['feature_gate'] []\n"
    with open(folder / "my_rule.py", "a") as file:
        file.write("# changed\n")
    assert run(folder, "-c", start + script).stdout == "['feature_gate'] ['my_rule.py']\n"


def test_a_finished_training_of_an_earlier_file_is_refused(folder):
    pytest.importorskip("fairseq")
    save = (
        "import torch; from fairseq_rskip.residual import create_skip\n"
        "model = create_skip('feature_gate', 2).state_dict()\n"
        "torch.save({'cfg': {'model': {}}, 'model': model}, 'checkpoint_last.pt')"
    )
    check = (
        "from pathlib import Path; from fairseq_rskip.tools.train.saved import SavedTraining\n"
        "SavedTraining(Path('here').parent).check_settings({})"
    )
    assert run(folder, "-c", save).returncode == 0
    assert run(folder, "-c", check).returncode == 0
    with open(folder / "my_rule.py", "a") as file:
        file.write("# changed\n")
    error = run(folder, "-c", check).stderr.splitlines()[-1]
    assert "has a finished training with another version of " in error and "my_rule.py" in error


@pytest.mark.slow
def test_an_image_run_of_an_earlier_file_is_refused(folder):
    words = "train-cifar --data digits --depth 8 --iterations 2 --skip-kind feature_gate"
    command = ["-m", "fairseq_rskip.tools", *words.split(), "--output", "out"]
    assert run(folder, *command).returncode == 0
    assert run(folder, *command).returncode == 0
    with open(folder / "my_rule.py", "a") as file:
        file.write("# changed\n")
    done = run(folder, *command)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "of another run: SHA-256 of the rule's own file" in line


@pytest.mark.slow
def test_an_export_needs_no_rule_that_was_loaded_beside_its_own(folder):
    """Options of rules that are not loaded now are null in its settings."""
    pytest.importorskip("fairseq")
    script = (
        "from fairseq_rskip.pretrained import hub\n"
        "hub.fill = lambda build, *_: build()\n"
        "class Task:\n"
        "    build_model = staticmethod(lambda settings: settings)\n"
        "config = {'architecture': 'transformer_lm_postln_tiny'}\n"
        "model = {'skip_gone': None, 'decoder_layers': 3}\n"
        "print(hub.build(None, {**config, 'model': model}, Task()).decoder_layers)\n"
    )
    done = run(folder, "-c", "import fairseq_rskip.models\n" + script)
    assert done.stdout == "3\n", done.stderr


def test_a_copy_of_the_file_is_the_same_rule(folder):
    """An export has one; its author has the first beside it."""
    (folder / "export").mkdir()
    shutil.copy(folder / "my_rule.py", folder / "export")
    result = run(folder, "-c", BUILD, rules="export/my_rule.py")
    assert result.stdout == "[0.0, 0.0]\n", result.stderr


def test_a_model_needs_the_files_of_its_rules_as_they_are(folder):
    script = (
        "from fairseq_rskip.residual import own_rules\n"
        "from pathlib import Path\n"
        "files = own_rules.checksums_of(['feature_gate', 'xskip'])\n"
        "own_rules.check_loaded(Path('export'), files)\n"
        "print(list(files))\n"
        "own_rules.check_loaded(Path('export'), {'my_rule.py': 'other'})"
    )
    done = run(folder, "-c", script)
    assert done.stdout == "['my_rule.py']\n"
    error = done.stderr.splitlines()[-1]
    assert "has a rule of its own, in my_rule.py: expected RSKIP_RULES=export/my_rule.py" in error
