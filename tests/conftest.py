"""Shared by all tests: the modules on the path, and one thread for torch (the test machine may be busy)."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
torch.set_num_threads(1)


AHEAD = []                          # the process that compiles ahead, if there is one


def pytest_collection_finish(session):
    """In a run of all tests a second process compiles kernels from the start: the tests that need them wait less."""
    if len(session.items) > 1000 and not session.config.option.collectonly:
        AHEAD.append(subprocess.Popen([sys.executable, "-c", "import test_kernels; test_kernels.compile_ahead()"], cwd=ROOT / "tests",
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True))


def pytest_unconfigure():
    for process in AHEAD:
        with contextlib.suppress(ProcessLookupError):           # it has long finished
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(autouse=True)
def cpu_unless_marked_gpu(request, monkeypatch):
    """A machine with a GPU runs the same tests as one without, and those marked gpu on it."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def tiny():
    """(weights, tokenizer) of the embedded model."""
    from nanoserve import EMBEDDED, Tokenizer, load_weights
    return load_weights(EMBEDDED / "tiny"), Tokenizer.load(EMBEDDED / "tiny")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; `pytest -m gpu` runs only these")
