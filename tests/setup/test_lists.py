"""Numbers and lists that are written by hand, compared with what they are about."""

import os
import re
import sys

import yaml
from conftest import ROOT, run_checked


def test_every_page_is_in_the_contents_and_in_the_site():
    contents = (ROOT / "docs" / "README.md").read_text("utf-8")
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "README.md":
            assert f"({page.name})" in contents, page.name
        assert f": {page.name}" in site, page.name


def test_the_site_builds_without_a_broken_link(tmp_path):
    """As ``make docs``: mkdocs.yml is strict, but with -q it would count no warning."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"]
    run_checked(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert (tmp_path / "site" / "depth-history.html").is_file()


def test_ci_calls_targets_that_there_are():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
        for job in jobs.values():
            for step in job["steps"]:
                called = re.findall(r"make ([\w-]+)", step.get("run", ""))
                assert set(called) <= targets, path.name
