"""tokenizer.py: from text to tokens and back, by the files of a model's folder. Byte-level BPE, identical to GPT-2's.

    text --pretokenize--> pieces --UTF-8--> bytes --merges, in the order they were learnt--> tokens --vocab--> ids

The merges (Sennrich et al. 2016) never cross the edge of a piece. Any bytes have ids, so nothing is ever unknown.
"""

import functools
import heapq
import json
import re
import unicodedata
from pathlib import Path

from spec import reading, require


def _byte_alphabet():
    """GPT-2's printable stand-in for each of the 256 bytes: itself where printable, else 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [stand_in[b] for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()


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

    >>> tokenizer = Tokenizer.load(Path(__file__).parent / "tiny")
    >>> tokenizer.decode(tokenizer.encode("naïve 日本")), tokenizer.decode_bytes(tokenizer.encode(b"\\xff"))
    ('naïve 日本', b'\\xff')
    """

    def __init__(self, vocab, merges):
        """vocab: dict of token string -> id; merges: list of (left, right) in order of rank."""
        char_to_byte = {c: b for b, c in enumerate(BYTE_TO_CHAR)}
        self.eos_id = vocab["<|endoftext|>"]
        self.ids = {bytes(char_to_byte[c] for c in token): i for token, i in vocab.items() if i != self.eos_id}
        self.bytes = {i: token for token, i in self.ids.items()} | {self.eos_id: b""}
        self.longest = max(map(len, self.ids))                                      # most bytes of a token
        self.rank = {tuple(bytes(char_to_byte[c] for c in part) for part in pair): r for r, pair in enumerate(merges)}
        self._remembered = functools.lru_cache(maxsize=65536)(self._merge)          # texts repeat their words

    @classmethod
    def load(cls, folder):
        """Read vocab.json and merges.txt, and check that they belong together."""
        path = Path(folder) / "vocab.json"
        with reading(path):
            vocab = json.loads(path.read_text("utf-8"))
            ids, alphabet = list(vocab.values()), {*BYTE_TO_CHAR}
            require(all(type(i) is int and i >= 0 for i in ids) and len(set(ids)) == len(ids),
                    "the ids must be different integers, from 0")
            for token in (*BYTE_TO_CHAR, "<|endoftext|>"):
                require(token in vocab, f"the token {token!r} is missing")
            strange = next((token for token in vocab if not set(token) <= alphabet), None)
            require(strange is None, f"the token {strange!r} is not written in GPT-2's alphabet of bytes")
        path = Path(folder) / "merges.txt"
        with reading(path):
            lines = [line.removesuffix("\r") for line in path.read_text("utf-8").split("\n")]
            merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
            for pair in merges:
                require(len(pair) == 2 and "" not in pair and {*pair, "".join(pair)} <= vocab.keys(),
                        f"the line {' '.join(pair)!r} does not join two tokens of vocab.json to a third")
            made = {"".join(pair) for pair in merges}
            unmade = next((token for token in vocab
                           if len(token) > 1 and token not in made and (token[0], token[-1]) != ("<", ">")), None)
            require(unmade is None, f"no line makes the token {unmade!r} of vocab.json: truncated?")
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
