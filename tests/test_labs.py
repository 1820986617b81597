"""The experiments: the clock they go by, what they print, the trace, and the walkthrough that quotes them."""

import json
import re

import numpy as np
import pytest

import docs
import labs
from conftest import ROOT
from labs import Roofline, compare, job, run
from nanoserve import Engine, SamplingParams
from test_cli import run_here

WALKTHROUGH = (ROOT / "walkthrough.md").read_text("utf-8")
LABS = ("phases", "batching", "chunking", "paging", "preemption", "prefix", "speculation", "busy")


# ----------------------------------------------------------------------------------------------
# the roofline clock


def test_roofline_by_hand():
    """One layer of width 2, three words, 100 FLOP/s, 10 bytes/s, one byte a number: small enough for paper."""
    gpu = Roofline((100, 10), num_layers=1, width=2, vocab_size=3, itemsize=1)
    # A chunk of 2 behind 3 tokens, logits for one: 48 parameters in the layer, 6 in the head; its rows see 4 and 5 keys, 2 x 2
    # numbers of K and V each; K and V of 5 tokens are read, of 2 written.
    assert gpu.bounds([2], [5], 1) == ((2 * 48 * 2 + 2 * 6 + 2 * 4 * 9) / 100, (48 + 6 + 4 * 7) / 10)
    # No logits: the head is not read.
    assert gpu.bounds([1, 1], [1, 2], 0) == ((2 * 48 * 2 + 2 * 4 * 3) / 100, (48 + 4 * 5) / 10)
    assert gpu.seconds([2], [5], 1) == max(gpu.bounds([2], [5], 1))


def test_roofline_counts_pairs_as_the_mask_does():
    """(row, key) pairs of a chunk, against counting them one by one."""
    r = np.random.default_rng(0)
    gpu = Roofline((1, 1), 1, 1, 0)
    for _ in range(50):
        n, start = int(r.integers(1, 20)), int(r.integers(0, 50))
        pairs = sum(start + row + 1 for row in range(n))
        assert gpu.bounds([n], [start + n], 0)[0] == 2 * 12 * n + 2 * 2 * pairs


def test_the_clock_is_that_of_the_passes():
    """The engine's time is the sum of its passes' bounds: the same in every run."""
    jobs = [job("Once upon a time", max_tokens=5), job("The cat", at=2, max_tokens=9)]
    first, second = run(jobs), run(jobs)
    assert first.bounds == second.bounds and len(first.bounds) == first.stats.steps
    assert first.stats.seconds == pytest.approx(sum(map(max, first.bounds)), rel=1e-12)
    drafted = run(jobs, drafter="model")
    assert drafted.stats.seconds > sum(map(max, drafted.bounds)), "the draft model's passes take no time"


# ----------------------------------------------------------------------------------------------
# run, compare


def test_run_serves_what_the_engine_serves():
    """Jobs arrive when they say, under their names, and get the tokens they would get alone."""
    jobs = [job("Once upon a time", max_tokens=6), job("The cat", at=3, name="late", max_tokens=4)]
    result = run(jobs, probe=lambda engine: engine.stats.steps, max_num_seqs=1)
    assert list(result.requests) == ["request-0", "late"] and result.probed == list(range(1, result.stats.steps + 1))
    alone = Engine(dtype="float64").generate("The cat", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    assert result.requests["late"].completion.token_ids == alone.token_ids


def test_compare_sees_other_tokens():
    """'same tokens: yes' has to be earned."""
    a, b = (run([job("Once upon a time", max_tokens=8)]) for _ in range(2))
    said = []
    assert compare({"a": a, "b": b}, {"steps": "steps"}, said.append)["same tokens"] is True
    b.requests["request-0"].completion.token_ids[3] += 1
    assert compare({"a": a, "b": b}, {"steps": "steps"}, said.append)["same tokens"] is False
    assert any(line == "same tokens: NO" for line in said)


def test_experiments_of_ones_own(tmp_path):
    """A copied block runs from another file, and from Python."""
    block = re.search(r"^```python lab=batching\n.*?^```$", WALKTHROUGH, re.M | re.S)[0]
    mine = tmp_path / "mine.md"
    mine.write_text(block.replace("lab=batching", "lab=mine").replace("range(16)", "range(3)").replace("256", "20"), "utf-8")
    code, out, err = run_here("lab", f"{mine}#mine")
    assert (code, err) == (0, "") and "same tokens: yes" in out
    from nanoserve import compare, job, run
    assert compare({"here": run([job("The cat", max_tokens=2)])}, {"steps": "steps"}, lambda *_: None)["steps"] == {"here": 2}


def test_a_lab_as_json():
    """A grader reads this: one JSON value, and nothing else."""
    code, out, err = run_here("lab", "prefix", "--json")
    [table] = json.loads(out)["prefix"]
    assert (code, err) == (0, "") and table["same tokens"] is True and table["prompt tokens found"]["no cache"] == 0


@pytest.mark.parametrize("arguments, words", [
    (["nonsense"], "phases, batching, chunking, paging, preemption, prefix, speculation, busy, or say all"),
    (["missing.md#a"], "there is no file missing.md"), (["prefix", "--gpu", "abacus"], "h100, a100, this")])
def test_labs_that_are_not_there(arguments, words):
    """One sentence that says what there is."""
    code, out, err = run_here("lab", *arguments)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


@pytest.mark.parametrize("block, words", [
    ("x = (", "line 1 of the block: SyntaxError"), ("# A claim.\n\n1 / 0", "line 3 of the block: ZeroDivisionError"),
    ("run([job('a', max_tokens=1)], num_blokcs=3)", "num_blokcs"), ("run([job('a', max_tokns=1)])", "max_tokns"),
    ("compare({'a': run([job('a', max_tokens=1)])}, {'b': 'stepz'})", "stepz")])
def test_a_mistake_in_ones_own_lab(tmp_path, block, words):
    """The reader's mistake, in one sentence that says where; not our traceback."""
    (tmp_path / "mine.md").write_text(f"```python lab=a\n{block}\n```\n", "utf-8")
    code, _, err = run_here("lab", f"{tmp_path / 'mine.md'}#a")
    assert code == 2 and words in err and err.startswith("nanoserve: mine.md#a, line ") and "Traceback" not in err


def test_a_reader_of_our_output_who_leaves():
    """`nanoserve.py lab prefix | head -3` is no mistake in the lab."""
    lines = []

    def head(line):
        lines.append(line)
        if len(lines) == 3:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        labs.run_labs("prefix", out=head)


def test_what_compare_gives_back(tmp_path):
    """A lab can go on with the numbers; whatever kind of number they are, they become JSON. None is nothing to measure."""
    (tmp_path / "mine.md").write_text("""```python lab=a
table = compare({"one": run([job("a", max_tokens=2)])}, {"n": lambda r: np.int64(7), "nothing": lambda r: None})
print("seven is", table["n"]["one"])
```
""", "utf-8")
    code, out, err = run_here("lab", f"{tmp_path / 'mine.md'}#a")
    assert (code, err) == (0, "") and "seven is 7" in out and re.search(r"^nothing +- ", out, re.M)
    assert json.loads(run_here("lab", f"{tmp_path / 'mine.md'}#a", "--json")[1])["a"][0]["n"] == {"one": 7}


def test_other_prompts_are_no_proof():
    """Runs whose prompts differ can't show that the tokens are the same, and it is said."""
    said = []
    assert compare({"a": run([job("The cat", max_tokens=3)]), "b": run([job("The owl", max_tokens=3)])}, {}, said.append)["same tokens"]
    assert any("other prompts: a, b" in line for line in said)


@pytest.mark.parametrize("flag", [["--num-blocks", "5"], ["--seed", "4"]])
def test_flags_that_a_lab_does_not_take(flag):
    """They would be ignored in silence."""
    code, out, err = run_here("lab", "prefix", *flag)
    assert (code, out) == (2, "") and "sets up its engines itself" in err


def test_a_trace_that_can_not_be_written(tmp_path):
    """Said before the work is done, not after."""
    code, out, err = run_here("--trace", str(tmp_path))
    assert (code, out) == (2, "") and err.count("\n") == 1


# ----------------------------------------------------------------------------------------------
# the trace


def test_trace_is_the_schedule(tmp_path):
    """Every token of every step is in it, rows do not overlap, and marks stand where things happened."""
    path = tmp_path / "t.json"
    code, out, _ = run_here("--json", "--trace", str(path))
    events, stats = json.loads(path.read_text("utf-8"))["traceEvents"], json.loads(out)["stats"]
    bars = [event for event in events if event["ph"] == "X"]
    assert code == 0 and sum(bar["args"]["tokens"] for bar in bars) == stats["scheduled_tokens"]
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert sum(name.startswith("finished") for name in names) == 16
    assert sum(name.startswith("preempted") for name in names) == stats["preemptions"] >= 1
    assert sum(bar["args"]["tokens"] for bar in bars if bar["name"].startswith("recompute")) >= stats["recomputed_tokens"]
    for row in {bar["tid"] for bar in bars}:
        spans = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == row]
        assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(spans, spans[1:])), "two steps of a request at once"
    assert {event["name"] for event in events if event["ph"] == "C"} == {"kv_used", "running", "waiting", "goodput"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"story", "capital"}


def test_trace_of_a_lab(tmp_path):
    """Each run is a process of its own in the picture."""
    path = tmp_path / "t.json"
    assert run_here("lab", "prefix", "--trace", str(path))[0] == 0
    assert {event["pid"] for event in json.loads(path.read_text("utf-8"))["traceEvents"]} == {1, 2, 3}


# ----------------------------------------------------------------------------------------------
# the documents


@pytest.mark.parametrize("name", docs.FILES)
def test_what_the_documents_quote_is_true(name):
    """Excerpts, links to lines, line counts and the outputs of all labs. `python tests/docs.py --fix` brings them up to date."""
    text = (ROOT / name).read_text("utf-8")
    fixed = docs.fixed(text).splitlines()
    assert text.splitlines() == fixed


@pytest.mark.parametrize("name", docs.FILES)
def test_nothing_is_quoted_in_another_form(name):
    """A link to a line, an excerpt or an output that is written a little differently would not be kept, and nobody would know."""
    text = (ROOT / name).read_text("utf-8")
    assert len(re.findall(r"#L\d", text)) == len(re.findall(r"\[`[\w.]+`\]\([\w./]+#L\d+\)", text))
    assert len(re.findall(r"^\s*```.*\bfrom=", text, re.M)) == len(re.findall(r"^```\w+ from=[\w./]+#[\w.]+$", text, re.M))
    assert len(re.findall(r"^\s*```.*\blab=\w", text, re.M)) == len(re.findall(r"^```(?:python|text) lab=[\w-]+$", text, re.M))


def test_every_lab_is_there_and_says_what_it_shows():
    """The eight experiments, each with the effect that its chapter claims, in the direction it claims. The quoted outputs are
    true by the test above, so they are read here, and not run again."""
    tables = {name: [line.split("  ") for line in out.splitlines()] for name, out in
              re.findall(r"^```text lab=([\w-]+)\n(.*?)^```$", WALKTHROUGH, re.M | re.S)}
    assert tuple(tables) == LABS == tuple(labs.find_labs(labs.WALKTHROUGH))

    def figures(lab, label):
        """The numbers of each row with this label, in the order of the columns."""
        rows = [" ".join(cells) for cells in tables[lab] if cells[0].strip() == label]
        return [[float(word.replace(",", "")) for word in row[len(label):].split() if re.fullmatch(r"[\d.,]+", word)] for row in rows]

    for lab in LABS:
        same = [row for row in tables[lab] if row[0].startswith("same tokens")]
        assert same and all(row[0].startswith("same tokens: yes") for row in same)
    [per_token], [compute], [move] = (figures("phases", f"us {what}") for what in ("per token", "to compute it", "to move its bytes"))
    assert compute[0] > move[0] and all(m > 5 * c for c, m in zip(compute[1:], move[1:])) and per_token[1] > 7 * per_token[2]
    [[static, continuous]], [[busy_off, busy_on]] = figures("batching", "goodput"), figures("batching", "busy")
    assert continuous > 1.5 * static and busy_off == busy_on
    [[whole, chunks]], [[soon, late]] = figures("chunking", "longest silence, us"), figures("chunking", "newcomer's first token, us")
    assert whole > 2.5 * chunks and late > soon
    [[reserved, paged]], [[many, few]] = figures("paging", "requests at once"), figures("paging", "steps")
    assert paged > 5 * reserved and many > 5 * few
    [[none, some]], [[cheap, dear]] = figures("preemption", "preemptions"), figures("preemption", "ms, roofline clock")
    assert none == 0 < some and dear > 1.5 * cheap
    [[off, on, padded]] = figures("prefix", "prompt tokens computed")
    assert off > 2 * on > 2.5 * padded
    *single, (plain, guessing, auto) = figures("speculation", "ms, roofline clock")
    assert all(ngram < none and model < none for none, ngram, model in single) and guessing > 1.3 * plain > 1.3 * auto
    for (off, on), (busy_off, busy_on) in zip(figures("busy", "goodput"), figures("busy", "busy")):
        assert on > 1.3 * off and busy_off == busy_on


def test_numbers_in_the_prose_come_from_a_block():
    """A number of three digits or more in a chapter's prose stands in one of its blocks, or is a year or a round constant."""
    constants = {"1,800", "1,024", "124", "256", "512", "100", "16,384"}
    for chapter in re.split(r"^## ", WALKTHROUGH, flags=re.M):
        blocks = " ".join(re.findall(r"^```.*?^```$", chapter, re.M | re.S))
        prose = re.sub(r"^```.*?^```$|\]\([^)]*\)|`[^`]*`", " ", chapter, flags=re.M | re.S)
        for number in re.findall(r"\d[\d,.]*\d\d", prose):
            known = number in constants or re.fullmatch(r"(19|20)\d\d", number) or number.replace(",", "") in blocks.replace(",", "")
            assert known, f"{number} in chapter {chapter[:30]!r}"


def test_the_glossary_has_every_term():
    """The vocabulary of the project: each word defined once."""
    glossary = WALKTHROUGH[WALKTHROUGH.index("## 14. Glossary"):]
    for term in ("block", "block table", "slot", "ref_count", "prefix cache", "step", "token budget", "num_computed_tokens",
                 "num_cached_tokens", "chunk", "prefill", "decode", "preemption", "draft, target", "bonus token", "TTFT", "ITL",
                 "goodput", "occupancy", "KV cache"):
        assert glossary.count(f"- **{term}**: ") == 1, term
    terms = re.findall(r"^- \*\*(.*?)\*\*", glossary, re.M)
    assert terms == sorted(terms, key=str.lower)


def test_chapters_and_links():
    """The table of contents leads to the chapters, and every relative link to a file."""
    for number, title, anchor in re.findall(r"^(\d+)\. \[(.*?)\]\(#(.*?)\)$", WALKTHROUGH, re.M):
        assert f"\n## {number}. {title}\n" in WALKTHROUGH and anchor == f"{number}-{title.lower().replace(' ', '-')}"
    for target in re.findall(r"\]\(([^)#:]+)[#)]", WALKTHROUGH):
        assert (ROOT / target).exists(), target
