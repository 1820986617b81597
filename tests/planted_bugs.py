"""Small bugs for the product, each with the test that must catch it. Also exercises: plant one, read the failure, find it.

    python tests/planted_bugs.py                 # list them
    python tests/planted_bugs.py NAME            # plant one in the source files (git checkout takes it out again)
"""

import sys
from pathlib import Path
from typing import NamedTuple


class Bug(NamedTuple):
    name: str
    file: str
    old: str                    # must occur exactly once in the file
    new: str
    caught_by: str              # file.function in tests/
    arguments: tuple = ()       # of that function, where it is parametrized
    hangs: bool = False         # with the bug, something waits for ever


BUGS = [
    # --- kvcache.py
    Bug("hit-not-counted", "kvcache.py", "            self.ref_count[block] += 1\n", "            pass\n",
        "test_kvcache.test_sharing_and_release"),
    Bug("whole-prompt-from-cache", "kvcache.py", "len(tokens) - self.block_size, self.block_size):", "len(tokens) - self.block_size + 1, self.block_size):",
        "test_kvcache.test_a_match_leaves_one_token", (4, 0)),
    Bug("tokens-not-compared", "kvcache.py", "a.tokens != b.tokens:", "False:", "test_kvcache.test_a_hash_collision_is_no_hit", ("monkeypatch",)),
    Bug("parents-not-compared", "kvcache.py", "        a, b = a.parent, b.parent\n", "        return True\n",
        "test_kvcache.test_a_collision_of_parents_is_no_hit", ("monkeypatch",)),
    Bug("half-full-block-published", "kvcache.py", "end // self.block_size):\n            parent", "-(-end // self.block_size)):\n            parent",
        "test_kvcache.test_nothing_is_found_before_it_is_published_or_with_caching_off"),
    Bug("head-evicted-first", "kvcache.py", "in reversed(table):", "in table:", "test_kvcache.test_reuse_order_is_least_recently_freed_and_tail_first"),
    Bug("stale-hash", "kvcache.py", "            del self.by_hash[self.prefix[block]]\n", "            pass\n",
        "test_kvcache.test_random_walk_against_a_naive_model", (3,)),
    Bug("revived-hits-forgotten", "kvcache.py", "len(self.free) - revived", "len(self.free)",
        "test_kvcache.test_hits_count_as_taken_when_they_were_free"),
    Bug("own-hits-evicted", "kvcache.py", "            self.free.pop(block, None)\n", "            pass\n",
        "test_kvcache.test_hits_are_not_evicted_by_their_own_request"),
    Bug("slot-off-by-one", "kvcache.py", "+ positions % self.block_size", "+ (positions + 1) % self.block_size",
        "test_kvcache.test_batch_against_plain_loops", (3,)),
    Bug("mask-off-by-one", "kvcache.py", "column <= batch.positions", "column < batch.positions",
        "test_kvcache.test_torch_attention_equals_the_reference", ("float64", 0, 4, 4, 4, [(3, 5), (12, 4), (0, 4)])),
    Bug("decode-does-not-see-itself", "kvcache.py", "np.repeat(batch.positions[rows] + 1, H)", "np.repeat(batch.positions[rows], H)",
        "test_kvcache.test_torch_attention_equals_the_reference", ("float64", 0, 4, 4, 4, [(20, 1), (25, 1), (31, 1)])),
    Bug("heads-in-other-groups", "kvcache.py", "line % H * G // H", "line % H % G",
        "test_kvcache.test_torch_attention_equals_the_reference", ("float64", 0, 4, 2, 4, [(20, 1), (25, 1), (31, 1)])),
    Bug("scores-of-the-layer-before", "kvcache.py", "        self.table.values().zero_()\n", "",
        "test_kvcache.test_a_layer_without_a_finite_score_does_not_reach_the_next"),
    Bug("last-logits-of-every-chunk-lost", "kvcache.py", "positions >= (context_len - wanted)[owner]", "positions > (context_len - wanted)[owner]",
        "test_kvcache.test_batch_against_plain_loops", (4,)),
    # --- scheduler.py
    Bug("budget-not-reserved", "scheduler.py", "spare = self.budget - len(self.running)\n        batch", "spare = self.budget\n        batch",
        "test_scheduler.test_every_running_request_gets_a_token"),
    Bug("victim-stays-in-the-step", "scheduler.py", "spare += chosen.pop(victim, 1)", "spare += chosen.get(victim, 1)",
        "test_scheduler.test_a_victim_that_was_already_scheduled_gives_its_tokens_back"),
    Bug("oldest-preempted", "scheduler.py", "victim = self.running[-1]", "victim = self.running[0]",
        "test_scheduler.test_the_newest_is_preempted_and_returns_first"),
    Bug("preempted-to-the-tail", "scheduler.py", "        self.waiting.move_to_end(request.request_id, last=False)\n", "",
        "test_scheduler.test_the_newest_is_preempted_and_returns_first"),
    Bug("admitted-after-preemption", "scheduler.py", "not self.preempted and (", "(", "test_engine.test_soak", (4,)),
    Bug("neighbour-evicted-for-a-guess", "scheduler.py", "n = 1 + min(request.num_missing - 1,", "n = 1 + min(request.num_missing + len(request.drafts) - 1,",
        "test_scheduler.test_guesses_are_dropped_before_anybody_is_preempted"),
    Bug("guesses-not-cut", "scheduler.py", "            del request.drafts[room:]\n", "",
        "test_scheduler.test_guesses_share_the_budget"),
    Bug("chunk-before-streams", "scheduler.py", "request.num_missing > 1)", "0)", "test_scheduler.test_order_running_then_waiting_streams_first"),
    Bug("preempted-keeps-its-count", "scheduler.py", "request.num_computed_tokens, request.drafts = 0, []", "request.drafts = []",
        "test_scheduler.test_the_newest_is_preempted_and_returns_first"),
    Bug("sampled-token-published", "scheduler.py", "request.tokens, start, request.num_computed_tokens)", "request.tokens, start, len(request.tokens))",
        "test_engine.test_ghost_matrix", (None,)),
    Bug("own-work-counted-as-hit", "scheduler.py", "        if not request.num_preemptions:     #", "        if True:            #",
        "test_scheduler.test_cached_tokens_are_counted_once"),
    Bug("first-chunk-is-enough", "scheduler.py", "else len(request.tokens)\n", "else 1\n", "test_scheduler.test_admission_needs_room_for_the_whole_sequence"),
    Bug("static-refills", "scheduler.py", "batch_is_open = not any(request.num_output_tokens for request in self.running)", "batch_is_open = True",
        "test_scheduler.test_static_batching_admits_only_into_an_empty_engine"),
    Bug("recomputed-counted-as-prefill", "scheduler.py", "again = max(0, min(end, request.high_water) - start)", "again = 0",
        "test_engine.test_preemption_keeps_tokens_and_counts_them_as_recomputed"),
    # --- spec.py
    Bug("draw-forgets-position", "spec.py", "purpose, position])", "purpose, 0])", "test_spec.test_draws_are_functions_of_seed_position_and_purpose"),
    Bug("impossible-token-drawn", "spec.py", "support[min(at, len(support) - 1)]", "min(at, len(probs) - 1)", "test_spec.test_sample_is_the_inverse_of_the_cumulative_sum"),
    Bug("best-token-dropped", "spec.py", "order[before < params.top_p]", "order[before + probs[order] < params.top_p]",
        "test_spec.test_extremes"),
    Bug("top-k-one-too-many", "spec.py", "-params.top_k)[-params.top_k]", "-params.top_k)[-params.top_k - 1]",
        "test_spec.test_target_probs_against_the_naive_version", (0,)),
    Bug("residual-is-the-target", "spec.py", "residual = np.maximum(target[i] - draft_probs[i], 0.0)", "residual = target[i]",
        "test_spec.test_one_step_of_verification_is_exact", ([0.5, 0.25, 0.25, 0], [0.25, 0.5, 0, 0.25], "monkeypatch")),
    Bug("one-draw-for-two-purposes", "spec.py", "draw(seed, position + i, RESIDUAL)", "draw(seed, position + i, ACCEPT)",
        "test_spec.test_verify_uses_separate_draws"),
    Bug("bonus-forgotten", "spec.py", "[*drafts, sample(", "drafts or [sample(", "test_spec.test_verify_emits_between_one_and_k_plus_one"),
    Bug("stop-string-leaks", "spec.py", "held = 0 if final else max", "held = 0 if True else max", "test_spec.test_stop_across_tokens_and_false_alarms"),
    Bug("half-characters-emitted", "spec.py", "self._decoder.decode(data, final)", "self._decoder.decode(data, True)",
        "test_spec.test_deltas_concatenate_to_the_text", (0,)),
    Bug("last-stop-wins", "spec.py", "text[:min(found)]", "text[:max(found)]", "test_spec.test_the_earliest_stop_wins"),
    Bug("accept-and-refuse-swapped", "spec.py", "* draft_probs[i][x] >= target[i][x]", "* draft_probs[i][x] < target[i][x]",
        "test_spec.test_one_step_of_verification_is_exact", ([0.5, 0.25, 0.25, 0], [0.25, 0.5, 0, 0.25], "monkeypatch")),
    Bug("draft-model-falls-behind", "spec.py", "            self.forward(known)\n", "            pass\n",
        "test_speculation.test_ghost_matrix_with_speculation", ("model",)),
    Bug("draft-probs-of-the-last-guess", "spec.py", "request.draft_probs[i, :len(probs)] = probs", "request.draft_probs[:, :len(probs)] = probs",
        "test_speculation.test_a_guess_is_judged_by_the_distribution_it_came_from"),
    Bug("ngram-finds-itself", "spec.py", "sliding_window_view(tokens[:-1], n)", "sliding_window_view(tokens, n)", "test_speculation.test_ngram_drafter"),
    # --- nanoserve.py
    Bug("refused-guess-kept", "nanoserve.py", "n - len(guesses) + min(len(tokens) - 1, len(new))", "n",
        "test_speculation.test_ghost_matrix_with_speculation", ("model",)),
    Bug("tokens-after-the-end", "nanoserve.py", "                break               # what was accepted", "                pass                # what was accepted",
        "test_speculation.test_limits_hold_in_the_middle_of_a_run", ("model",)),
    Bug("one-token-too-many", "nanoserve.py", "elif len(request.tokens) == request.max_len:", "elif len(request.tokens) > request.max_len:",
        "test_engine.test_the_shortest_and_the_longest_prompt"),
    Bug("sampled-in-mid-prompt", "nanoserve.py", "rows = 1 + guesses if n == request.num_missing + guesses else 0", "rows = 1 + guesses",
        "test_engine.test_ghost_matrix", (2,)),
    Bug("seed-of-the-batch", "nanoserve.py", "request.draft_probs, request.seed,\n", "request.draft_probs, request.seed + len(self.scheduler.running),\n",
        "test_engine.test_sampling_does_not_see_the_crowd"),
    Bug("others-outputs-lost", "nanoserve.py", "self._outbox = others + [", "self._outbox = [", "test_engine.test_generate_beside_other_requests_loses_nothing"),
    Bug("nan-sampled", "nanoserve.py", "finite = np.isfinite(logits).all(axis=1)", "finite = np.ones(len(logits), bool)", "test_engine.test_nan_logits_end_that_request_only"),
    Bug("abort-without-output", "nanoserve.py", '        self._emit(request, [], "", "abort")\n', '        self.scheduler.finish(self.requests.pop(request_id))\n',
        "test_engine.test_abort_in_each_state"),
    Bug("dead-client-served", "nanoserve.py", "            worker.abort(requests)", "            pass",
        "test_serve.test_client_gone_with_many_completions", (), True),
    Bug("queue-without-end", "nanoserve.py", "        if len(prompts) > room:\n", "        if False:\n", "test_serve.test_queue_full", (), True),
    Bug("stop-cuts-off", "nanoserve.py", "for seconds in (grace, 1.0):", "for seconds in (0, 1.0):",
        "test_serve.test_stop_lets_those_who_are_served_finish"),
    Bug("id-reused-while-alive", "nanoserve.py", "require(request_id not in alive,", "require(True,",
        "test_engine.test_bad_requests", ({"prompt": [1], "request_id": "alive"}, "request_id 'alive' is alive")),
]


def plant(bug, text):
    """The text of the bug's file with the bug in it."""
    assert text.count(bug.old) == 1, f"{bug.name}: its place occurs {text.count(bug.old)} times in {bug.file}"
    return text.replace(bug.old, bug.new)


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    chosen = [bug for bug in BUGS if bug.name in sys.argv[1:]]
    unknown = set(sys.argv[1:]) - {bug.name for bug in chosen}
    if unknown:
        sys.exit(f"no bug is called {', '.join(sorted(unknown))}; without a name, this lists them")
    for bug in chosen:
        (root / bug.file).write_text(plant(bug, (root / bug.file).read_text("utf-8")), "utf-8")
        print(f"planted {bug.name} in {bug.file}")
    if not chosen:
        for bug in BUGS:
            print(f"{bug.name:32} {bug.file:14} caught by {bug.caught_by}")
