"""Load on the HTTP endpoint, and whether it stood it: python tests/load.py --requests 2000 --concurrency 200 --vanish 0.1

Clients arrive at random moments, with prompts and outputs of mixed lengths; some prompts begin alike, every other answer is
streamed, and a share of the clients vanish at a random moment. Afterwards: how fast it was, whether every answer is what the
engine says when it is alone with that prompt, and whether the server is empty again.

Without --url it loads a server of its own in this process, with a pool so small that requests are preempted. A server at --url
must serve the embedded model in float64, so that answers can be compared: python nanoserve.py serve --dtype float64
"""

import argparse
import http.client
import json
import os
import random
import re
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanoserve import Engine, SamplingParams, Server

WORDS = "the a owl fox river Monday small red apple ran saw and then because Q: What comes after? 3 + 4 = Once upon time".split()
PREFIXES = ["Once upon a time there was a small red fox. " * 4, "Q: What day comes after Monday?\nA: Tuesday.\n" * 5]
SAMPLED = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 20}, {"temperature": 1, "top_p": 0.8}]
LIMIT = 300                                             # seconds without a byte until a client calls it an error
IDLE = "num_requests_running", "num_requests_waiting", "kv_used"


def workload(requests, vanish, rate, seed):
    """-> list of (seconds since the last arrival, body, seconds until the client vanishes or None)."""
    rng, jobs = random.Random(seed), []
    for i in range(requests):
        prompt = rng.choice(["", "", *PREFIXES]) + " ".join(rng.choices(WORDS, k=rng.choice([1, 4, 12, 40])))
        body = {"prompt": prompt, "max_tokens": min(1 + int(rng.expovariate(1 / 7)), 56), "seed": i, **rng.choice(SAMPLED)}
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        patience = rng.choice([0.0, rng.expovariate(5), rng.expovariate(1)]) if rng.random() < vanish else None
        jobs.append((rng.expovariate(rate), body, patience))
    return jobs


@dataclass
class Outcome:
    """What came of one request: completed, vanished (the client, on purpose), refused (429) or error."""

    kind: str = "error"
    text: str = ""
    reason: str | None = None
    tokens: int = 0
    times: list = field(default_factory=list)           # when the request was sent, and when each chunk of a stream came
    words: str = ""


def client(url, body, patience):
    """One request from start to end. -> Outcome. With patience, the client leaves after so many seconds, every other one
    without a goodbye (a TCP reset)."""
    outcome, sock, response = Outcome(), None, None
    began = time.perf_counter()
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT)

    def stay():
        """Leave if patience is at its end; wait no longer than that for the next bytes."""
        left = LIMIT if patience is None else began + patience - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)

    try:
        connection.connect()
        sock = connection.sock
        outcome.times.append(time.perf_counter())
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        stay()
        response = connection.getresponse()
        if response.status != 200:
            outcome.kind = "refused" if response.status == 429 else "error"
            outcome.words = f"{response.status} {response.read()[:200]}"
        elif body.get("stream"):
            for line in response:
                stay()
                if line.startswith(b"data: {"):
                    take(outcome, json.loads(line[6:]), time.perf_counter())
                elif line == b"data: [DONE]\n":
                    outcome.kind = "completed" if outcome.reason in ("stop", "length") else "error"
        else:
            take(outcome, json.loads(response.read()))
            outcome.kind = "completed" if outcome.reason in ("stop", "length") else "error"
    except (OSError, ValueError, http.client.HTTPException) as error:
        outcome.kind = "vanished" if isinstance(error, TimeoutError) and patience is not None else "error"
        outcome.words = repr(error)
        if outcome.kind == "vanished" and body["seed"] % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        connection.close()
        if response:
            response.close()
    return outcome


def take(outcome, answer, now=None):
    """Book an answer, or a chunk of one."""
    for choice in answer.get("choices", []):
        outcome.text += choice["text"]
        outcome.reason = choice["finish_reason"]
        outcome.times += [now] * (now is not None)
    outcome.tokens = (answer.get("usage") or {}).get("completion_tokens", 0)
    outcome.words = str(answer.get("error", ""))


def cold(bodies):
    """What the engine says to each of them alone. -> [(text, finish_reason)]"""
    engine = Engine(dtype="float64", enable_prefix_caching=False)
    names = "max_tokens", "seed", "temperature", "top_k", "top_p"
    for body in bodies:
        [answer] = engine.generate(body["prompt"], SamplingParams(**{name: body[name] for name in names if name in body}))
        yield answer.text, answer.finish_reason


def metrics(url):
    """name -> value, of the samples without labels."""
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=LIMIT)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^nanoserve:(\w+) (\S+)$", text, re.M)}


def left_behind(url, seconds=10):
    """What the server still holds, once it holds nothing or the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        values = metrics(url)
        held = {name: values[name] for name in IDLE}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.05)


def rss(pid):
    """Megabytes of memory that a process has, or None if nobody can tell."""
    status = Path(f"/proc/{pid}/status")
    return int(re.search(r"VmRSS:\s*(\d+)", status.read_text())[1]) / 1024 if status.exists() else None


def load(url, requests=200, concurrency=50, vanish=0.1, rate=200.0, seed=0, pid=None):
    """Put the load on the server. -> all that is to be told, by name; "outcomes" has an Outcome for each request."""
    url, jobs, sizes = urlsplit(url), workload(requests, vanish, rate, seed), []
    began = time.perf_counter()
    with ThreadPoolExecutor(min(concurrency, 250)) as clients:
        futures = []
        for i, (gap, body, patience) in enumerate(jobs):
            if pid and i % max(requests // 2, 1) == 0:
                sizes.append(rss(pid))
            time.sleep(gap)
            futures.append(clients.submit(client, url, body, patience))
        outcomes = [future.result() for future in futures]
    seconds, held = time.perf_counter() - began, left_behind(url)
    sizes += [rss(pid)] if pid else []
    done = [(body, outcome) for (_, body, _), outcome in zip(jobs, outcomes) if outcome.kind == "completed"]
    answers = cold(body for body, _ in done)
    wrong = [(body, outcome) for (body, outcome), answer in zip(done, answers) if (outcome.text, outcome.reason) != answer]
    streams = [outcome.times for _, outcome in done if len(outcome.times) > 1]
    return {"outcomes": outcomes, "seconds": seconds, "left behind": held, "wrong": wrong, "rss": sizes,
            "tokens/s": sum(outcome.tokens for _, outcome in done) / seconds,
            "TTFT": [times[1] - times[0] for times in streams],
            "ITL": [after - before for times in streams for before, after in zip(times[1:], times[2:])]}


def percentile(values, share):
    """
    >>> [percentile([3, 1, 2, 4], share) for share in (0, 0.5, 1)]
    [1, 3, 4]
    """
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the server; without one, a server in this process is loaded")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    for name, default in (("requests", 200), ("concurrency", 50), ("vanish", 0.1), ("rate", 200.0), ("seed", 0)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    args = vars(parser.parse_args())
    if not args["url"]:
        server = Server(Engine(dtype="float64", num_blocks=96), "127.0.0.1", 0, max_queue=256)
        args |= {"url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}
    told = load(**args)
    kinds = [outcome.kind for outcome in told["outcomes"]]
    for kind in ("completed", "vanished", "refused", "error"):
        print(f"{kind:16} {kinds.count(kind)}")
    for words in sorted({outcome.words for outcome in told["outcomes"] if outcome.kind == "error"})[:5]:
        print(f"                 {words}")
    print(f"\n{'ms':16} {'p50':>8} {'p90':>8} {'p99':>8}")
    for name in ("TTFT", "ITL"):
        print(f"{name + ' of streams':16}", *(f"{1e3 * percentile(told[name], share):8.1f}" for share in (0.5, 0.9, 0.99)))
    print(f"\n{told['tokens/s']:.0f} tokens/s over {told['seconds']:.1f} s")
    print(f"{len(told['wrong'])} of {kinds.count('completed')} completed texts differ from the cold run's")
    for body, outcome in told["wrong"][:3]:
        print(f"    {body}\n    {outcome.text!r} ({outcome.reason})")
    print("left behind:", ", ".join(f"{name} {value:.0f}" for name, value in told["left behind"].items()))
    if args["pid"] and None not in told["rss"]:
        print("server's memory at the start, at half time, at the end:", ", ".join(f"{size:.0f} MB" for size in told["rss"]))
    sys.exit(bool("error" in kinds or told["wrong"] or any(told["left behind"].values())))


if __name__ == "__main__":
    main()
