"""spec.py: from logits to tokens, from tokens to text, and back.

What it does.  Turns a row of logits into a distribution (`target_probs`), guesses the next tokens (`NgramDrafter`,
`ModelDrafter`) and how many of them pay (`choose_drafts`), checks guesses and draws tokens (`verify`), and turns tokens into
text that is cut at a stop string (`Detokenizer`). `Tokenizer` is GPT-2's.

What it does not know.  Batches, blocks, how a model computes: a row of logits is a NumPy array, and a draft model is a
function that returns some.

The idea (speculative sampling: Leviathan et al. 2023, Chen et al. 2023).  A pass that checks k guessed tokens and one
more costs little more than a pass for one token. Row i of the pass gives the target's distribution after i guesses:

    accept guess x with probability min(1, target(x) / draft(x));
    at the first refusal draw from the part of target that draft did not cover, max(target - draft, 0), normalised;
    if all were accepted, draw one more, the bonus token, from the last row.

What comes out is distributed exactly as if drawn from the target one by one. Plain sampling is the case of no
guesses: nothing to accept, the bonus token is the token. Greedy is the case of a target with all its mass on one
token. Neither needs code of its own.

Invariants.
  - The draw for a position depends on (seed, position, purpose) only: not on the batch, on how often the request was
    preempted, or on what was drawn before. Accepting, the residual and the bonus have purposes of their own.
  - `verify` emits at least one and at most 1 + k tokens.
  - The pieces of text that a Detokenizer hands out concatenate to the final text; nothing of a stop string, and no
    half of a character, is ever handed out.

A guess is a token like any other until it is refused: it has a place in the batch, a slot for its K and V, a share of the
token budget. Refused, it is forgotten, and the next step overwrites its slot. In a run of guesses each stands on those
before it, so a run survives to position i with probability rate^i, if each is right with probability rate.

Policies.  Distributions are float64: softmax over 50,257 float32 logits loses digits that a draw can see. Ties at the
edge of top-k are all kept; of equals at the edge of top-p, those with the lowest ids. Rejected: trees of guesses (Medusa,
EAGLE), which check several continuations in one pass: more tokens a pass, and a mask that hides the idea.

Limits.  The draft model computes all that the target computes, also while nobody asks it for guesses.
"""

import codecs
import contextlib
import functools
import heapq
import json
import math
import re
import unicodedata
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path

import numpy as np

BONUS, ACCEPT, RESIDUAL, DRAFT = range(4)           # the purposes of a draw


def option(default, ok, remedy, help):
    """A field of a config class: its default, a test, what a value that fails must be, and the sentence for -h."""
    return field(default=default, metadata={"ok": ok, "remedy": remedy, "help": help})


def is_a(kind, value):
    return isinstance(value, kind) and not isinstance(value, bool)


def at_least(least):
    return lambda value: is_a(Integral, value) and value >= least


FLAG = (lambda value: isinstance(value, bool)), "True or False"


def require(ok, sentence):
    """For users' mistakes: one sentence, with the limit and the remedy."""
    if not ok:
        raise ValueError(sentence)


class Checked:
    """A config class whose fields are options: a value that fails its test raises ValueError. None passes as a default."""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            ok = (value is None and f.default is None) or f.metadata["ok"](value)
            require(ok, f"{f.name}={value!r}: it must be {f.metadata['remedy']}")


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How one request is sampled and when it stops. A bad value raises ValueError.

    Same seed, same tokens; without one the engine gives each request its own. top_k above the vocabulary is the vocabulary.

    >>> SamplingParams(stop="\\n").stop
    ('\\n',)
    """

    max_tokens: int = option(16, at_least(1), "an integer of at least 1",
                             "most tokens to generate; the context length may end it earlier")
    temperature: float = option(1.0, lambda v: is_a(Real, v) and 0 <= v < math.inf, "a finite number of at least 0; 0 is greedy",
                                "0 is greedy: the likeliest token, the lowest id among equals")
    top_k: int = option(0, at_least(0), "an integer of at least 0; 0 keeps all", "keep the k likeliest tokens; 0 keeps all")
    top_p: float = option(1.0, lambda v: is_a(Real, v) and 0 < v <= 1, "above 0 and at most 1; 1 keeps all",
                          "then keep the fewest tokens that hold this much probability; 1 keeps all")
    seed: int | None = option(None, at_least(-math.inf), "an integer, or None for the engine's choice", "of the draws")
    stop: tuple = option((), lambda v: isinstance(v, (str, list, tuple, type(None))) and all(isinstance(s, str) and s for s in v or ())
                         and v != "", "a string or several, none of them empty",
                         "the text ends before this string; may be given several times")
    ignore_eos: bool = option(False, *FLAG, "go on after <|endoftext|>")

    def __post_init__(self):
        super().__post_init__()
        # NumPy's numbers pass the tests, but would overflow in the sums to come; an integer can be beyond all floats.
        heat = min(int(self.temperature), 10**308) if is_a(Integral, self.temperature) else self.temperature
        plain = {"max_tokens": int(self.max_tokens), "temperature": float(heat),
                 "top_k": int(self.top_k), "top_p": float(self.top_p), "seed": None if self.seed is None else int(self.seed),
                 "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())}
        for name, value in plain.items():
            object.__setattr__(self, name, value)           # the way past a frozen dataclass's own guard


# ----------------------------------------------------------------------------------------------
# randomness


def draw(seed, position, purpose):
    """A number in [0, 1), a function of its three arguments and of nothing else.

    Philox (Salmon et al. 2011) is a generator with a counter in place of a state: any draw can be had first.

    >>> draw(1, 5, BONUS) == draw(1, 5, BONUS), draw(1, 5, BONUS) == draw(1, 6, BONUS)
    (True, False)
    """
    # The generator counts up in the first two words of its counter. So two streams that differ in the others never meet.
    philox = np.random.Philox(key=seed % 2**128, counter=[0, 0, purpose, position])
    return np.random.Generator(philox).random()


def sample(probs, u):
    """The token at which the running sum of probs [V] (not necessarily normalised) passes the share u of its total.

    >>> [sample(np.array([0.25, 0.0, 0.75]), u) for u in (0.0, 0.24, 0.25, 0.99)]
    [0, 0, 2, 2]
    """
    support = np.flatnonzero(probs)                         # after top-k, top-p or greedy a few of 50,257 are left
    cdf = np.cumsum(probs[support])
    at = np.searchsorted(cdf, u * cdf[-1], side="right")
    return int(support[min(at, len(support) - 1)])          # u * total can round up to the total


# ----------------------------------------------------------------------------------------------
# from logits to a distribution, from distributions to tokens


def target_probs(logits, params):
    """The distribution to sample from: logits [V] -> float64 probabilities [V].

    >>> logits = np.log([0.1, 0.2, 0.3, 0.4])
    >>> target_probs(logits, SamplingParams(temperature=0)).round(3).tolist()
    [0.0, 0.0, 0.0, 1.0]
    >>> target_probs(logits, SamplingParams(top_k=2)).round(3).tolist()
    [0.0, 0.0, 0.429, 0.571]
    >>> target_probs(logits, SamplingParams(top_p=0.6)).round(3).tolist()
    [0.0, 0.0, 0.429, 0.571]
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        too_cold = params.temperature == 0 or np.isinf(np.ptp(logits) / params.temperature)
    if too_cold:                                            # to divide by: greedy
        probs = np.zeros(len(logits))
        probs[logits.argmax()] = 1.0
        return probs
    logits = np.asarray(logits, dtype=np.float64)
    scaled = (logits - logits.max()) / params.temperature   # <= 0, so exp can't overflow
    if 0 < params.top_k < len(scaled):
        smallest_kept = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled = np.where(scaled >= smallest_kept, scaled, -np.inf)
    probs = np.exp(scaled)
    probs /= probs.sum()
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]                 # mass of all likelier tokens
        probs[order[before >= params.top_p]] = 0.0                      # the likeliest has 0 before it: always kept
        probs /= probs.sum()
    return probs


def verify(target, drafts, draft_probs, seed, position):
    """Check the guesses against the target and add one token: 1 to 1 + k tokens.

    target [k + 1, V]: row i is the target's distribution after drafts[:i]; drafts: k tokens; draft_probs [k, V]: the
    distribution each was really drawn from; position: that of the first token to be emitted.

    >>> verify(np.array([[0.0, 1.0]]), [], [], seed=0, position=9)          # no guesses: plain sampling
    [1]
    >>> one_hot = np.eye(4)
    >>> verify(one_hot[[1, 2, 3]], [1, 2], one_hot[[1, 2]], seed=0, position=9)     # all accepted, and the bonus
    [1, 2, 3]
    >>> verify(one_hot[[1, 0, 3]], [1, 2], one_hot[[1, 2]], seed=0, position=9)     # 2 refused: corrected to 0
    [1, 0]
    """
    for i, x in enumerate(drafts):
        # u < target / draft, without the division
        if draw(seed, position + i, ACCEPT) * draft_probs[i][x] >= target[i][x]:
            residual = np.maximum(target[i] - draft_probs[i], 0.0)
            residual = residual if residual.any() else target[i]        # equal but for rounding: any is right
            return [*drafts[:i], sample(residual, draw(seed, position + i, RESIDUAL))]
    return [*drafts, sample(target[-1], draw(seed, position + len(drafts), BONUS))]


# ----------------------------------------------------------------------------------------------
# guessing
#
# A drafter has three moments in a step. `guess`, before the scheduler: how many guesses a request would like checked, a list
# that the scheduler may shorten. `fill`, after it: the guesses themselves, and the distribution each was drawn from.
# `follow`, after the target's pass: the same tokens, for a drafter that has a memory of its own to keep up to date.


class NgramDrafter:
    """What followed the last few tokens when they occurred before (prompt lookup, Saxena 2023). Needs no model.

    The longest suffix of up to MAX_N tokens that occurs earlier in the request, prompt or output; of several occurrences
    the latest, since text resembles its neighbourhood. It has to be followed by something, so the suffix never finds
    itself; what follows may run into it, and then goes round.

    >>> from types import SimpleNamespace
    >>> request = SimpleNamespace(tokens=[1, 2, 3, 9, 1, 2, 4, 1, 2])
    >>> NgramDrafter(10).guess(request, 4)              # [1, 2] was last followed by 4, 1, 2, and so on
    [4, 1, 2, 4]
    """

    MAX_N = 3

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def guess(self, request, k):
        tokens = np.array(request.tokens)
        for n in range(min(self.MAX_N, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)          # the last token has no follower
            found = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
            if len(found):
                follower = found[-1] + n
                return [int(tokens[follower + i % (len(tokens) - follower)]) for i in range(k)]
        return []

    def fill(self, requests):
        """It is certain of its guesses: each distribution has all its mass on one token."""
        for request in requests:
            request.draft_probs = np.zeros((len(request.drafts), self.vocab_size))
            request.draft_probs[range(len(request.drafts)), request.drafts] = 1.0

    def follow(self, sequences):
        pass


class ModelDrafter:
    """A small model that guesses one token after the other, for all requests at once.

    Its K/V live in the same blocks and slots as the target's, in tensors of its own. It computes every position that the
    target computes, so wherever the target's K/V can be read, its own can: prefix hits, preemption and refused guesses
    need no code here.
    """

    def __init__(self, forward, context_length, vocab_size):
        """forward(sequences, as Batch.build takes them) -> logits [S, V]."""
        self.forward, self.context_length, self.vocab_size = forward, context_length, vocab_size

    def guess(self, request, k):
        return [0] * max(0, min(k, self.context_length - len(request.tokens)))      # a request for room; fill knows better

    def fill(self, requests):
        for request in requests:
            request.draft_probs = np.zeros((len(request.drafts), self.vocab_size))
        for i in range(max((len(request.drafts) for request in requests), default=0)):
            active = [request for request in requests if len(request.drafts) > i]
            # Guess i comes from the token before it: the last real one, or guess i - 1.
            logits = self.forward([([request.drafts[i - 1] if i else request.tokens[-1]], len(request.tokens) - 1 + i,
                                    request.block_table, 1) for request in active])
            for request, row in zip(active, logits):
                # The target judges every guess, so a draft that overflows or has other ids only guesses badly.
                probs = target_probs(np.nan_to_num(row[:self.vocab_size]), request.params)
                request.draft_probs[i, :len(probs)] = probs
                request.drafts[i] = sample(probs, draw(request.seed, len(request.tokens) + i, DRAFT))

    def follow(self, sequences):
        known = [(tokens[:self.context_length - start], start, table, 0) for tokens, start, table, _ in sequences
                 if start < self.context_length]
        if known:
            self.forward(known)


# ----------------------------------------------------------------------------------------------
# how many guesses: num_draft_tokens="auto"


class PassCost:
    """Seconds of a pass as a + b * rows, fitted to the passes so far, the past fading.

    On a large GPU b is almost 0 while the batch is small: checking five tokens costs what one costs. On a full batch, or a
    CPU, it is not. Whatever clock the engine has decides: the wall's, or one that ticks by a GPU's datasheet.

    >>> cost = PassCost()
    >>> for rows in (1, 2, 3): cost.add(rows, 10 + 2 * rows)
    >>> [round(x, 6) for x in cost.line()]
    [10.0, 2.0]
    """

    def __init__(self):
        self.sums = (0.0,) * 5                      # of 1, rows, rows^2, seconds, rows * seconds

    def add(self, rows, seconds):
        now = (1.0, rows, rows * rows, seconds, rows * seconds)
        self.sums = tuple(0.98 * old + new for old, new in zip(self.sums, now))

    def line(self):
        """-> (a, b), by least squares."""
        n, x, xx, y, xy = self.sums
        spread = xx * n - x * x
        b = max((xy * n - x * y) / spread, 0.0) if spread > 1e-9 * xx * n else 0.0      # always the same size: b unknown
        return (max((y - b * x) / n, 1e-9), b) if n else (1.0, 0.0)           # a pass is never free


class Acceptance:
    """How often guesses were right lately: counts that fade, held near a prior while they are small.

    A request's prior is the engine's own figure, so a newcomer starts from what the others have learnt.

    >>> everybody = Acceptance()
    >>> everybody.add(9, 10)
    >>> round(everybody.rate(), 3), round(Acceptance(everybody).rate(), 3)
    (0.857, 0.857)
    """

    FADE, FIRST_GUESS, WEIGHT = 0.99, 0.75, 4.0         # WEIGHT: checks that outweigh the prior

    def __init__(self, prior=None):
        self.right, self.checked, self.prior = 0.0, 0.0, prior

    def add(self, right, checked):
        self.right, self.checked = self.FADE * self.right + right, self.FADE * self.checked + checked

    def rate(self):
        prior = self.prior.rate() if self.prior else self.FIRST_GUESS
        return (self.right + self.WEIGHT * prior) / (self.checked + self.WEIGHT)


def choose_drafts(rates, other_rows, line, draft_seconds, most):
    """Guesses for each stream, such that the expected tokens per second are the most. -> list of k, some or all 0.

    rates: the chance that a guess is right, for each stream; other_rows: rows of the pass that are not theirs; line: (a, b)
    of the target's PassCost; draft_seconds: of one pass of the drafter.

    It thinks of this step only: of nobody who waits, and of no stream's end. A run survives to position i with probability
    rate^i, and that is what guess i adds to the expectation. So guesses are taken in order of rate^i, over all streams,
    while each is worth its row. The drafter makes the guesses one after the other for all streams at once: how deep it
    goes is a cost of its own, so every depth is tried.

    >>> choose_drafts([0.9, 0.5, 0.1], 0, (1.0, 0.01), 0.05, most=6)        # rows are cheap: a good stream guesses far
    [6, 4, 1]
    >>> choose_drafts([0.9, 0.5, 0.1], 0, (1.0, 0.3), 0.05, most=6)         # rows are dear
    [4, 0, 0]
    >>> choose_drafts([0.9, 0.5, 0.1], 0, (1.0, 0.3), 2.0, most=6)          # the drafter is dear: no guesses at all
    [0, 0, 0]
    """
    (a, b), best, best_value = line, [0] * len(rates), 0.0
    for depth in range(most + 1):
        guesses = sorted(((rate ** i, stream) for stream, rate in enumerate(rates) for i in range(1, depth + 1)), reverse=True)
        counts, tokens = [0] * len(rates), float(len(rates))
        seconds = a + b * (other_rows + len(rates)) + depth * draft_seconds
        for gain, stream in guesses:
            if gain * seconds <= tokens * b:                # (tokens + gain) / (seconds + b) <= tokens / seconds
                break
            counts[stream], tokens, seconds = counts[stream] + 1, tokens + gain, seconds + b
        if tokens / seconds > best_value:
            best, best_value = counts, tokens / seconds
    return best


# ----------------------------------------------------------------------------------------------
# from tokens to text, as they come


class Detokenizer:
    """The text of one request as it grows: bytes of tokens in, text that is safe to show out.

    The text ends before the first stop string that a token completes. The tokens of that stop string stay in token_ids,
    as <|endoftext|> does: they were computed and paid for.

    Two things are held back: the bytes of a character that is not complete yet (a token can end within one), and an
    end of the text that may turn out to be the start of a stop string.

    >>> text = Detokenizer(stop=("END",))
    >>> [text.add(piece) for piece in (b"caf\\xc3", b"\\xa9 E", b"N", b"joy E", b"ND of it")], text.stopped
    (['caf', 'é ', '', 'ENjoy ', ''], True)
    """

    def __init__(self, stop=()):
        self.stop = stop
        self.stopped = False
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data, final=False):
        """Append the bytes of a token; return the new text. With final=True, all that was held back."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(data, final)
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[:min(found)]
        held = 0 if final else max((self._overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - held:]
        return text[:len(text) - held]

    @staticmethod
    def _overlap(text, stop):
        """Length of the longest end of `text` that a stop string starts with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


# ----------------------------------------------------------------------------------------------
# from text to tokens and back: byte-level BPE (Sennrich et al. 2016), identical to GPT-2's
#
#   text --pretokenize--> pieces --UTF-8--> bytes --merges, in the order they were learnt--> tokens --vocab--> ids


def _byte_alphabet():
    """GPT-2's printable stand-in for each of the 256 bytes: itself where printable, else 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stand_in[b] for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()


@contextlib.contextmanager
def reading(path):
    """Whatever goes wrong while a file is read and understood becomes one sentence that starts with its name."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a model folder holds config.json, model.safetensors, vocab.json and "
                         "merges.txt") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is not what a GPT-2 folder holds: {error!r}") from None


class _CharClass(dict):
    """For str.translate: every non-ASCII character becomes an ASCII one of its kind.

    GPT-2's pattern asks for Unicode's letters and numbers, which Python's re can't. So it runs over a shadow of the text:
    a letter is "a", a number "0", a blank a newline, anything else "!". The shadow is as long as the text, so the pieces
    found in one are the pieces of the other. Categories come from unicodedata, one look per different character.
    """

    def __missing__(self, code):
        char = chr(code)
        if code >= 128:
            char = {"L": "a", "N": "0"}.get(unicodedata.category(char)[0], "\n" if char.isspace() else "!")
        self[code] = char
        return char


_CHAR_CLASS = _CharClass()
_PIECE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+", re.ASCII)


def pretokenize(text):
    """Split text where GPT-2 does, before any merge: a merge never crosses the edge of a piece.

    >>> pretokenize("I'll take 12  eggs!")
    ['I', "'ll", ' take', ' 12', ' ', ' eggs', '!']
    """
    return [text[m.start():m.end()] for m in _PIECE.finditer(text.translate(_CHAR_CLASS))]


class Tokenizer:
    """Byte-level BPE with GPT-2's files. Text to ids and back; any bytes have ids, so nothing is ever unknown.

    `<|endoftext|>` written in a text is encoded as the ordinary characters it is made of: only the engine
    deals in the id `eos_id`, so no prompt can forge the end of a text.

    >>> tokenizer = Tokenizer.load(Path(__file__).parent / "weights" / "tiny")
    >>> tokenizer.decode(tokenizer.encode("naïve 日本")), tokenizer.decode_bytes(tokenizer.encode(b"\\xff"))
    ('naïve 日本', b'\\xff')
    """

    def __init__(self, vocab, merges):
        """vocab: dict of token string -> id; merges: list of (left, right) in order of rank."""
        char_to_byte = {c: b for b, c in enumerate(BYTE_TO_CHAR)}
        self.eos_id = vocab["<|endoftext|>"]
        self.ids = {bytes(char_to_byte[c] for c in token): i for token, i in vocab.items() if i != self.eos_id}
        self.bytes = {i: token for token, i in self.ids.items()} | {self.eos_id: b""}
        self.rank = {tuple(bytes(char_to_byte[c] for c in part) for part in pair): r for r, pair in enumerate(merges)}
        self._remembered = functools.lru_cache(maxsize=65536)(self._merge)          # texts repeat their words

    @classmethod
    def load(cls, folder):
        """Read vocab.json and merges.txt, and check that they belong together."""
        path = Path(folder) / "vocab.json"
        with reading(path):
            vocab = json.loads(path.read_text("utf-8"))
            ids, alphabet = list(vocab.values()), {*BYTE_TO_CHAR}
            require(all(type(i) is int and i >= 0 for i in ids) and len(set(ids)) == len(ids), "the ids must be different integers, from 0")
            for token in (*BYTE_TO_CHAR, "<|endoftext|>"):
                require(token in vocab, f"the token {token!r} is missing")
            for token in vocab:
                require(set(token) <= alphabet, f"the token {token!r} is not written in GPT-2's alphabet of bytes")
        path = Path(folder) / "merges.txt"
        with reading(path):
            lines = [line.removesuffix("\r") for line in path.read_text("utf-8").split("\n")]
            merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
            for pair in merges:
                require(len(pair) == 2 and "" not in pair and {*pair, "".join(pair)} <= vocab.keys(),
                        f"the line {' '.join(pair)!r} does not join two tokens of vocab.json to a third")
            made = {"".join(pair) for pair in merges}
            for token in vocab:
                require(len(token) == 1 or token in made or (token[0], token[-1]) == ("<", ">"),
                        f"no line makes the token {token!r} of vocab.json: truncated?")
        return cls(vocab, merges)

    def _merge(self, piece):
        """The ids of one piece: join the neighbours whose merge was learnt first, until no pair is known.

        A heap of candidate pairs and a linked list of parts keep it O(n log n) on a piece of any length.
        """
        parts = [bytes([b]) for b in piece]
        after, before = list(range(1, len(parts) + 1)), list(range(-1, len(parts) - 1))
        heap = []

        def offer(i):
            if i >= 0 and after[i] < len(parts):
                pair = parts[i], parts[after[i]]
                if pair in self.rank:
                    heapq.heappush(heap, (self.rank[pair], i, pair))

        for i in range(len(parts) - 1):
            offer(i)
        while heap:
            _, i, pair = heapq.heappop(heap)
            j = after[i]
            if j >= len(parts) or (parts[i], parts[j]) != pair:
                continue                                 # one of the two was merged away since it was offered
            parts[i], parts[j] = pair[0] + pair[1], b""
            after[i] = after[j]
            if after[i] < len(parts):
                before[after[i]] = i
            offer(before[i])
            offer(i)
        return [self.ids[part] for part in parts if part]

    def encode(self, text):
        """str -> list of ids. Bytes are taken too, valid UTF-8 or not; a lone surrogate becomes U+FFFD."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        else:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return [i for piece in pretokenize(text) for i in self.piece(piece.encode("utf-8", "surrogateescape"))]

    def piece(self, piece):
        """The ids of the bytes of one piece. Only short ones are remembered: a long one does not come again."""
        return self._remembered(piece) if len(piece) < 64 else self._merge(piece)

    def decode_bytes(self, ids):
        """ids -> bytes. An id without a token (models pad their embedding) is U+FFFD."""
        return b"".join(self.bytes.get(i, b"\xef\xbf\xbd") for i in ids)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")
