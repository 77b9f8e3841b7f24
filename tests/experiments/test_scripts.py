"""The scripts in experiments/ import what is installed, not each other."""

import ast

import pytest
from conftest import ROOT

SCRIPTS = {path.stem: path for path in sorted((ROOT / "experiments").glob("*.py"))}


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another(name):
    imported = set()
    for node in ast.walk(ast.parse(SCRIPTS[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    assert not imported & SCRIPTS.keys()
