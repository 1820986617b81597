"""`python nanoserve.py bench`: throughput of a fixed, seeded workload, on tiny and on its 124M inflation.

Three figures a model, each the median of its runs:

    prefill    one long prompt, tokens/s to its first token
    decode     one stream of 128 tokens behind a prompt of 128, tokens/s after the first
    mixed      64 requests at once, long-tailed lengths, 16 seats: output tokens/s

Prompts are random ids and <|endoftext|> is ignored, so the work is fixed by the seed. Greedy, no prefix cache.
"""

import json
import os
import random
import statistics
import time

import torch

from kvcache import KERNEL_BLOCK_SIZE, Batch, KVCache
from nanoserve import Engine, SamplingParams


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def long_tailed(r, median, low=16, high=256):
    """A length with a log-normal distribution, redrawn until it lies in [low, high]."""
    while True:
        length = int(median * r.lognormvariate(0, 0.9))
        if low <= length <= high:
            return length


def prompt_of(r, length):
    return [r.randrange(1000) for _ in range(length)]       # ids of the embedded vocabulary, which both models share


def measure(repeat, **fields):
    engine = Engine(**fields, enable_prefix_caching=False)
    engine.generate([prompt_of(random.Random(0), 200)], greedy(4))          # touch weights and pool once
    longest = min(1000, engine.model.config.context_length - 12)
    prefill, decode, mixed, outside = [], [], [], []
    for run in range(repeat):
        r = random.Random(run)
        started = time.perf_counter()
        engine.generate([prompt_of(r, longest)], greedy(1))
        prefill.append(longest / (time.perf_counter() - started))

        request = engine.requests[engine.add_request(prompt_of(r, 128), greedy(128))]
        while engine.has_unfinished():
            engine.step()
        decode.append(127 / (request.last_token_time - request.first_token_time))

        r = random.Random(2)
        lengths = [(long_tailed(r, 64), long_tailed(r, 48)) for _ in range(64)]
        before = engine.stats.model_seconds, engine.stats.step_seconds
        started = time.perf_counter()
        done = engine.generate([prompt_of(r, prompt) for prompt, _ in lengths], [greedy(output) for _, output in lengths])
        mixed.append(sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - started))
        forward, whole = (now - then for now, then in zip((engine.stats.model_seconds, engine.stats.step_seconds), before))
        outside.append(1 - forward / whole)
    figures = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode, "mixed_tokens_per_s": mixed,
               "share_outside_forward": outside}
    return {name: statistics.median(values) for name, values in figures.items()}


def run_bench(quiet=False, fields=None):
    results = {}
    if not quiet:
        print(f"{str((fields or {}).get('dtype')):22} prefill tok/s   decode tok/s   mixed tok/s   outside the forward pass"
              .replace("None   ", "default"))
    for model, repeat in (("tiny", 5), ("gpt2", 1)):
        torch.set_num_threads(os.cpu_count())               # what the engine leaves alone for a large model
        results[model] = figures = measure(repeat, **{**(fields or {}), "model": model, "num_blocks": 1024})
        if not quiet:
            prefill, decode, mixed, outside = figures.values()
            print(f"{model:5} {torch.get_num_threads()} thread(s) {prefill:18,.0f} {decode:14,.1f} {mixed:13,.1f} {outside:26.1%}")
    print(json.dumps(results))


# ----------------------------------------------------------------------------------------------
# bench --kernels: decode attention on a GPU, beside a plain copy


def seconds_on(device, function, repeat=20):
    """Median seconds of one call, on the device's own clock."""
    function()
    times = []
    for _ in range(repeat):
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
