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


def measure(model, repeat):
    engine = Engine(model=model, num_blocks=1024, enable_prefix_caching=False)
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


def run_bench(quiet=False, threads=None):
    results = {}
    if not quiet:
        print("float32 on the CPU     prefill tok/s   decode tok/s   mixed tok/s   outside the forward pass")
    for model, repeat in (("tiny", 5), ("gpt2", 1)):
        torch.set_num_threads(threads or (1 if model == "tiny" else os.cpu_count()))
        results[model] = figures = measure(model, repeat)
        if not quiet:
            prefill, decode, mixed, outside = figures.values()
            print(f"{model:5} {torch.get_num_threads()} thread(s) {prefill:18,.0f} {decode:14,.1f} {mixed:13,.1f} {outside:26.1%}")
    print(json.dumps(results))
