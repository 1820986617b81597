"""Experiments: the same jobs served under several configs, side by side. `python nanoserve.py lab NAME` runs those of
walkthrough.md; your own begin with `from nanoserve import job, run, compare`.

Two clocks. Seconds on this machine, and the roofline clock of a GPU named by its datasheet, which nothing disturbs.
"""

import functools
import json
import re
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import nanoserve
from nanoserve import Engine, SamplingParams, bar, events, play, require


class Roofline:
    """What a pass takes at best: max(FLOPs / peak, bytes / bandwidth) of a named GPU. A clock that can't be disturbed.

    The rates are those of the makers' datasheets (SXM modules, dense half precision). No launch overhead, no inefficiency:
    it tells which of the two bounds a pass, and how passes compare, not what a stopwatch would show.

    >>> gpu = Roofline("h100", num_layers=12, width=768, vocab_size=50257)
    >>> one, five = gpu.seconds([1], [100], 1), gpu.seconds([5], [104], 5)      # checking five costs what one costs
    >>> round(one * 1e6, 1), round(five / one, 3)
    (74.9, 1.001)
    """

    GPUS = {"h100": (989e12, 3.35e12), "a100": (312e12, 2.04e12)}       # FLOP/s, bytes/s

    def __init__(self, gpu, num_layers, width, vocab_size, itemsize=2):
        self.peak, self.bandwidth = self.GPUS[gpu] if isinstance(gpu, str) else gpu
        self.linear, self.head = 12 * num_layers * width ** 2, vocab_size * width       # parameters; every one is read once
        self.kv, self.itemsize = 2 * num_layers * width, itemsize                       # numbers of K and V per token

    def bounds(self, counts, contexts, num_logits):
        """-> (seconds to compute, seconds to move). counts [R]: new tokens; contexts [R]: tokens in the cache afterwards."""
        rows = sum(counts)
        seen = sum(n * context - n * (n - 1) / 2 for n, context in zip(counts, contexts))       # (row, key) pairs
        flops = 2 * self.linear * rows + 2 * self.head * num_logits + 2 * self.kv * seen
        numbers = self.linear + self.head * (num_logits > 0) + self.kv * (sum(contexts) + rows)
        return flops / self.peak, numbers * self.itemsize / self.bandwidth

    def seconds(self, counts, contexts, num_logits):
        return max(self.bounds(counts, contexts, num_logits))


def step_of(batch):
    """A step as Roofline takes it: (counts, contexts, num_logits)."""
    return np.diff(batch.query_start).tolist(), batch.context_len.tolist(), len(batch.logit_rows)


def job(prompt, at=0, name=None, **params):
    """(step before which it arrives, prompt, SamplingParams, name); greedy and of exactly max_tokens, unless params differ."""
    return at, prompt, SamplingParams(**{"temperature": 0, "ignore_eos": True} | params), name


def on_roofline(engine, *rooflines):
    """Let the engine's clock tick by Rooflines: the target's for each of its passes, and the draft model's, if it has one.
    -> a list that grows by (seconds to compute, seconds to move) with each pass of the target."""
    now, bounds, draft = [0.0], [[], []], [engine.drafter.model] if hasattr(engine.drafter, "model") else []
    engine.clock = lambda: now[0]
    for model, roofline, passes in zip([engine.model, *draft], rooflines, bounds):
        def timed(batch, cache, forward=model.forward, roofline=roofline, passes=passes):
            passes.append(roofline.bounds(*step_of(batch)))
            now[0] += max(passes[-1])
            return forward(batch, cache)
        model.forward = timed
    return bounds[0]


def run(jobs, gpu="h100", probe=None, recorder=None, **fields):
    """Serve jobs on a new engine with these fields of EngineConfig. -> what `compare` compares: engine, stats, requests, the
    bounds of each pass, what probe(engine) returned after each step, seconds on this machine.

    In float64, so that tokens and counts are the same on every machine. By the roofline clock of a GPU that runs GPT-2's 124M
    shape, and two of its layers as a draft model: tiny, inflated to that shape, has the same texts, so it has the same schedule.
    """
    engine = Engine(**{"dtype": "float64"} | fields)
    rates = this_machine() if gpu == "this" else gpu
    bounds, probed = on_roofline(engine, *(Roofline(rates, num_layers, 768, 50257) for num_layers in (12, 2))), []
    if probe:
        engine.watchers.append(lambda outputs: probed.append(probe(engine)))
    if recorder:
        recorder.attach(engine)
    started = time.perf_counter()
    requests = play(engine, jobs)
    return SimpleNamespace(engine=engine, stats=engine.stats, requests={r.request_id: r for r in requests}, bounds=bounds,
                           probed=probed, wall=time.perf_counter() - started)


@functools.cache
def this_machine():
    """(FLOP/s, bytes/s) of the machine at hand, as the benchmark measures them; once, so that all runs go by the same clock."""
    from bench import measure_peak          # bench takes Roofline from here
    bandwidth, _, peak = measure_peak(torch.device("cpu"), torch.float32, 2**28)
    return peak, bandwidth


def number(value):
    """In at most seven characters. None is a figure that there was nothing to measure for.

    >>> [number(value) for value in (None, 512, 18240.4, 0.21875, 0.0019640001)]
    ['-', '512', '18,240', '0.2188', '0.002']
    """
    if value is None:
        return "-"
    text = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
    return text if len(text) <= 7 else f"{value:.3f}"


SECONDS_HERE = "seconds on this machine"       # the one line of a lab that is not the same everywhere


def compare(runs, figures, out=print):
    """Print figures of runs side by side, each with a bar, whether all gave the same tokens to the same prompts, and the time
    on both clocks. runs: label -> run; figures: label -> name of a stat, or function of a run, None if there is nothing to
    measure. -> {figure: {label: value}}."""
    table = {label: {name: getattr(r.stats, figure) if isinstance(figure, str) else figure(r) for name, r in runs.items()}
             for label, figure in (figures | {"ms, roofline clock": lambda r: r.stats.seconds * 1e3}).items()}
    width = 50 // len(runs)
    out((" " * 28 + "".join(f"{name:{width}}" for name in runs)).rstrip())
    for label, row in table.items():
        most = max((value for value in row.values() if value is not None), default=0) or 1
        cells = [f"{number(value):7} {bar((value or 0) / most, width - 10) if width > 13 else ''}" for value in row.values()]
        out((f"{label:28}" + "".join(f"{cell:{width}}" for cell in cells)).rstrip())
    # Jobs are compared where another run has the one of that name with the same prompt.
    said = {}
    for name, a in runs.items():
        for r in a.requests.values():
            said.setdefault((r.request_id, *r.completion.prompt_token_ids), {})[name] = r.completion.token_ids
    same = all(len(set(map(tuple, tokens.values()))) == 1 for tokens in said.values())
    alone = runs.keys() - {name for tokens in said.values() if len(tokens) > 1 for name in tokens}
    out(f"same tokens: {'yes' if same else 'NO'}" + f" (but other prompts: {', '.join(sorted(alone))})" * bool(alone))
    out((f"{SECONDS_HERE:28}" + "".join(f"{r.wall:<{width}.2f}" for r in runs.values())).rstrip())
    return table | {"same tokens": same}


# ----------------------------------------------------------------------------------------------
# the schedule as a picture


class Trace:
    """The schedule, step by step, for ui.perfetto.dev or chrome://tracing: a row per request with what each step computed of it,
    marks where it was admitted, preempted and finished, and curves of the pool, the queue and goodput."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")       # now: a path that can't be written is said before the work is done
        self.events, self.num_engines = [], 0

    def attach(self, engine):
        """Follow this engine, too: each is a process of its own in the picture."""
        self.num_engines += 1
        engine.watchers.append(functools.partial(self.step, engine, self.num_engines))

    def save(self):
        with self.file as file:
            json.dump({"traceEvents": self.events}, file)

    def step(self, engine, pid, outputs):
        start, end = engine.last_step

        def add(phase, seconds, name, row=0, **more):
            self.events.append({"ph": phase, "ts": seconds * 1e6, "pid": pid, "tid": row, "name": name, **more})

        for request, position, n, guesses in engine.last_batch:
            decode = n - guesses == 1 and position >= request.num_prompt_tokens
            name = f"decode, {guesses} guesses" if decode else f"recompute {n}" if request.num_preemptions else f"prefill {n}"
            add("X", start, name, request.arrival, dur=(end - start) * 1e6, args={"position": position, "tokens": n})
        for sign, request, words in events(engine, outputs):
            add("i", end if sign == "=" else start, words, request.arrival, s="t")
            add("M", start, "thread_name", request.arrival, args={"name": request.request_id})
        for name in ("kv_used", "running", "waiting", "goodput"):
            add("C", end, name, args={name: getattr(engine.stats, name)})


# ----------------------------------------------------------------------------------------------
# the command


def find_labs(path):
    """name -> source of the fenced blocks that begin with ```python lab=NAME."""
    require(path.is_file(), f"there is no file {path}")
    found = re.findall(r"^```python lab=([\w-]+) *\n(.*?)^``` *$", path.read_text("utf-8"), re.M | re.S)
    require(found, f"{path.name} has no lab: a lab is a block that begins with ```python lab=NAME")
    require(len(dict(found)) == len(found), f"{path.name} has two labs of one name: {', '.join(name for name, _ in found)}")
    return dict(found)


WALKTHROUGH = Path(__file__).parent.parent / "walkthrough.md"


def run_labs(name, gpu="h100", recorder=None, quiet=False, out=print):
    """NAME of walkthrough.md, FILE.md#NAME, or all. -> {name: what its compare() calls returned}."""
    require(gpu in (*Roofline.GPUS, "this"), f"gpu={gpu!r}: it must be one of {', '.join(Roofline.GPUS)}, this")
    require("#" in name or not name.endswith(".md"), f"{name} is a file: say {name}#NAME, or {name}#all")
    file, _, name = name.rpartition("#")
    path, results = Path(file or WALKTHROUGH), {}
    blocks, out = find_labs(path), (lambda *_: None) if quiet else out
    require(name in (*blocks, "all"), f"{path.name} has no lab {name!r}: it has {', '.join(blocks)}, or say all")
    if gpu == "this":
        out("This machine: {:,.0f} GFLOP/s, {:,.1f} GB/s.\n".format(*(rate / 1e9 for rate in this_machine())))
    for name in blocks if name == "all" else [name]:
        claim, *rest = [line[2:] for line in blocks[name].splitlines() if line.startswith("# ")] or [""]
        out(f"=== {name}: {claim}\n")
        results[name] = []

        def compare_and_keep(runs, figures, tables=results[name]):
            tables.append(compare(runs, figures, out))
            return tables[-1]

        try:
            exec(compile(blocks[name], f"{path.name}#{name}", "exec"), {
                **vars(nanoserve), **globals(), "print": out, "run": functools.partial(run, gpu=gpu, recorder=recorder),
                "compare": compare_and_keep})
        except BrokenPipeError:                 # nobody reads on: no mistake of the block
            raise
        except Exception as error:              # the block is a reader's own: their mistake is one sentence, like any other
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"{path.name}#{name}"]
            where = f", line {getattr(error, 'lineno', None) or (lines or [0])[-1]} of the block"
            raise ValueError(f"{path.name}#{name}{where}: {type(error).__name__}: {error}") from None
        out("\n" + "\n".join(rest) + "\n")
    return results
