"""scheduler.py: who computes how many tokens in the next step.

What it does.  Keeps the requests, decides before each step which of them compute which of their tokens, takes the
blocks for that, and preempts when the pool is dry. Keeps the books of all that (`Stats`).

What it does not know.  The model, logits, text, clocks. A token is an integer here, a time a number it is given.

The idea (continuous batching: Orca, Yu et al. 2022; chunked prefill: Sarathi-Serve, Agrawal et al. 2024).  A step is
one forward pass over at most `max_num_batched_tokens` tokens, the *token budget*. A request is a list of tokens that
`num_computed_tokens` chases: a new prompt of 100 is 100 behind; a request that is streaming is one behind, the token
sampled last, whose K/V do not exist yet. So there is no prefill mode and no decode mode, only this table:

    positions                                     what they are                      written by
    [0, num_computed_tokens)                      K/V in the cache                   earlier steps, or a prefix hit
    [num_computed_tokens, + n)                    this step's chunk of n tokens      this step
    [num_computed_tokens + n, len(tokens))        the rest of the prompt             later steps
    [len(tokens), len(tokens) + len(drafts))      guesses (speculative decoding)     this step, kept if accepted

Each running request owns one token of the budget, so nobody's stream ever stops; what is left over, `spare`, goes to
those who are further behind, then to newcomers, and last to guesses.

Invariants (`Scheduler.check`).
  - Scheduled tokens, drafts included, stay within the budget; at most min(max_num_seqs, budget) requests run.
  - Every running request computes at least one token in every step, unless it is preempted.
  - running, then waiting, is the order of arrival. A waiting request holds no block.
  - Nobody is admitted in a step that preempted somebody.

Policies.  Newcomers are admitted in order of arrival, and only if the whole sequence fits the pool now; the first
that does not fit holds back those behind it (rejected: letting small ones pass, which starves the large one). If the
pool is dry, the newest running request gives up all its blocks, keeps its tokens, and becomes the first of those
waiting: the oldest request always advances, so every request ends. Rejected: swapping K/V to the host; recomputing
is simpler, and K/V that is still in the prefix cache is found again.

Limits.  First come, first served: no priorities.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from kvcache import BlockAllocator, invariant


@dataclass(eq=False)            # two requests are the same only if they are the same object
class Request:
    """One request, from arrival to its last token."""

    request_id: str
    tokens: list                # prompt, then output; only ever grows, and survives a preemption
    num_prompt_tokens: int
    max_len: int                # len(tokens) never exceeds it: prompt + max_tokens, cut at the context length
    drafts: list = field(default_factory=list)      # guesses at the next tokens, to be verified in this step
    num_computed_tokens: int = 0
    block_table: list = field(default_factory=list)
    num_cached_tokens: int = 0                      # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    high_water: int = 0                             # most tokens ever computed: below it, computing is re-computing
    arrival: int = 0                                # numbers the requests in the order they came
    arrival_time: float = 0.0
    admission_time: float | None = None             # of the first admission
    first_token_time: float | None = None
    last_token_time: float | None = None
    longest_gap: float = 0.0                        # the longest silence between two of its tokens

    @property
    def num_missing(self):
        """Tokens without K/V, guesses aside: 1 for a request that is streaming, more during its prefill."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_output_tokens(self):
        return len(self.tokens) - self.num_prompt_tokens


def share_budget_reference(missing, budget, chunk=None):
    """The policy for running requests as one NumPy formula, memory aside; the scheduler must agree with it.

    missing [R]: tokens each request lacks, in order of arrival, R <= budget -> [R] tokens each one computes.

    >>> share_budget_reference([50, 1, 30, 1], budget=64).tolist()      # the streams' single tokens come first
    [50, 1, 12, 1]
    >>> share_budget_reference([50, 1, 30, 1], budget=64, chunk=20).tolist()
    [20, 1, 20, 1]
    """
    missing = np.asarray(missing)
    order = np.argsort(missing > 1, kind="stable")
    extra = np.minimum(missing, chunk or budget)[order] - 1             # wanted beyond the one token each owns
    before = np.cumsum(extra) - extra                                   # wanted by those who come first
    spare = budget - len(missing)
    counts = np.empty_like(missing)
    counts[order] = 1 + np.minimum(extra, np.maximum(spare - before, 0))
    return counts


class Scheduler:
    """The queue, the running set and the pool. Per step: `schedule`, forward pass, `advance` and `finish`."""

    def __init__(self, pool: BlockAllocator, max_num_seqs, max_num_batched_tokens, max_prefill_chunk=None,
                 batching="continuous", kv_reservation="paged"):
        self.pool = pool
        self.budget = max_num_batched_tokens
        self.max_num_seqs, self.max_running = max_num_seqs, min(max_num_seqs, max_num_batched_tokens)
        self.chunk = max_prefill_chunk or max_num_batched_tokens
        self.static, self.reserved = batching == "static", kv_reservation == "reserved"
        self.running = []               # in order of arrival
        self.waiting = OrderedDict()    # request_id -> request, in order of arrival; any can leave at once
        self.scheduled = []             # what the last schedule() chose, and what it did for that:
        self.admitted, self.preempted = [], {}          # preempted: request -> tokens of K/V it gave up
        self.num_added = self.num_preemptions = 0

    def add(self, request):
        request.arrival = self.num_added = self.num_added + 1
        self.waiting[request.request_id] = request

    def schedule(self):
        """Choose the next step: list of (request, n), the n tokens after request.num_computed_tokens, guesses included.

        Takes the blocks they need, and cuts request.drafts to what there is room for. The cost depends on the requests that
        run, not on the queue behind them.
        """
        chosen = {}                                                     # request -> n
        spare = self.budget - len(self.running)
        batch_is_open = not any(request.num_output_tokens for request in self.running)      # for batching="static"
        self.admitted, self.preempted = [], {}

        # 1) Running requests, those who lack a single token first: a prompt in chunks must not take their beat. (Python's
        #    sort is stable: otherwise they stay in order of arrival.) A victim may be a stream that was chosen a moment ago.
        for request in sorted(self.running, key=lambda request: request.num_missing > 1):
            if not request.block_table:
                continue                                                # preempted a moment ago, by an older one
            n = 1 + min(request.num_missing - 1, self.chunk - 1, spare)
            while not self.pool.allocate(request.block_table, request.num_computed_tokens + n):
                victim = self.running[-1]
                spare += chosen.pop(victim, 1)                          # what it was given, or its one token
                self._preempt(victim)
                if victim is request:
                    break
            else:
                chosen[request] = n
                spare -= n - 1

        # 2) Newcomers. Not after a preemption: the victim is first in line, and if a shared prefix makes it fit again at once,
        #    it would lose the race for the next block again.
        while (self.waiting and spare > 0 and len(self.running) < self.max_running
               and not self.preempted and (batch_is_open or not self.static)):
            request = next(iter(self.waiting.values()))
            hits = self.pool.find_prefix(request.tokens)
            # Blocks for all of it, not for its first chunk alone: half-computed prompts would evict one another.
            whole = request.max_len if self.reserved else len(request.tokens)
            if not self.pool.allocate(request.block_table, whole, hits):
                break
            self._admit(request, len(hits) * self.pool.block_size)
            chosen[request] = n = min(request.num_missing, self.chunk, spare)
            spare -= n

        # 3) Guesses get what budget and blocks are left: none is worth anybody's K/V, prompt or admission.
        for request, n in chosen.items():
            room = min(len(request.drafts), self.chunk - n, spare) if n == request.num_missing else 0
            end = request.num_computed_tokens + n
            if not self.pool.allocate(request.block_table, end + room):
                room = min(room, len(request.block_table) * self.pool.block_size - end)         # what its own blocks still hold
            del request.drafts[room:]
            chosen[request] += room
            spare -= room

        self.scheduled = list(chosen.items())
        return self.scheduled

    def _admit(self, request, num_cached_tokens):
        del self.waiting[request.request_id]
        self.running.append(request)
        self.admitted.append(request)
        request.num_computed_tokens = num_cached_tokens
        if not request.num_preemptions:     # hits after a preemption are the request's own work, not a saving
            request.num_cached_tokens = num_cached_tokens

    def _preempt(self, request):
        """Take all its K/V. Its tokens stay, prompt and output alike, and will be computed again as one prompt."""
        self.running.remove(request)
        self.preempted[request] = request.num_computed_tokens
        self.pool.release(request.block_table)
        request.num_computed_tokens, request.drafts = 0, []
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def advance(self, request, n):
        """The K/V of n more tokens of request.tokens are now computed and will stay: publish the full blocks.

        What was computed beyond them, for guesses that were refused, is simply overwritten by a later step.
        """
        start = request.num_computed_tokens
        request.num_computed_tokens += n
        request.high_water = max(request.high_water, request.num_computed_tokens)
        self.pool.publish(request.block_table, request.tokens, start, request.num_computed_tokens)

    def finish(self, request):
        """Remove a request in any state; its blocks are free at once, and findable until they are reused."""
        if self.waiting.pop(request.request_id, None) is None:
            self.running.remove(request)
        self.pool.release(request.block_table)

    def check(self):
        """Raise RuntimeError if an invariant is broken."""
        total, arrivals = sum(n for _, n in self.scheduled), [r.arrival for r in (*self.running, *self.waiting.values())]
        invariant(total <= self.budget, f"{total} tokens scheduled, budget {self.budget}")
        invariant(len(self.running) <= self.max_running, f"{len(self.running)} requests run, limit {self.max_running}")
        invariant(arrivals == sorted(arrivals), "running, then waiting, is not the order of arrival")
        invariant(not (self.admitted and self.preempted), "a request was admitted in a step that preempted")
        invariant(set(self.running) <= {r for r, _ in self.scheduled}, "a running request computed nothing in this step")
        for r in self.waiting.values():
            invariant(not r.block_table and not r.num_computed_tokens, f"waiting request {r.request_id} holds blocks")
        for r in self.running:
            invariant(len(r.block_table) >= self.pool.blocks_needed(r.num_computed_tokens),
                      f"{r.request_id}: more tokens computed than its blocks hold")
            invariant(0 <= r.num_computed_tokens < len(r.tokens) <= r.max_len,
                      f"{r.request_id}: num_computed_tokens or length out of range")
        self.pool.check([request.block_table for request in self.running])


# ----------------------------------------------------------------------------------------------
# what to watch


class Histogram:
    """Counts of durations in buckets of 1, 2, 5, 10, ... ms: memory does not grow with the number of requests."""

    BOUNDS = [round(mantissa * 10.0 ** power, 6) for power in range(-3, 2) for mantissa in (1, 2, 5)]      # seconds

    def __init__(self):
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def observe(self, seconds):
        self.counts[sum(seconds > bound for bound in self.BOUNDS)] += 1
        self.sum += seconds

    def as_dict(self):
        return {"count": sum(self.counts), "sum": self.sum, "buckets": dict(zip([*self.BOUNDS, "+Inf"], self.counts))}


class Stats:
    """Counters since the start. The gauges are ratios of counters, so that they mean the same over any stretch of time.

    scheduled_tokens = prefill_tokens + decode_tokens + recomputed_tokens + draft_tokens: each token position that went
    through a pass was a prompt token for the first time, a sampled token, one whose K/V a preemption had destroyed, or a
    guess (also if it turned out right: it had to be paid for before anybody knew). cached_tokens are
    prompt tokens that did not have to: counted at the first admission, so a preemption's own work is not a hit.
    """

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.draft_tokens = 0                                       # guesses checked
        # Runs that had an i-th guess, and in which it was accepted (if behind a stop, it was not delivered all the same).
        self.proposed_tokens, self.accepted_tokens = [], []
        self.runs = 0                                               # times that a request got one or more tokens from a pass
        self.draft_seconds = 0.0                                    # in the drafter, its passes and its searching
        self.steps = self.prefill_tokens = self.decode_tokens = self.recomputed_tokens = self.cached_tokens = 0
        self.delivered_tokens = self.scheduled_tokens = self.scheduled_seqs = self.idle_seats = 0
        self.kv_peak = 0                                            # most blocks in use after scheduling a step
        self.finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.model_seconds = self.step_seconds = self.seconds = 0.0     # in forward passes; in step(); since the first step
        self._first_step = None
        # TTFT: arrival to first token. Queue time: arrival to first admission. e2e: arrival to the end, if by stop or length.
        # ITL: time between a request's tokens. A step that brings m tokens at once counts as one gap since the last
        # step and m - 1 gaps of zero: what a reader sees, and the longest silence stays in the histogram.
        self.ttft, self.itl, self.queue_time, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()

    running = property(lambda self: len(self._scheduler.running))
    waiting = property(lambda self: len(self._scheduler.waiting))
    preemptions = property(lambda self: self._scheduler.num_preemptions)
    kv_used = property(lambda self: self._scheduler.pool.num_used)
    kv_usage = property(lambda self: self.kv_used / self._scheduler.pool.num_blocks)
    kv_cached = property(lambda self: len(self._scheduler.pool.by_hash))       # findable by prefix, in use or free

    @property
    def busy(self):
        """Share of the time in which a forward pass ran. What a dashboard calls GPU use."""
        return self.model_seconds / max(self.seconds, 1e-9)

    @property
    def occupancy(self):
        """Share of the seats that were taken."""
        return self.scheduled_seqs / max(self.scheduled_seqs + self.idle_seats, 1)

    @property
    def budget_fill(self):
        """Share of the token budget that was used."""
        return self.scheduled_tokens / max(self.steps * self._scheduler.budget, 1)

    @property
    def goodput(self):
        """Tokens delivered per token position paid for. Those are the computed ones, and one for every seat left empty in a step.

        An empty seat could have had one more token for the same reading of the weights. A prompt's tokens are paid for and
        not delivered, so a step that only computes prompts has a low goodput: that is the price of an answer, and what a
        prefix cache lowers.
        """
        return self.delivered_tokens / max(self.scheduled_tokens + self.idle_seats, 1)

    @property
    def tokens_per_pass(self):
        """Tokens a request gets from a pass that samples for it, the bonus token included: 1 without guesses."""
        return self.delivered_tokens / max(self.runs, 1)

    def count_step(self, scheduled, now):
        """Book what `schedule` chose, before the forward pass, at the time `now`."""
        self.steps += 1
        for request, n in scheduled:
            guesses = len(request.drafts)               # schedule cut them to what is in n
            start, end = request.num_computed_tokens, request.num_computed_tokens + n - guesses
            again = max(0, min(end, request.high_water) - start)
            prompt = max(0, min(end, request.num_prompt_tokens) - max(start, request.high_water))
            self.recomputed_tokens += again
            self.prefill_tokens += prompt
            self.decode_tokens += n - guesses - again - prompt
            self.draft_tokens += guesses
            self.scheduled_tokens += n
            if request.admission_time is None:
                request.admission_time = now
                self.cached_tokens += request.num_cached_tokens
                self.queue_time.observe(now - request.arrival_time)
        self.scheduled_seqs += len(scheduled)
        self.idle_seats += self._scheduler.max_num_seqs - len(scheduled)
        self.kv_peak = max(self.kv_peak, self.kv_used)

    def count_tokens(self, request, count, now):
        """Book `count` new tokens of a request."""
        self.delivered_tokens += count
        if request.first_token_time is None:
            request.first_token_time = now
            self.ttft.observe(now - request.arrival_time)
        else:
            request.longest_gap = max(request.longest_gap, now - request.last_token_time)
            self.itl.observe(now - request.last_token_time)
        for _ in range(count - 1):
            self.itl.observe(0.0)
        request.last_token_time = now

    def count_run(self, proposed, accepted):
        """Book a run of `proposed` guesses, of which the first `accepted` were right. 0 of 0 is a plain decode."""
        self.runs += 1
        for counts, number in ((self.proposed_tokens, proposed), (self.accepted_tokens, accepted)):
            counts += [0] * (proposed - len(counts))
            for position in range(number):
                counts[position] += 1

    def count_end(self, request, reason, now):
        self.finished[reason] += 1
        if reason in ("stop", "length"):
            self.e2e.observe(now - request.arrival_time)

    def count_time(self, started, model_seconds, now):
        """Book a step that began at `started`, ended now, and spent model_seconds in the forward pass."""
        self._first_step = started if self._first_step is None else self._first_step
        self.seconds = now - self._first_step
        self.model_seconds += model_seconds
        self.step_seconds += now - started

    def as_dict(self):
        """Everything by name, histograms as dicts."""
        gauges = {name: getattr(self, name) for name, value in vars(Stats).items() if isinstance(value, property)}
        values = gauges | {name: value for name, value in vars(self).items() if name[0] != "_"}
        return {name: value.as_dict() if isinstance(value, Histogram) else value for name, value in values.items()}

    # For Prometheus: which are gauges, and vLLM's names for what means the same there.
    GAUGES = {"running", "waiting", "kv_used", "kv_cached", "kv_usage", "kv_peak", "busy", "occupancy", "budget_fill", "goodput",
              "tokens_per_pass"}
    VLLM = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc",
            "preemptions": "num_preemptions", "delivered_tokens": "generation_tokens", "cached_tokens": "prefix_cache_hits",
            "finished": "request_success", "draft_tokens": "spec_decode_num_draft_tokens",
            "accepted_tokens": "spec_decode_num_accepted_tokens_per_pos", "ttft": "time_to_first_token_seconds",
            "itl": "inter_token_latency_seconds", "queue_time": "request_queue_time_seconds", "e2e": "e2e_request_latency_seconds"}

    def prometheus(self):
        """Everything as Prometheus text: nanoserve:NAME, counters with _total behind it."""
        lines = []
        for name, value in self.as_dict().items():
            histogram = isinstance(value, dict) and "buckets" in value
            kind = "gauge" if name in self.GAUGES else "histogram" if histogram else "counter"
            metric = f"nanoserve:{self.VLLM.get(name, name)}{'_total' * (kind == 'counter')}"
            samples = {"": value}
            if histogram:
                upto = np.cumsum(list(value["buckets"].values())).tolist()
                samples = {f'_bucket{{le="{bound}"}}': count for bound, count in zip(value["buckets"], upto)}
                samples |= {"_sum": value["sum"], "_count": value["count"]}
            elif isinstance(value, (dict, list)):
                label, items = ("finished_reason", value.items()) if isinstance(value, dict) else ("position", enumerate(value))
                samples = {f'{{{label}="{key}"}}': count for key, count in items}
            lines += [f"# TYPE {metric} {kind}", *(f"{metric}{labels} {number}" for labels, number in samples.items())]
        return "\n".join(lines) + "\n"
