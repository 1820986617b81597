"""The command line as its users meet it: in a pipe, in a terminal, with every mistake one can make."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading

import nanoserve
import pytest
import torch
from conftest import ROOT
from nanoserve import Engine, EngineConfig, SamplingParams, View, events

LIMIT = 120                                                         # seconds until a command counts as hanging


def environment(**more):
    """The caller's, without what would change the output."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | more


@contextlib.contextmanager
def command(*args, **popen):
    """python nanoserve.py ..., with pipes for all three streams unless told otherwise. Killed if it hangs."""
    how = {"env": environment()} | dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | popen
    with subprocess.Popen([sys.executable, "nanoserve.py", *args], cwd=ROOT, **how) as process:
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()                                          # does nothing if it has ended and was waited for


def run_command(*args, data=b"", **popen):
    """-> (exit code, stdout, stderr) of a process."""
    with command(*args, **popen) as process:
        out, err = process.communicate(data)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def run_here(*args, data=b""):
    """The same inside this process: most mistakes need none of their own, and importing torch takes a second."""
    out, err = io.BytesIO(), io.StringIO()
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(data), "utf-8")
    stdout = io.TextIOWrapper(out, "utf-8")
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(err):
            try:
                code = nanoserve.main(list(args))
            except SystemExit as leaving:                           # argparse: usage errors and -h
                code = leaving.code
        stdout.flush()
    finally:
        sys.stdin = stdin
        torch.set_num_threads(1)
    return code, out.getvalue().decode(), err.getvalue()


# ----------------------------------------------------------------------------------------------
# the main job


@pytest.fixture(scope="module")
def main_job():
    """(exit code, stdout, stderr) of the main job in a pipe, run once for all tests here."""
    return run_command()


def pools(text):
    """The picture of the pool after each step: list of strings, a symbol per block."""
    return re.findall(r"^ *\d+ \[(.*)\] +\d+%  ", text, re.M)


def test_main_job_in_a_pipe(main_job):
    """The first command of the README fails, or fills a log file with escape codes."""
    code, out, err = main_job
    assert (code, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out), "control characters in a pipe"


def test_main_job_draws_the_pool(main_job):
    """Every step has its line; letters own blocks, and the pool is never drawn in another size."""
    drawn = pools(main_job[1])
    steps = int(re.search(r"^(\d+) steps in", main_job[1], re.M)[1])
    assert len(drawn) == steps > 50
    assert {len(pool) for pool in drawn} == {48}
    assert all(re.fullmatch(r"[A-Z*~.]+", pool) for pool in drawn)


def test_main_job_shows_every_idea(main_job):
    """The job is made to show sharing, a preemption, chunks and cache hits: without them the view teaches nothing."""
    out = main_job[1]
    assert any("*" in pool for pool in pools(out)), "no block was ever shared"
    assert any("~" in pool for pool in pools(out)), "no freed block stayed findable"
    assert re.search(r"^   - . .+ preempted: it gave up \d+ tokens of K/V$", out, re.M)
    assert re.search(r"^   \+ . .+ admitted, 0 tokens found in the cache$", out, re.M)
    assert re.search(r"^   \+ . .+ admitted, [1-9]\d* tokens found in the cache$", out, re.M)
    assert re.search(r"^   \+ . .+ admitted again, ", out, re.M)
    assert re.search(r"^ *\d+ \[.*%  .*\b[A-Z]1 .*\b[A-Z]32\b", out, re.M), "no step with a decode and a full chunk"


def test_main_job_summary(main_job):
    """The figures the walkthrough explains, and every request's text, at the end."""
    out = main_job[1]
    script = json.loads((ROOT / "weights" / "prompts.json").read_text("utf-8"))
    for request in script["requests"]:
        name = re.escape(request["name"])
        assert len(re.findall(rf"^   = . {name} finished: (stop|length)$", out, re.M)) == 1
        assert re.search(rf"^{name} \((stop|length)\)$", out, re.M)
        assert re.search(rf"^{name} +\d+ +\d+ +\d+ +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
    for line in (r"\d+ steps in [\d.]+ s delivered \d+ tokens: [\d,]+ tokens/s", r"busy +\d+%", r"occupancy +\d+%",
                 r"budget fill +\d+%", r"goodput +\d+%", r"KV peak +\d+%", r"prefix hits +\d+%", r"preemptions +[1-9]\d*  "):
        assert re.search(f"^{line}", out, re.M), line


def test_main_job_as_json():
    """A program reads this: one JSON value, nothing else, and the same job."""
    code, out, err = run_here("--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert len(result["requests"]) == 16 and all(r["finish_reason"] in ("stop", "length") for r in result["requests"])
    assert result["stats"]["steps"] > 50 and result["stats"]["preemptions"] >= 1
    assert sum(len(r["token_ids"]) for r in result["requests"]) == result["stats"]["delivered_tokens"]


def test_main_job_refuses_before_it_starts():
    """A pool too small for one of the prompts is said at once, not after half of the job."""
    code, out, err = run_here("--num-blocks", "15")
    assert (code, out) == (2, "") and "raise num_blocks" in err and err.count("\n") == 1


def test_main_job_with_a_broken_model(monkeypatch):
    """Requests that end in error have no times; the summary says why, and stands."""
    forward = nanoserve.GPT2.forward
    monkeypatch.setattr(nanoserve.GPT2, "forward", lambda *args: forward(*args) * float("nan"))
    code, out, err = run_here()
    assert (code, err) == (0, "") and out.count("not finite numbers") == 16


def test_flags_reach_the_main_job():
    """Flags before and without a command are the engine's: a flag that is parsed and dropped changes nothing, silently."""
    code, out, _ = run_here("--json", "--num-blocks", "200", "--no-enable-prefix-caching")
    stats = json.loads(out)["stats"]
    assert code == 0 and stats["preemptions"] == 0 and stats["cached_tokens"] == 0


# ----------------------------------------------------------------------------------------------
# in a terminal


class Terminal:
    """As much of a terminal as the view needs: wrapping, scrolling, cursor up, erase line."""

    def __init__(self, rows=24, columns=80):
        self.rows, self.columns = rows, columns
        self.lines, self.top, self.row, self.column = [""] * rows, 0, 0, 0      # row counts from the first line ever
        self.wrapped = 0

    def feed(self, text):
        for code, char in re.findall(r"\x1b(\[[0-9;?]*[A-Za-z])|([^\x1b])", text, re.S):
            if code:
                self.control(int(re.sub(r"\D", "", code) or 1), code[-1], code)
            elif char == "\r":
                self.column = 0
            elif char == "\n":
                self.down()
            else:
                assert char >= " ", f"control character {char!r}"
                if self.column == self.columns:
                    self.wrapped += 1
                    self.column = 0
                    self.down()
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[:self.column] + char + line[self.column + 1:]
                self.column += 1

    def control(self, number, letter, code):
        assert letter in "FKm", f"unknown escape code {code!r}"
        if letter == "F":
            self.row, self.column = max(self.row - number, self.top), 0         # stops at the upper edge
        if letter == "K":
            assert number == 2
            self.lines[self.row] = ""

    def down(self):
        self.row += 1
        if self.row == self.top + self.rows:                                    # the screen scrolls
            self.top += 1
            self.lines.append("")


def in_terminal(*args, rows=24, columns=80):
    """-> (exit code, all output) of a command on a pseudo-terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with command(*args, stdin=slave, stdout=slave, stderr=slave, env=environment(TERM="xterm-256color")) as process:
        os.close(slave)
        data = b""
        with contextlib.suppress(OSError):                          # the end of a pseudo-terminal is an error, on Linux
            while chunk := os.read(master, 65536):
                data += chunk
        os.close(master)
        return process.wait(), data.decode()


def plain(text):
    """Without escape codes and carriage returns."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", text)


@pytest.mark.parametrize("flags", [[], ["--num-blocks", "300", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
                                        "--max-prefill-chunk", "200"]], ids=["as it is", "with larger numbers"])
def test_main_job_in_a_terminal(flags):
    """A line too wide wraps, a picture too high scrolls: the next one is not drawn over it, and the screen fills with rubbish."""
    code, out = in_terminal("--delay", "0", *flags)
    assert code == 0
    live = out[:out.index("The texts;")]
    frames = [plain(frame).rstrip("\n").split("\n") for frame in re.split(r"\x1b\[\d+F", live)]
    assert len(frames) > 50
    for lines in frames:
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        assert len(lines) <= 23                                     # the cursor waits on the line below the picture
    terminal = Terminal()
    terminal.feed(live)
    assert terminal.wrapped == 0
    assert terminal.top <= 1                                        # nothing scrolled, but for the blank line before the summary
    for line in ("step ", "busy  ", "goodput  ", "KV pool:", "batch:", "waiting:"):
        assert sum(shown.startswith(line) for shown in terminal.lines) == 1, f"{line!r} not redrawn in place"


def test_text_can_not_command_the_terminal():
    """A model says any bytes: a tab, a carriage return or an escape code in a row of the picture tears it apart."""
    engine = Engine()
    view = View(engine)
    engine.add_request("\t\r\x1b[2J\x1b]0;title\x07\x0b\x0c\x85\u2028", SamplingParams(max_tokens=4))
    outputs = engine.step()
    text = "".join(plain(line) for line in [*view.picture(*view.gauges()), *(words for _, _, words in events(engine, outputs))])
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text), ascii(text)


# ----------------------------------------------------------------------------------------------
# generate


def test_generate_one_prompt():
    """Only the completion, on standard output: it is piped into other programs."""
    code, out, err = run_here("generate", "Once upon a time", "--max-tokens", "12", "--seed", "3")
    [completion] = Engine(seed=3).generate("Once upon a time", SamplingParams(max_tokens=12))
    assert (code, out, err) == (0, completion.text + "\n", "")


def test_generate_several_prompts():
    """They run in one batch, and each text stands under its own prompt, in the order given."""
    prompts = ["Once upon a time", "Q: What", "The owl"]
    code, out, err = run_here("generate", *prompts, "--max-tokens", "9", "--temperature", "0")
    expected = Engine().generate(prompts, SamplingParams(max_tokens=9, temperature=0))
    assert (code, err) == (0, "")
    assert out == "".join(f"--- {prompt}\n{completion.text}\n" for prompt, completion in zip(prompts, expected))


def test_generate_from_standard_input():
    """`echo prompt | nanoserve.py generate -`: echo's newline is not part of the prompt; a second one is."""
    said = run_here("generate", "One\nday", "--json")[1]
    assert run_here("generate", "-", "--json", data=b"One\nday\n")[1] == said
    assert run_here("generate", "-", "--json", data=b"One\nday\n\n")[1] != said


def test_generate_json():
    """One valid JSON value with everything a Completion has."""
    code, out, err = run_here("generate", "Once", "Twice", "--json", "--max-tokens", "5", "--ignore-eos")
    first, second = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(first) == {f.name for f in dataclasses.fields(nanoserve.Completion)}
    assert (first["request_id"], second["request_id"]) == ("request-0", "request-1")
    assert (first["finish_reason"], len(first["token_ids"]), first["error"]) == ("length", 5, None)


def test_generate_stops():
    """--stop may be given several times; the text ends before the first that comes."""
    args = "generate", "Once upon a time", "--temperature", "0", "--max-tokens", "40", "--ignore-eos"
    text = run_here(*args)[1].removesuffix("\n")
    stop = text[len(text) // 2:][:3]                                # whatever the model says
    code, out, _ = run_here(*args, "--stop", "\x00never", "--stop", stop)
    assert (code, out) == (0, text[:text.index(stop)] + "\n")


def test_generate_sampling_flags_reach_the_engine():
    """A flag that is parsed and dropped changes nothing, silently."""
    hot = run_here("generate", "Once", "--max-tokens", "30", "--temperature", "50", "--ignore-eos")[1]
    for flag in ("--top-k=1", "--top-p=1e-9", "--temperature=0"):
        assert run_here("generate", "Once", "--max-tokens", "30", "--temperature", "50", "--ignore-eos", flag)[1] != hot, flag
    assert run_here("generate", "Once", "--max-tokens", "30", "--temperature", "50", "--ignore-eos", "--seed", "9")[1] != hot


def test_generate_reads_any_bytes():
    """`generate - < photo.jpg` is a strange prompt, and no error."""
    garbage = bytes(range(256)) * 2
    assert run_here("generate", "-", "--max-tokens", "3", data=garbage[:100])[0] == 0
    assert run_here("generate", "-", "--max-tokens", "3", data=b"\xff\xfe\xc3(\x80\x00")[0] == 0
    code, _, err = run_here("generate", "-", data=garbage * 20)
    assert code == 2 and "context length" in err                    # too long, that is all


def test_a_terminal_without_unicode():
    """PYTHONIOENCODING=ascii, LANG=C: a character that can't be shown is replaced, and no reason to stop."""
    code, out, err = run_command("generate", "--max-tokens", "8", "héllo", "日本 \U0001f600",
                                 env=environment(PYTHONIOENCODING="ascii"))
    assert (code, err) == (0, "")
    assert out.isascii() and "--- h?llo\n" in out


# ----------------------------------------------------------------------------------------------
# mistakes


BAD_FLAGS = [
    *((flag, value) for flag in ("block-size", "num-blocks", "max-num-seqs", "max-num-batched-tokens", "max-prefill-chunk")
      for value in ("0", "-1")),
    *(("num-blocks", str(value)) for value in (10**12, 2**60, 10**20)), ("block-size", str(10**20)),
    ("device", "tpu"), ("dtype", "int8"), ("dtype", "float"), ("attention", "magic"), ("batching", "dynamic"),
    ("kv-reservation", "none"), ("seed", "-1"), ("model", ""),
    ("max-tokens", "0"), ("max-tokens", "-5"), *(("temperature", value) for value in ("-0.1", "nan", "inf", "-inf")),
    ("top-k", "-1"), *(("top-p", value) for value in ("0.0", "-0.5", "1.01", "nan", "inf")), ("stop", ""),
    *(("threads", str(value)) for value in (0, -1, 10**12)),
]


def assert_one_sentence(code, err, *parts):
    """A user's mistake: exit code 2 and one line that says what it was."""
    assert code == 2, err
    assert err.startswith("nanoserve: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err and len(err) < 400
    for part in parts:
        assert part in err, f"{part!r} not in: {err}"


@pytest.mark.parametrize("flag, value", BAD_FLAGS, ids=["=".join(pair) for pair in BAD_FLAGS])
def test_bad_value(flag, value):
    """Each flag's bad value is refused in one sentence that names the flag's field and the value."""
    code, out, err = run_here("generate", "hello", f"--{flag}={value}")
    assert_one_sentence(code, err, flag.replace("-", "_"), *([value] if len(value) < 15 else []))
    assert out == ""


@pytest.mark.parametrize("delay", ["-1", "nan", "inf"])
def test_bad_delay(delay):
    """time.sleep would refuse it after the first step, in a terminal only, without saying what."""
    code, _, err = run_here(f"--delay={delay}")
    assert_one_sentence(code, err, "delay", delay)


@pytest.mark.parametrize("args, parts", [
    (["generate", ""], ["empty"]),
    (["generate", "fine", ""], ["empty"]),
    (["generate", "word " * 600], ["context length", "512"]),
    (["generate", "hello", "--model", "/no/such/folder"], ["/no/such/folder", "no such folder"]),
    (["--model", "/no/such/folder"], ["/no/such/folder"]),
    (["generate", "hello", "--model", str(ROOT / "tests")], ["config.json", "missing"]),
    (["generate", "hello", "--model", str(ROOT / "nanoserve.py")], ["nanoserve.py"]),
    (["generate", "hello", "--num-blocks", "1", "--block-size", "4"], ["max_tokens", "num_blocks"]),
    (["--num-blocks", "2"], ["num_blocks"]),
], ids=lambda value: " ".join(value)[:50])
def test_mistake(args, parts):
    """The other things users do: each ends in a sentence, and nothing on standard output."""
    code, out, err = run_here(*args)
    assert_one_sentence(code, err, *parts)
    assert out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so asking for one is no mistake")
def test_no_gpu():
    """--device cuda on a laptop: say so, instead of torch's own page of text."""
    code, _, err = run_here("generate", "hello", "--device", "cuda")
    assert_one_sentence(code, err, "cuda", "cpu")


def test_empty_standard_input():
    """`generate - < /dev/null`."""
    for data in (b"", b"\n"):
        code, _, err = run_here("generate", "-", data=data)
        assert_one_sentence(code, err, "empty")


@pytest.mark.parametrize("args", ["--num-blocks many", "generate", "--no-such-flag", "no-such-command", "--seed 1.5",
                                  "generate x --temperature warm"])
def test_usage(args):
    """argparse's own errors: usage, then one line; exit code 2."""
    code, out, err = run_here(*args.split())
    assert code == 2 and out == ""
    assert err.startswith("usage: nanoserve.py") and "error: " in err.strip().split("\n")[-1]


def test_mistake_in_a_real_process(tmp_path):
    """What the shell sees: exit code 2, one line, no traceback."""
    code, out, err = run_command("generate", "hello", "--model", str(tmp_path))
    assert_one_sentence(code, err, str(tmp_path / "config.json"))
    assert out == ""


# ----------------------------------------------------------------------------------------------
# the process among others


@pytest.mark.parametrize("args", [[], ["generate", "Once upon a time", "The", "--max-tokens", "60", "--ignore-eos"]],
                         ids=["main job", "generate"])
def test_broken_pipe(args):
    """`| head -1`: the reader leaves, and so do we, without a word."""
    with command(*args) as process:
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read().decode()
        code = process.wait()
    assert (code, err) == (0, "")


def test_ctrl_c():
    """Ctrl-C is how a user ends a long job: no traceback, and the shell's usual code."""
    slow = "--max-tokens", "500", "--ignore-eos", "--attention", "numpy", "--max-num-seqs", "1"         # minutes, if nobody stops it
    # A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with command("generate", *["Once upon a time"] * 40, *slow, **heed) as process:
        assert process.stdout.readline() == b"--- Once upon a time\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_no_standard_streams():
    """Started by a daemon, or with >&-: Python then has sys.stdout None."""
    closed = subprocess.run(["sh", "-c", 'exec "$0" nanoserve.py generate hello --max-tokens 2 >&-', sys.executable], cwd=ROOT,
                            env=environment(), stderr=subprocess.PIPE, timeout=LIMIT)
    assert b"Traceback" not in closed.stderr, closed.stderr.decode()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a Linux device")
def test_disk_full():
    """`> file` on a full disk: one sentence, and not exit code 0."""
    with open("/dev/full", "wb") as full:
        code, _, err = run_command("generate", "hello", "--max-tokens", "2", stdout=full)
    assert_one_sentence(code, err, "No space left")


def test_import_is_light():
    """`import nanoserve` on a machine without a GPU must not look for CuPy, and a library prints nothing."""
    done = subprocess.run([sys.executable, "-c", "import sys, nanoserve; print('cupy' in sys.modules)"], cwd=ROOT,
                          env=environment(), capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"False\n", b"")


# ----------------------------------------------------------------------------------------------
# help


@pytest.mark.parametrize("args, configs", [([], [EngineConfig]), (["generate"], [EngineConfig, SamplingParams])],
                         ids=["main", "generate"])
def test_help_names_every_field_and_its_default(args, configs, monkeypatch):
    """A field without a flag can't be set; a default written down twice is wrong one day."""
    monkeypatch.setenv("COLUMNS", "300")
    code, out, err = run_here(*args, "-h")
    assert (code, err) == (0, "")
    for config in configs:
        for f in dataclasses.fields(config):
            [entry] = re.findall(rf"^  --{f.name.replace('_', '-')}\b.*\n(?:     .*\n)*", out, re.M)
            if f.default not in (None, ()) and not (config is SamplingParams and f.name == "seed"):
                assert entry.endswith(f"(default: {f.default})\n"), entry


def test_help_lists_the_commands():
    """-h is where one looks for what there is."""
    out = run_here("-h")[1]
    for name in ("generate", "bench"):
        assert re.search(rf"^    {name} +\S", out, re.M), name
