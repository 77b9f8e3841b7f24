"""The command rskip."""

import importlib
import sys

from fairseq_rskip.tools import __main__ as rskip


def test_rskip_calls_every_command_by_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rskip"])
    assert rskip.main([]) == 0
    usage = capsys.readouterr().out
    for name, (module, purpose) in rskip.COMMANDS.items():
        assert name in usage and purpose in usage
        given, (name_of, function) = [], module.split(":")
        module = importlib.import_module(f"fairseq_rskip.{name_of}")
        monkeypatch.setattr(module, function, lambda argv, given=given: given.append(argv) or 3)
        assert rskip.main([name, "--seed", "1"]) == 3 and given == [["--seed", "1"]]
    assert rskip.main(["trian"]) == 2 and "trian" in capsys.readouterr().err
