"""Shared by all tests: the modules on the path, and one thread for torch (the test machine may be busy)."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
torch.set_num_threads(1)


AHEAD = ThreadPoolExecutor(1)       # for what other processes do: a compiler, a program under a sanitizer


def pytest_collection_finish(session):
    """In a run of all tests, modules that wait for other processes start them now: the tests keep one core busy, not two."""
    if len(session.items) > 1000 and not session.config.option.collectonly:
        for module in {item.module for item in session.items}:
            getattr(module, "start_ahead", lambda pool: None)(AHEAD)


def pytest_unconfigure():
    AHEAD.shutdown(wait=False, cancel_futures=True)


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
