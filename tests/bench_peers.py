"""The same work on what a user would pick instead: python tests/bench_peers.py [--dtype float32] [--seats 16] ...

Hugging Face transformers, where it is installed (it is no requirement of this project): static batches, and its own
continuous batching. The weights are the same (tiny inflated to 124M), so are prompts and lengths, and every engine has as
many sequences at a time. One round runs each engine once, so that a disturbance meets all of them; the ratios are those of the
medians over the rounds. Greedy, <|endoftext|> ignored, no prefix cache. Outputs are checked for their length. On a CPU without
instructions for bfloat16, transformers multiplies it many times as slowly as float32: compare float32 there.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from bench import greedy, long_tailed, prompt_of
from nanoserve import Engine, load_model


def workload(requests):
    r = random.Random(2)
    lengths = [(long_tailed(r, 64), long_tailed(r, 48)) for _ in range(requests)]
    return [(prompt_of(r, prompt), output) for prompt, output in lengths]


def nanoserve_runner(dtype, seats):
    engine = Engine(model="gpt2", dtype=dtype, num_blocks=1024, max_num_seqs=seats, enable_prefix_caching=False)

    def run(requests):
        done = engine.generate([prompt for prompt, _ in requests], [greedy(output) for _, output in requests])
        assert [len(completion.token_ids) for completion in done] == [output for _, output in requests]

    return run


def transformers_model(dtype, attention):
    from transformers import GPT2Config, GPT2LMHeadModel
    weights, _ = load_model("gpt2", torch.float32)
    model = GPT2LMHeadModel(GPT2Config(attn_implementation=attention))
    model.load_state_dict({f"transformer.{name}": tensor for name, tensor in weights.items()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.to(getattr(torch, dtype)).eval()


def static_runner(dtype, seats):
    model = transformers_model(dtype, "sdpa")

    @torch.inference_mode()
    def run(requests):
        for i in range(0, len(requests), seats):
            part = requests[i:i + seats]
            longest, output = max(len(prompt) for prompt, _ in part), max(output for _, output in part)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
            out = model.generate(ids, attention_mask=mask, max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0)
            assert out.shape[1] == longest + output

    return run


def continuous_runner(dtype, seats):
    from transformers import ContinuousBatchingConfig, GenerationConfig
    model = transformers_model(dtype, "paged|sdpa")

    def run(requests):
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256, use_cuda_graph=False),
            continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512,
                                                                max_requests_per_batch=seats))
        manager.start()
        for i, (prompt, output) in enumerate(requests):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=output)
        done = {}
        while len(done) < len(requests):
            result = manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
        manager.stop(block=True)
        assert [done[str(i)] for i in range(len(requests))] == [output for _, output in requests]

    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64, help="of the mixed work; fewer where a peer would take hours")
    args = parser.parse_args()
    try:
        import transformers                                         # noqa: F401
    except ImportError:
        print("transformers is not installed here, so there is nothing to compare with (pip install transformers)")
        return
    mixed, r = workload(args.requests), random.Random(1)
    works = {"mixed, output tokens/s": (mixed, sum(output for _, output in mixed)),
             "decode of one stream, tokens/s": ([(prompt_of(r, 16), 128)], 128),
             "prefill of 1,000, tokens/s": ([(prompt_of(r, 1000), 1)], 1000)}
    makers = {"nanoserve": nanoserve_runner, "continuous batching": continuous_runner, "static batches": static_runner}
    runners = {name: make(args.dtype, args.seats) for name, make in makers.items()}
    for run in runners.values():
        run([(prompt_of(r, 20), 4)])                                # warm up
    for work, (requests, tokens) in works.items():
        rates = {name: [] for name in runners}
        for _ in range(args.repeat):
            for name, run in runners.items():
                started = time.perf_counter()
                run(requests)
                rates[name].append(tokens / (time.perf_counter() - started))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        print(f"{work}, {args.dtype}, {args.seats} seats")
        for name, rate in medians.items():
            print(f"    {name:22} {rate:9,.1f}   {medians['nanoserve'] / rate:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
