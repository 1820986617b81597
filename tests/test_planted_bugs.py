"""Every check has been seen to fail: each bug of planted_bugs.py, planted in fresh copies of the modules, is caught."""

import importlib
import signal
import sys
import warnings
from types import ModuleType

import pytest

from conftest import ROOT
from planted_bugs import BUGS, plant

OURS = ("kvcache", "scheduler", "spec", "nanoserve", "common", "labs", "load", "weights.tokenizer", "weights.safetensors", "weights.inflate")


PASSED = []                     # tests that have been seen to pass without a bug, with these arguments: once is enough


@pytest.fixture
def fresh_modules():
    """Whatever the test imports of ours, the others get their own modules back afterwards."""
    before = dict(sys.modules)
    for name in list(sys.modules):
        if name in OURS or name.startswith("test_"):
            del sys.modules[name]
    yield
    for name in list(sys.modules):
        if name in OURS or name.startswith("test_"):
            del sys.modules[name]
    sys.modules.update(before)


class TooLong(Exception):
    """The test hangs, or this machine is very slow."""


def run(caught_by, arguments, monkeypatch, seconds):
    """Import the test file, with whatever modules of ours are in place, and call the test, for so many seconds at most."""
    test_file, function = caught_by.split(".")
    test = getattr(importlib.import_module(test_file), function)

    def too_long(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        test(*[monkeypatch if argument == "monkeypatch" else argument for argument in arguments])
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_caught(bug, fresh_modules, monkeypatch):
    """With the bug in its module, the named test fails (or hangs, where that is what the bug does); without it, it passes in the
    same surroundings."""
    if (bug.caught_by, bug.arguments) not in PASSED:
        run(bug.caught_by, bug.arguments, monkeypatch, 300)
        PASSED.append((bug.caught_by, bug.arguments))
    for name in list(sys.modules):
        if name in OURS or name.startswith("test_"):
            del sys.modules[name]
    module = ModuleType(bug.file.removesuffix(".py"))
    module.__file__ = str(ROOT / bug.file)
    sys.modules[module.__name__] = module
    exec(compile(plant(bug, (ROOT / bug.file).read_text("utf-8")), bug.file, "exec"), module.__dict__)
    with pytest.raises((Exception, pytest.fail.Exception)) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(bug.caught_by, bug.arguments, monkeypatch, 10 if bug.hangs else 300)
    assert bug.hangs or caught.type is not TooLong
