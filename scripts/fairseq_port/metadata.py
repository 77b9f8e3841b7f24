"""What changes in the archive beside Python modules: the version, the build requirements, two files of ours."""

import re
import shutil
from pathlib import Path
from typing import Dict, Tuple

from fairseq_port.rules import RULES, UnknownSourceError, rewrite_module

VERSION = "0.12.2"
LOCAL_VERSION = "0.12.2+rskip1"
_COPIED = {"compat.py": "_today.py", "errors.py": "errors.py", "safe_load.py": "safe_load.py"}
COPIES = {name: f"fairseq/{copy}" for name, copy in _COPIED.items()}

# file, pattern, replacement; each must match exactly once
_TEXT_RULES: Tuple[Tuple[str, str, str], ...] = (
    ("fairseq/version.txt", rf"^{re.escape(VERSION)}\s*$", LOCAL_VERSION + "\n"),
    (
        "pyproject.toml",
        r"^requires = \[.*\]$",
        'requires = ["setuptools>=64", "cython>=3", "numpy>=2; python_version>=\'3.9\'",'
        ' "numpy; python_version<\'3.9\'"]',
    ),
)


def rewrite_tree(root: Path, package: Path) -> Dict[str, Dict[str, int]]:
    """Rewrite the unpacked archive at ``root`` in place and put the files of ``COPIES`` from ``package`` into it.

    Returns rule name -> file -> number of places changed. Raises ``UnknownSourceError`` at the first surprise.
    """
    report: Dict[str, Dict[str, int]] = {rule.name: {} for rule in RULES}
    for rule in RULES:
        for name in rule.counts:
            if not (root / name).is_file():
                raise UnknownSourceError(f"rule {rule.name}: {name} is missing")
    modules = [root / "setup.py", *root.glob("fairseq/**/*.py"), *root.glob("fairseq_cli/**/*.py")]
    for path in sorted(modules):
        name = path.relative_to(root).as_posix()
        old = path.read_bytes()
        new, changed = rewrite_module(name, old)
        if new != old:
            path.write_bytes(new)
        for rule_name, count in changed.items():
            report[rule_name][name] = count
    report["version-and-build"] = _rewrite_text_files(root)
    for name, copy in COPIES.items():
        if (root / copy).exists():
            raise UnknownSourceError(f"{copy} exists already")
        shutil.copyfile(package / name, root / copy)
    report["compat"] = dict.fromkeys(COPIES.values(), 1)
    return report


def _rewrite_text_files(root: Path) -> Dict[str, int]:
    changed = {}
    for name, pattern, replacement in _TEXT_RULES:
        path = root / name
        text, count = re.subn(pattern, replacement, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if count != 1:
            raise UnknownSourceError(f"rule version-and-build: {name} has {count} places to change, expected 1")
        path.write_text(text, encoding="utf-8")
        changed[name] = count
    return changed
