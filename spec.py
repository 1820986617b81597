"""spec.py: from logits to tokens, and from tokens to the text that may be shown.

What it does.  Turns a row of logits into a distribution (`target_probs`), guesses the next tokens (`NgramDrafter`,
`ModelDrafter`) and how many of them pay (`choose_drafts`), checks guesses and draws tokens (`verify`), and turns tokens into
text that is cut at a stop string (`Detokenizer`).

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
import math
import re
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import numpy as np

BONUS, ACCEPT, RESIDUAL, DRAFT = range(4)           # the purposes of a draw


def option(default, ok, remedy):
    """A field of a config class: its default, a test, and what a value that fails it must be."""
    return field(default=default, metadata={"ok": ok, "remedy": remedy})


def is_a(kind, value):
    return isinstance(value, kind) and not isinstance(value, bool)


# For option(default, *rule): a test, and what a value must be.
FLAG = (lambda value: isinstance(value, bool)), "True or False"


def at_least(least, remark):
    return (lambda value: is_a(Integral, value) and value >= least), f"an integer of at least {least}{remark}"


def one_of(*allowed):
    return (lambda value: value in allowed), "one of " + ", ".join(repr(value) for value in allowed)


def require(ok, sentence):
    """For users' mistakes: one sentence, with the limit and the remedy."""
    if not ok:
        raise ValueError(sentence)


@contextlib.contextmanager
def reading(path):
    """Whatever goes wrong while a file is read and understood becomes one sentence that starts with its name."""
    try:
        yield
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error.strerror})"
        raise ValueError(f"{path} {what}: a model folder holds config.json, model.safetensors, vocab.json, merges.txt") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} can't be understood: {error!r}") from None


class Checked:
    """A config class whose fields are options, and whose docstring has a line for each: the command line shows them. A value
    that fails its test raises ValueError; None passes if it is the default."""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            ok = (value is None and f.default is None) or f.metadata["ok"](value)
            require(ok, f"{f.name}={value!r:.99}: it must be {f.metadata['remedy']}")

    @classmethod
    def help(cls):
        """field -> its sentence in the docstring."""
        return {name: " ".join(text.split()) for name, text in re.findall(r"^ {4}(\w+) {2,}(.*(?:\n {8,}.*)*)", cls.__doc__, re.M)}


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How one request is sampled and when it stops. A bad value raises ValueError.

    max_tokens   most tokens to generate; the context length may end it earlier
    temperature  0 is greedy: the likeliest token, the lowest id among equals
    top_k        keep the k likeliest tokens; 0 keeps all, as does a number above the vocabulary
    top_p        then keep the fewest tokens that hold this much probability; 1 keeps all
    seed         of the draws: same seed, same tokens; without one the engine gives each request its own
    stop         the text ends before this string; there may be several
    ignore_eos   go on after <|endoftext|>

    >>> SamplingParams(stop="\\n").stop
    ('\\n',)
    """

    max_tokens: int = option(16, *at_least(1, ""))
    temperature: float = option(1.0, lambda v: is_a(Real, v) and 0 <= v < math.inf, "a finite number of at least 0; 0 is greedy")
    top_k: int = option(0, *at_least(0, "; 0 keeps all"))
    top_p: float = option(1.0, lambda v: is_a(Real, v) and 0 < v <= 1, "above 0 and at most 1; 1 keeps all")
    seed: int | None = option(None, lambda v: is_a(Integral, v), "an integer, or None for the engine's choice")
    stop: tuple = option((), lambda v: v is None or isinstance(v, str) and v or isinstance(v, (list, tuple))
                         and len(v) <= 64 and all(isinstance(s, str) and s for s in v), "a string or up to 64, none of them empty")
    ignore_eos: bool = option(False, *FLAG)

    def __post_init__(self):
        super().__post_init__()
        # NumPy's numbers pass the tests, but would overflow in the sums to come; an integer can be beyond all floats.
        heat = min(int(self.temperature), 10**308) if is_a(Integral, self.temperature) else self.temperature
        plain = {"max_tokens": int(self.max_tokens), "temperature": float(heat), "top_k": int(self.top_k),
                 "top_p": float(self.top_p), "seed": None if self.seed is None else int(self.seed),
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
    support = np.flatnonzero(probs > 0)                     # after top-k, top-p or greedy a few of 50,257 are left
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
        likely = np.flatnonzero(probs >= (1 - params.top_p) / len(probs))   # the others hold less than 1 - top_p together: not kept
        order = likely[np.argsort(-probs[likely], kind="stable")]
        before = np.cumsum(probs[order]) - probs[order]                     # mass of all likelier tokens
        keep = order[before < params.top_p]                                 # the likeliest has 0 before it: always kept
        probs = np.bincount(keep, probs[keep] / probs[keep].sum(), len(probs))
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


class NoDrafter:
    """It never guesses: plain decoding."""

    def guess(self, request, k):
        return []

    def fill(self, requests):
        pass

    def follow(self, sequences):
        pass


class NgramDrafter(NoDrafter):
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


class ModelDrafter:
    """A small model that guesses one token after the other, for all requests at once.

    Its K/V live in the same blocks and slots as the target's, in tensors of its own. It computes every position that the
    target computes, so wherever the target's K/V can be read, its own can: prefix hits, preemption and refused guesses
    need no code here.
    """

    def __init__(self, model, forward, vocab_size):
        """model: whose config.context_length counts; forward(sequences, as Batch.build takes them) -> logits [S, V];
        vocab_size: the target's."""
        self.model, self.forward, self.vocab_size = model, forward, vocab_size
        self.context_length = model.config.context_length

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


def fit_line(passes):
    """(a, b), such that a pass takes a + b * rows seconds: least squares over passes, a list of (rows, seconds).

    On a large GPU b is almost 0 while the batch is small: checking five tokens costs what one costs. On a full batch, or a
    CPU, it is not. Whatever clock the engine has decides: the wall's, or one that ticks by a GPU's datasheet.

    >>> [round(float(x), 6) for x in fit_line([(1, 12.0), (2, 14.0), (3, 16.0)])]
    [10.0, 2.0]
    """
    rows, seconds = np.array(passes or [(0, 1.0)], dtype=float).T
    spread = rows.var()                                                 # 0 if all had the same size: b is unknown
    b = max(((rows - rows.mean()) * seconds).mean() / spread, 0.0) if spread > 1e-9 else 0.0
    return max(seconds.mean() - b * rows.mean(), 1e-9), b               # a pass is never free


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


def choose_drafts(rates, other_rows, line, draft_seconds, most=5):
    """Guesses for each stream, such that the expected tokens per second are the most. -> list of k, some or all 0.

    rates: the chance that a guess is right, for each stream; other_rows: rows of the pass that are not theirs; line: (a, b)
    of the target's passes; draft_seconds: of one pass of the drafter; most: what a longer run adds rarely pays for being tried.

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
