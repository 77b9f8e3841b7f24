"""What computes the skip connections.

The tests cover the choice among operators, where it is theirs to make, and the build.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import run_command
from test_ops import inputs

from fairseq_rskip.norms import RecursiveNorm
from fairseq_rskip.ops import cpu, dispatch, in_use
from fairseq_rskip.residual import create_skip


@pytest.fixture
def backend(cpu_operator, operators):
    """Chooses a value of RSKIP_OPS, cpu at first."""
    return operators


SKIPS = {
    "xskip2": {"kind": "xskip", "skip_lambda": 2.0},
    "xskip1-alpha2": {"kind": "xskip", "skip_lambda": 1.0, "branch_scale": 2.0},
    "rskip1": {"kind": "rskip", "skip_lambda": 1},
    "rskip3-alpha0.5": {"kind": "rskip", "skip_lambda": 3, "branch_scale": 0.5},
    "rskip2-rms": {"kind": "rskip", "skip_lambda": 2, "norm": "rms"},
}


@pytest.mark.parametrize("layout", ["sequence", "image", "channels_last"])
@pytest.mark.parametrize("name", SKIPS)
def test_skip_connections_use_it_and_agree_with_torch(name, layout, backend):
    images = layout != "sequence"
    skip = create_skip(dim=48, channel_dim=1 if images else -1, **SKIPS[name])
    x, f_x = (leaf.detach() for leaf in inputs((2, 48, 4, 5) if images else (4, 3, 48), 1)[:2])
    if layout == "channels_last":
        x, f_x = (t.contiguous(memory_format=torch.channels_last) for t in (x, f_x))
    results = []
    for choice in ("torch", "cpu"):
        backend(choice)
        leaves = [x.clone().requires_grad_(), f_x.clone().requires_grad_()]
        y = skip(*leaves)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad(y, [*leaves, *skip.parameters()], upstream)])
    assert ["RecursiveSkip" in " ".join(history(y.grad_fn)) for y, *_ in results] == [False, True]
    assert results[0][0].stride() == results[1][0].stride()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def history(node, depth=3):
    """The names of ``node`` and the nearest nodes behind it, one of each generation."""
    names = []
    while node is not None and len(names) < depth:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def test_auto_leaves_the_plain_post_norm_to_torch(backend):
    x, f_x = inputs((3, 256), 1)[:2]
    backend("auto")
    assert not dispatch.should_fuse(x, f_x, 256, 1)
    assert (
        dispatch.should_fuse(x, f_x, 256, 2)
        and dispatch.should_fuse(x, f_x, 256, 1, 2.0)
        and in_use().name == "cpu"
    )
    assert not dispatch.should_fuse(x, f_x, 20, 2)
    assert not dispatch.should_fuse(x.double(), f_x, 256, 2)
    assert not dispatch.should_fuse(x[:1], f_x, 256, 2)  # torch broadcasts, the operator does not
    backend("torch")
    assert not dispatch.should_fuse(x, f_x, 256, 2)
    assert in_use() == ("torch", "RSKIP_OPS=torch")
    backend("gpu")
    with pytest.raises(ValueError, match="RSKIP_OPS='gpu': expected one of auto, torch, cpu, cuda"):
        in_use()


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """A compiler that writes to the file ``calls``, and a cache without the operator."""
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho call >> {tmp_path}/calls\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("choice", ["auto", "cpu"])
def test_a_forward_pass_never_compiles_and_one_line_says_how(choice, backend, empty_cache, caplog):
    backend(choice)
    skip, (x, f_x) = create_skip("rskip", 16), (leaf.detach() for leaf in inputs((4, 16), 1)[:2])
    actual = [skip(x, f_x), skip(x, f_x)]
    assert not (empty_cache / "calls").exists()
    assert len(caplog.messages) == 1
    assert "python -m fairseq_rskip.ops builds it, once for this machine" in caplog.messages[0]
    backend("torch")
    assert all(torch.equal(y, skip(x, f_x)) for y in actual)


def test_the_first_answer_holds_when_the_operator_is_built_later(backend, empty_cache, monkeypatch):
    backend("auto")
    assert in_use().name == "torch"
    monkeypatch.setattr(cpu, "load", lambda build: "loaded")
    assert in_use(build=True).name == "torch"


def test_the_operator_is_a_node_of_a_graph_whatever_ran_before(backend):
    """Traced first of all, and after an eager call."""
    graphs, norm, (x, f_x) = [], RecursiveNorm("layer", 16, steps=2), inputs((4, 16), 2)[:2]

    def keep(module, _inputs):
        graphs.append(
            [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        )
        return module

    for before in ("nothing", "eager"):
        backend("auto")
        torch._dynamo.reset()
        if before != "nothing":
            norm(x, f_x)
        torch.compile(norm, backend=keep, fullgraph=True)(x, f_x)
    assert graphs == [["fairseq_rskip.recursive_skip.default", "<built-in function getitem>"]] * 2


@pytest.mark.parametrize("trouble", ["no_compiler", "read_only_home"])
def test_without_a_build_one_line_and_torch(trouble, backend, monkeypatch, tmp_path, caplog):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked if trouble == "read_only_home" else tmp_path))
    if trouble != "read_only_home":
        monkeypatch.setenv("CXX", "no-such-compiler")
    norm, (x, f_x) = RecursiveNorm("layer", 16, steps=2), inputs((4, 16), 2)[:2]
    in_use(build=True)
    actual = [norm(x, f_x), norm(x, f_x)]
    assert len(caplog.messages) == 1
    assert "skip connections run without their cpu operator" in caplog.messages[0]
    backend("torch")
    assert all(torch.equal(y, norm(x, f_x)) for y in actual)


def test_two_processes_build_once(tmp_path):
    """A compiler that takes its time and counts its calls stands in for the real one."""
    compiler = tmp_path / "slow-c++"
    library = cpu.build()
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo slow 1; exit; fi\n'
        f"echo call >> {tmp_path}/calls; sleep 1\n"
        f'while [ "$1" != -o ]; do shift; done; cp {library} "$2"\n'
    )
    compiler.chmod(0o755)
    env = {
        **os.environ,
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "RSKIP_OPS": "cpu",
    }
    command = [sys.executable, "-m", "fairseq_rskip.ops"]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.communicate(timeout=300)[0].startswith("cpu: cpu (built at ")
    assert (tmp_path / "calls").read_text() == "call\n"
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [
        ".lock",
        library.name,
    ]


def test_the_compiler_may_have_words_of_its_own(monkeypatch):
    plain = cpu.compile_command()
    monkeypatch.setenv("CXX", "env g++ -m64")
    command = cpu.compile_command()
    assert command[0].endswith("/env") and command[1:3] == ["g++", "-m64"]
    assert command[3:] == plain[1:]
    assert cpu.library_path(command) != cpu.library_path(plain)


def test_without_a_kernel_the_operator_is_refused():
    code = (
        "import torch; from fairseq_rskip.ops import skip_norm; one = torch.ones(16)\n"
        "try: skip_norm(one, one, [one], [one])\n"
        "except ValueError as error: print(error)"
    )
    done = run_command([sys.executable, "-c", code])
    assert "no kernel for cpu tensors in this process" in done.stdout, done.stderr
    assert "inputs that fairseq_rskip.ops.should_fuse accepts" in done.stdout


def test_importing_builds_and_loads_nothing(tmp_path):
    code = (
        "import sys; import fairseq_rskip.ops; "
        "print([m for m in ('triton', 'torch.utils.cpp_extension', 'fairseq_rskip.ops.cpu') "
        "if m in sys.modules])"
    )
    done = run_command([sys.executable, "-c", code], env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.stdout.strip() == "[]" and not list(tmp_path.iterdir()), done.stderr
