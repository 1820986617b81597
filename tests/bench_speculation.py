"""What guessing brings, by kind of text: python tests/bench_speculation.py

For each kind and drafter: the share of runs that survive to each position beside rate^position, tokens per pass of the
target, tokens/s on this machine, and the speed-up under the roofline clock: an H100 that runs GPT-2's 124M shape as the
target and a model of two of its layers as the draft. On this machine tiny's passes are so short that Python and the draft
cost as much as they save; the roofline clock counts neither Python nor launches, so the truth of a real engine lies between.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from labs import Roofline, on_roofline
from nanoserve import Engine, SamplingParams

KINDS = {
    "JSON": [f'[{{"id": 1, "name": "{name}", "age": 7, "city": "Paris"}}, {{"id": 2,' for name in ("Mia", "Tom", "Ali", "Zoe")],
    "code": ["class Price:\n    def __init__(self, user, item, count):", "def count_", "def find_", "class Node:\n    def __init__(self, value):"],
    "Q&A": [f"Q: What is {i} + 3?\nA:" for i in (2, 3, 4, 5)],
    "story": ["Once upon a time", "Once upon a time, there was a kind", "Far away in Oslo, a brave", "On a windy Monday, Mia"],
    "log": [f"07:19 INFO user {name} opened item 66" for name in ("zilpa", "nora", "tom", "ravi")],
}
TARGET, DRAFT = (Roofline("h100", num_layers, width=768, vocab_size=50257) for num_layers in (12, 2))


def serve(prompts, seqs, temperature, max_tokens=100, roofline=False, **fields):
    """-> the stats of serving the prompts, `seqs` at a time, in turn, at least four of them."""
    engine = Engine(max_num_seqs=seqs, num_blocks=1024, max_num_batched_tokens=1024, enable_prefix_caching=False, **fields)
    if roofline:
        on_roofline(engine, TARGET, DRAFT)
    requests = max(4, seqs)
    engine.generate([prompts[i % len(prompts)] for i in range(requests)],
                    [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True) for i in range(requests)])
    return engine.stats


def speed(stats):
    return stats.delivered_tokens / stats.seconds


def main():
    print("T    text   drafter  survive to 1, 2, ...             rate^i                        tokens/pass  tok/s (plain)  roofline")
    for temperature in (0.0, 0.8):
        for kind, prompts in KINDS.items():
            plain = serve(prompts, 1, temperature), serve(prompts, 1, temperature, roofline=True)
            for drafter in ("ngram", "model"):
                fields = {"drafter": drafter, "num_draft_tokens": 6}
                stats, ideal = serve(prompts, 1, temperature, **fields), serve(prompts, 1, temperature, roofline=True, **fields)
                survived = [a / p for a, p in zip(stats.accepted_tokens, stats.proposed_tokens)]
                law = [survived[0] ** (i + 1) for i in range(len(survived))]
                print(f"{temperature:3} {kind:6} {drafter:7} ", " ".join(f"{s:.2f}" for s in survived).ljust(32),
                      " ".join(f"{s:.2f}" for s in law).ljust(30), f"{stats.tokens_per_pass:9.2f} {speed(stats):9,.0f} ({speed(plain[0]):5,.0f})"
                      f" {speed(ideal) / speed(plain[1]):8.2f}x")


if __name__ == "__main__":
    main()
