"""`python nanoserve.py bench`: how fast a fixed, seeded workload runs, and how fast it could, on tiny and on its 124M inflation.

First the machine, as the engine meets it (its threads, its type of number):

    memory     bytes/s of reading a tensor that no cache holds
    multiply   FLOP/s of [M, 768] @ [768, 3072], by the multiply that the engine's layers use, over copies that no cache holds

Then three workloads, the first two the median of their runs:

    prefill    one long prompt, tokens/s to its first token
    decode     one stream of 64 tokens behind a prompt of 64, tokens/s after the first
    mixed      64 requests at once, long-tailed lengths, 16 seats: output tokens/s

Beside each stands its floor. A step takes at least the time to move its bytes (weights once, K and V of every context) at
the memory's rate, and at least the time of its FLOPs at the best rate of the multiply; the larger of the two is the step's
floor, and a workload's floor is the sum over its steps. What is reached of it is floor / measured. A 16-bit type that a CPU has
no instructions for is multiplied in float32; then the floor has float32's rate, and still 16-bit bytes, since an engine could
convert them after reading. For tiny the floor says less: its weights stay in a cache, which is faster than memory.

Last, where the time of mixed went, part by part. That is a run of its own with a clock around every part, so that no clock
disturbs the figures above. It computes one step of several: the schedule of mixed does not depend on what the tokens
are. On a GPU a forward pass is one part, since its launches return before the work is done.

Prompts are random ids and <|endoftext|> is ignored, so the work is fixed by the seed. Greedy, no prefix cache, 1,024 blocks.

Nothing else may run meanwhile. With two threads every multiply ends when the slower thread does: one busy core more, and
all figures collapse many times over, the machine's own among them. So the machine is measured before and after the
workloads, the better of the two counts, and how far they are apart is printed.
"""

import copy
import itertools
import json
import math
import random
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F

import nanoserve
from kvcache import KERNEL_BLOCK_SIZE, Batch, KVCache
from common import greedy
from labs import Roofline, step_of
from nanoserve import Engine, multiply_by


@dataclass(frozen=True)
class Sizes:
    """Of the workloads, for one model."""

    prefill: int = 1000             # tokens of the long prompt, cut at the context length
    decode: int = 64                # tokens of the stream's prompt, and of its output
    mixed: int = 64                 # requests
    every: int = 8                  # under the clocks, one step of so many is computed
    repeat: int = 3                 # runs of prefill and of decode
    memory: int = 2**28             # bytes that are read to measure the machine: beyond any cache


MODELS = {"tiny": Sizes(every=2), "gpt2": Sizes()}


def long_tailed(r, median, low=16, high=256):
    """A length with a log-normal distribution, redrawn until it lies in [low, high]."""
    while True:
        length = int(median * r.lognormvariate(0, 0.9))
        if low <= length <= high:
            return length


def prompt_of(r, length):
    return [r.randrange(1000) for _ in range(length)]       # ids of the embedded vocabulary, which both models share


# ----------------------------------------------------------------------------------------------
# the machine, and the floors that stand on it


def seconds_on(device, function, repeat=20, limit=math.inf):
    """Median seconds of one call, on the device's own clock: of `repeat` calls, or of those that fit into `limit` seconds."""
    function()
    times = []
    while len(times) < repeat and sum(times) < limit:
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def measure_machine(device, dtype, memory):
    """With the threads that are set now -> (bytes/s read, {M: FLOP/s of [M, 768] @ [768, 3072]})."""
    numbers = torch.ones(memory // 8, dtype=torch.int64, device=device)     # adding integers waits for memory alone
    bandwidth = memory / seconds_on(device, numbers.sum)
    fan_in, fan_out, rates = 768, 3072, {}
    copies = [multiply_by(torch.randn(fan_in, fan_out, device=device).to(dtype), torch.randn(fan_out, device=device).to(dtype))
              for _ in range(math.ceil(memory / (fan_in * fan_out * dtype.itemsize)))]
    for M in (1, 16, 256):
        x, turn = torch.randn(M, fan_in, device=device).to(dtype), itertools.cycle(copies)
        rates[M] = 2 * M * fan_in * fan_out / seconds_on(device, lambda: next(turn)(x), repeat=2 * len(copies), limit=1.0)
    return bandwidth, rates


def measure_peak(device, dtype, memory):
    """-> [bytes/s, {M: FLOP/s}, the best FLOP/s that a floor may count on]."""
    bandwidth, rates = measure_machine(device, dtype, memory)
    others = measure_machine(device, torch.float32, memory)[1] if dtype.itemsize < 4 else {}
    return bandwidth, rates, max(*rates.values(), *others.values())


def better(one, other):
    """Of two answers of measure_peak, number by number -> (that answer, the least that the worse number is of the better)."""
    (bandwidth, rates, peak), (bandwidth2, rates2, peak2) = one, other
    pairs = [(bandwidth, bandwidth2), (peak, peak2), *((rates[M], rates2[M]) for M in rates)]
    best = max(pairs[0]), {M: max(rates[M], rates2[M]) for M in rates}, max(pairs[1])
    return best, min(min(pair) / max(pair) for pair in pairs)


def record_steps(engine):
    """The steps that the engine's model computes from now on, as Roofline takes them -> a list that grows."""
    steps, forward = [], engine.model.forward

    def recorded(batch, cache):
        steps.append(step_of(batch))
        return forward(batch, cache)

    engine.model.forward = recorded
    return steps


def floor_of(roofline, steps):
    """-> (seconds that the steps take at best, those to compute alone, those to move alone), each a sum over the steps."""
    bounds = [roofline.bounds(*step) for step in steps]
    return sum(map(max, bounds)), sum(compute for compute, _ in bounds), sum(move for _, move in bounds)


def floor_of_part(roofline, steps, part):
    """The same, counting only "linear", "head" or "kv". -> seconds at best. The parts' floors can add up to more than the
    whole's, where one part waits for memory while another computes."""
    alone = copy.copy(roofline)
    for other in {"linear", "head", "kv"} - {part}:
        setattr(alone, other, 0)
    return floor_of(alone, steps)[0]


# ----------------------------------------------------------------------------------------------
# where the time went

LINEAR, ATTENTION, HEAD = "linear layers", "attention, with writing K/V", "head"
NORM, GELU, FORWARD = "layer norms", "GELU", "rest of the forward pass: embedding, sums, to NumPy"
SAMPLING, SCHEDULING, BUILDING, GUESSING = "sampling", "scheduling", "building the batch", "guessing"
PYTHON = "Python: text, counters, the loop"
INSIDE = (LINEAR, ATTENTION, HEAD, NORM, GELU, FORWARD)                 # a forward pass
PARTS = (*INSIDE, SAMPLING, SCHEDULING, BUILDING, GUESSING, PYTHON)
FLOORS = {LINEAR: "linear", ATTENTION: "kv", HEAD: "head"}


class PartsClock:
    """Books every moment to one part: that of the innermost call that is running. So the parts add up to the whole."""

    def __init__(self, part, now=time.perf_counter):
        self.seconds, self.part, self.now = Counter(), part, now
        self.since = now()

    def switch(self, part):
        """-> the part that was running."""
        now = self.now()
        self.seconds[self.part] += now - self.since
        before, self.part, self.since = self.part, part, now
        return before

    def around(self, function, part):
        def timed(*args, **options):
            before = self.switch(part)
            try:
                return function(*args, **options)
            finally:
                self.switch(before)
        return timed


def break_down(engine, run, every=1):
    """Call run() with a clock around every part of the engine -> {part: seconds of a step}. The engine is left as it was.

    every > 1: the model computes one step of so many, and its last logits stand in for the others'.
    """
    clock, turn = PartsClock(PYTHON), itertools.count()
    forward, kept = clock.around(engine.model.forward, FORWARD), [torch.zeros(1, engine.model.config.vocab_size)]

    def stand_in(batch, logits=None):
        if logits is not None:
            kept[0] = logits.float().cpu() if len(logits) else kept[0]
            return logits
        return kept[0][torch.arange(len(batch.logit_rows)) % len(kept[0])]

    stand_in = clock.around(stand_in, "standing in")                    # nobody's part

    def sometimes(batch, cache):
        return stand_in(batch) if next(turn) % every else stand_in(batch, forward(batch, cache))

    calls = [(nanoserve, "to_numpy", FORWARD), (Batch, "build", BUILDING),
             (nanoserve, "target_probs", SAMPLING), (nanoserve, "verify", SAMPLING),
             *((engine.scheduler, name, SCHEDULING) for name in ("schedule", "advance", "finish"))]
    calls += [(engine.drafter, name, GUESSING) for name in ("guess", "fill", "follow")]
    multiplies = {}
    if engine.cache.k.device.type == "cpu":
        calls += [(engine.cache, "attend", ATTENTION), (F, "layer_norm", NORM), (F, "gelu", GELU)]
        multiplies = engine.model.multiply
    with ExitStack() as patches:
        patches.enter_context(patch.object(engine.model, "forward", sometimes))
        for owner, name, part in calls:
            patches.enter_context(patch.object(owner, name, clock.around(getattr(owner, name), part)))
        patches.enter_context(patch.dict(multiplies, {
            name: clock.around(multiply, HEAD if name == "head" else LINEAR) for name, multiply in multiplies.items()}))
        clock.switch(PYTHON)            # installing the clocks is nobody's part
        clock.seconds.clear()
        run()
        clock.switch(PYTHON)
    steps = next(turn)
    computed = math.ceil(steps / every)
    return {part: clock.seconds[part] / (computed if part in INSIDE else steps) for part in PARTS if part in clock.seconds}


# ----------------------------------------------------------------------------------------------
# the workloads


def measure(sizes, fields):
    """-> all figures of one model, as they stand in the JSON."""
    engine = Engine(**fields)
    shape, model = engine.model.config, getattr(engine.model, "model", engine.model)        # on a GPU it is inside its graphs
    device, dtype = engine.cache.k.device, model.weights["wte.weight"].dtype
    machine = measure_peak(device, dtype, sizes.memory)
    steps = record_steps(engine)
    engine.generate([prompt_of(random.Random(0), 200)], [greedy(4)])        # touch weights and pool once

    def timed(run):
        """-> (tokens that run() made, its seconds, its steps)."""
        steps.clear()
        started = time.perf_counter()
        tokens = run()
        return tokens, time.perf_counter() - started, steps[:]

    def prefill(r):
        prompt = prompt_of(r, min(sizes.prefill, shape.context_length - 12))
        engine.generate([prompt], [greedy(1)])
        return len(prompt)

    def decode(request):
        first = request.num_output_tokens
        while engine.has_unfinished():
            engine.step()
        return request.num_output_tokens - first

    def first_token(r):
        request = engine.requests[engine.add_request(prompt_of(r, sizes.decode), greedy(sizes.decode))]
        while not request.num_output_tokens:
            engine.step()
        return request

    def mixed():
        r = random.Random(2)
        lengths = [(long_tailed(r, 64), long_tailed(r, 48)) for _ in range(sizes.mixed)]
        done = engine.generate([prompt_of(r, prompt) for prompt, _ in lengths], [greedy(output) for _, output in lengths])
        return sum(len(completion.token_ids) for completion in done)

    runs = {"prefill": [], "decode": [], "mixed": []}
    for i in range(sizes.repeat):
        r = random.Random(i)
        runs["prefill"].append(timed(lambda: prefill(r)))
        request = first_token(r)
        runs["decode"].append(timed(lambda: decode(request)))
    before = engine.stats.model_seconds, engine.stats.step_seconds
    runs["mixed"].append(timed(mixed))
    forward, whole = (now - then for now, then in zip((engine.stats.model_seconds, engine.stats.step_seconds), before))
    outside = 1 - forward / whole
    steps.clear()
    parts = break_down(engine, mixed, 1 if engine.config.drafter else sizes.every)     # what guesses are right, the tokens decide
    broken_down = steps[:]

    (bandwidth, rates, peak), steadiness = better(machine, measure_peak(device, dtype, sizes.memory))
    roofline = Roofline((peak, bandwidth), shape.num_layers, shape.width, shape.vocab_size, dtype.itemsize)
    result = {"dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads(), "steadiness": steadiness,
              "memory_GB_per_s": bandwidth / 1e9, "best_GFLOP_per_s": peak / 1e9,
              "multiply_GFLOP_per_s": {M: rate / 1e9 for M, rate in rates.items()}}
    for work, figures in runs.items():
        figures = [(tokens, seconds, *floor_of(roofline, its_steps)) for tokens, seconds, its_steps in figures]
        tokens, seconds, floor, compute, move = (statistics.median(column) for column in zip(*figures))
        result[work] = {"tokens_per_s": tokens / seconds, "seconds": seconds, "floor_seconds": floor,
                        "share_of_floor": floor / seconds, "seconds_to_compute": compute, "seconds_to_move": move}
    result["mixed"] |= {"steps": len(runs["mixed"][0][2]), "share_outside_forward": outside}
    whole = sum(parts.values())
    shares = {part: {"ms_per_step": seconds * 1e3, "share": seconds / whole} for part, seconds in parts.items()}
    for part in FLOORS.keys() & shares.keys():
        shares[part]["floor_ms_per_step"] = floor_of_part(roofline, broken_down, FLOORS[part]) / len(broken_down) * 1e3
    result["breakdown"] = {"steps_computed": len(broken_down), "ms_per_step": whole * 1e3, "parts": shares}
    return result


def print_model(name, result):
    rates = ", ".join(f"M={M} {rate:,.1f}" for M, rate in result["multiply_GFLOP_per_s"].items())
    print(f"""{name}, {result['dtype']}, {result['threads']} thread(s)
    memory      {result['memory_GB_per_s']:,.1f} GB/s read
    multiply    [M, 768] @ [768, 3072], GFLOP/s: {rates}; best {result['best_GFLOP_per_s']:,.1f}
    steadiness  {result['steadiness']:.0%}: the worst of these, before or after the workloads, beside the better that counts

    measured      tokens/s   seconds   floor, s   reached   bytes alone, s   FLOPs alone, s""")
    for work in ("prefill", "decode", "mixed"):
        f = result[work]
        print(f"    {work:8} {f['tokens_per_s']:13,.1f} {f['seconds']:9.3f} {f['floor_seconds']:10.3f} {f['share_of_floor']:9.1%} "
              f"{f['seconds_to_move']:16.3f} {f['seconds_to_compute']:16.3f}")
    mixed, breakdown = result["mixed"], result["breakdown"]
    print(f"    mixed: {mixed['steps']} steps of {mixed['seconds'] / mixed['steps'] * 1e3:.2f} ms, "
          f"{mixed['share_outside_forward']:.1%} of it outside the forward pass\n")
    print(f"    {'where a step of mixed went':52}     ms    share   floor, ms")
    for part, f in breakdown["parts"].items():
        floor = f"{f['floor_ms_per_step']:12.2f}" if "floor_ms_per_step" in f else ""
        print(f"    {part:52} {f['ms_per_step']:6.2f} {f['share']:8.1%}{floor}")
    print(f"    {'the whole step':52} {breakdown['ms_per_step']:6.2f}\n    (a run of its own, with a clock around every part, that "
          f"computes {breakdown['steps_computed']} of the steps; the figures above it are without clocks)\n", flush=True)


def run_bench(quiet=False, fields=None, models=MODELS):
    """fields: of EngineConfig; the model, the pool and the prefix cache are the benchmark's own."""
    own = {"model", "num_blocks"} & (fields or {}).keys()
    nanoserve.require(not own, f"{', '.join(sorted(own))}: the benchmark's own, it can't be set")
    results, threads = {}, torch.get_num_threads()
    for model, sizes in models.items():
        results[model] = measure(sizes, {**(fields or {}), "model": model, "num_blocks": 1024, "enable_prefix_caching": False})
        torch.set_num_threads(threads)          # an engine for a small model sets its own
        if not quiet:
            print_model(model, results[model])
    print(json.dumps(results))


# ----------------------------------------------------------------------------------------------
# bench --kernels: decode attention on a GPU, beside a plain copy


def measure_copy(device, copy_bytes):
    """Bytes per second of a copy, read and written."""
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * copy_bytes / seconds_on(device, lambda: target.copy_(source))


def measure_kernels(device, shapes, dtype=torch.float16, H=12, D=64, copy_bytes=2**30, max_layers=10**6):
    """-> (GB/s of a copy, list of dicts: batch, context, microseconds, GB/s of K and V read, floor in microseconds)."""
    copy_rate = measure_copy(device, copy_bytes)
    rows = []
    for sequences, context in shapes:
        blocks_each = -(-context // KERNEL_BLOCK_SIZE)
        read = 2 * sequences * context * H * D * dtype.itemsize                         # bytes of K and V in one layer
        layers = max(1, min(max_layers, 2**28 // read))                                 # visit so many that no cache helps
        cache = KVCache(layers, sequences * blocks_each, KERNEL_BLOCK_SIZE, H, D, dtype, device, "cuda")
        order = torch.randperm(sequences * blocks_each).view(sequences, blocks_each).tolist()
        batch = Batch.build([([0], context - 1, order[i], 1) for i in range(sequences)], KERNEL_BLOCK_SIZE)
        qkv = torch.randn(sequences, 3, H, D, device=device).to(dtype)
        q, k, v = qkv.unbind(1)

        def one_pass():
            for layer in range(layers):
                cache.attend(layer, q, k, v, batch)

        run = one_pass
        if device.type == "cuda":           # a graph: from Python, launching would take longer than most of these kernels run
            one_pass()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one_pass()
            run = graph.replay
        seconds = seconds_on(device, run) / layers
        rows.append({"sequences": sequences, "context": context, "us": seconds * 1e6, "GB_per_s": read / seconds / 1e9,
                     "floor_us": read / copy_rate * 1e6, "splits": batch.launch_plan.splits})
    return copy_rate / 1e9, rows


def run_kernels(quiet=False):
    if not torch.cuda.is_available():
        raise ValueError("bench --kernels: torch sees no CUDA GPU here, and kernels have no speed without one")
    device = torch.device("cuda")
    rate, rows = measure_kernels(device, [(n, context) for n in (1, 8, 64, 256) for context in (128, 1024, 8192)])
    if not quiet:
        print(f"{torch.cuda.get_device_name()}: a copy moves {rate:,.0f} GB/s. Decode attention, float16, 12 heads of 64:")
        print("sequences   context   splits     us   floor us   GB/s   of a copy")
        for row in rows:
            print(f"{row['sequences']:9} {row['context']:9} {row['splits']:8} {row['us']:6.1f} {row['floor_us']:10.1f} "
                  f"{row['GB_per_s']:6.0f} {row['GB_per_s'] / rate:11.0%}")
    print(json.dumps({"copy_GB_per_s": rate, "decode": rows}))
