"""What the documentation says is so."""

import doctest
import importlib
import re

import pytest

import docs
from conftest import ROOT

MODULES = ("kvcache", "scheduler", "spec", "nanoserve")
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", [*MODULES, "weights.tokenizer", "labs"])
def test_examples_in_docstrings(name):
    """Every worked example in a docstring gives what it says."""
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0 and result.attempted > 0


def test_line_counts_in_the_readme():
    """The table of files has today's numbers, and the product is as small as it promises to be."""
    table = dict(re.findall(r"^\| \[([\w.]+)\]\(\1\) \| (\d+) \|", README, re.M))
    assert list(table) == [*(f"{name}.py" for name in MODULES), "kernels.cu"]
    counts = {name: docs.count_code(ROOT / name) for name in table}
    assert {name: int(count) for name, count in table.items()} == counts
    assert sum(counts.values()) <= 1800 and counts["nanoserve.py"] <= 850


def test_links_in_the_readme():
    """Every relative link leads to a file."""
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_readme_command():
    """.ci/run does what the README tells a newcomer to do."""
    commands = re.findall(r"^python3 -m venv venv && .*$", README, re.M)
    assert len(commands) == 2 and commands[0].endswith("nanoserve.py") and commands[1] in (ROOT / ".ci" / "run").read_text()


def test_python_example_in_the_readme(capsys):
    """The example runs, and says something."""
    [example] = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    exec(example, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_printed_steps_in_the_readme(capsys):
    """The lines quoted from the main job are lines of the main job, in that order."""
    import nanoserve
    assert nanoserve.main([]) == 0
    printed = capsys.readouterr().out
    [quoted] = [block for block in re.findall(r"^```\n(.*?)^```", README, re.M | re.S) if "goodput" in block]
    assert quoted in printed


def test_flags_named_in_the_readme():
    """Every flag that the README shows exists."""
    import nanoserve
    parser = nanoserve.build_parser()
    for line in re.findall(r"^venv/bin/python nanoserve\.py ([^#\n]*)", README, re.M):
        arguments = re.findall(r'"[^"]*"|\S+', line)
        if "-h" not in arguments:
            parser.parse_args([argument.strip('"') for argument in arguments])
