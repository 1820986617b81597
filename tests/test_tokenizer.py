"""The tokenizer: GPT-2's pieces, GPT-2's ids, and any bytes back as they came."""

import functools
import random
import tracemalloc
import unicodedata

import pytest
from conftest import ROOT
from nanoserve import EMBEDDED
from weights.tokenizer import BYTE_TO_CHAR, Tokenizer, pretokenize

GPT2_VOCAB = ROOT.parent / "shared" / "gpt2-vocab"


@functools.cache
def load(name):
    if name == "gpt2" and not GPT2_VOCAB.is_dir():
        pytest.skip(f"GPT-2's real vocabulary (vocab.json, merges.txt) is not at {GPT2_VOCAB}")
    return Tokenizer.load(GPT2_VOCAB if name == "gpt2" else EMBEDDED / "tiny")


@pytest.fixture(scope="module", params=["tiny", "gpt2"])
def tokenizer(request):
    return load(request.param)


# ----------------------------------------------------------------------------------------------
# references: the same rules, written as one would explain them


WHITE_SPACE = {*map(chr, (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
                          0x3000))}         # Unicode's property White_Space, which differs from str.isspace in \x1c-\x1f
CONTRACTIONS = "'s", "'d", "'m", "'t", "'ll", "'ve", "'re"


def kind(char):
    if char in WHITE_SPACE:
        return "blank"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def naive_pretokenize(text):
    """GPT-2's pattern 's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+ by hand."""
    pieces, i = [], 0
    while i < len(text):
        first = i + 1 if text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != "blank" else i
        end = first
        while end < len(text) and kind(text[end]) == kind(text[first]):
            end += 1
        if kind(text[first]) == "blank" and end < len(text) and end - i > 1:
            end -= 1                            # the last blank of a run belongs to the word after it
        end = next((i + len(c) for c in CONTRACTIONS if text.startswith(c, i)), end)
        pieces.append(text[i:end])
        i = end
    return pieces


def naive_bpe(tokenizer, piece):
    """Look at every pair, join the one learnt first (the leftmost of equals), and start again."""
    parts = [bytes([b]) for b in piece]
    while True:
        known = [(tokenizer.rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in tokenizer.rank]
        if not known:
            return [tokenizer.ids[part] for part in parts]
        i = min(known)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


BLANKS = " \u00a0\u3000\u0085\x1c\x1d\x1e\x1f\t\n\r\v\f\u1680\u2003\u2028\u202f"
ODD = "'’\u200b\u200d\ufeff\u180e\u0301\u00ad²½Ⅷ٣１ªºʰǅ日語한हि👩👧🏽\U0001d7d8\U00010437\U0010ffff\ue000\x00\x7f_-.!<|>"
WORDS = ["don't", "I'll", "we've", "'S", "'ré", "''s", "hello", " world", "The", " the",
         "  ", "\n\n", "123", "<|endoftext|>", "naïve"]


def random_texts(seed, count):
    r = random.Random(seed)
    everything = [chr(c) for c in range(0x32000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    pools = [BLANKS + "aé1'", BLANKS + ODD + "abcst1", "aaab ", WORDS, WORDS + list(BLANKS + ODD), everything]
    return ["".join(r.choices(r.choice(pools), k=r.randrange(25))) for _ in range(count)]


# ----------------------------------------------------------------------------------------------
# tests


# Ids from tiktoken 0.14 and Hugging Face tokenizers 0.23 on the same two files; the two agreed on each of these.
GPT2_IDS = [
    ("Hello, world! It's 2024.", [15496, 11, 995, 0, 632, 338, 48609, 13]),
    ("I'll we've they're don't I'm he'd 'S 'LL 'r\u00e9 're\u00e9",
     [40, 1183, 356, 1053, 484, 821, 836, 470, 314, 1101, 339, 1549, 705, 50, 705, 3069, 705, 29350, 705, 260, 2634]),
    ("x''s '' 's'S", [87, 7061, 82, 10148, 705, 82, 6, 50]),
    ("a  b   c\n\n\nd \n e\t\tf \t", [64, 220, 275, 220, 220, 269, 628, 198, 67, 220, 198, 304, 197, 197, 69, 220, 197]),
    ("   leading and trailing   ", [220, 220, 3756, 290, 25462, 220, 220, 220]),
    ("1234567890 3.14 \u00bd \u00b2 \u2167 \u0663\u0664 \uff11\uff12 x1y2",
     [10163, 2231, 30924, 3829, 513, 13, 1415, 25208, 1587, 110, 2343, 227, 100, 18923, 96, 149, 97, 27332, 120, 239, 171,
      120, 240,
      2124, 16, 88, 17]),
    ("a\u00a0b\u00a0\u00a0c\u3000d\u2028e\u1680f",
     [64, 1849, 65, 1849, 1849, 66, 5099, 222, 67, 447, 101, 68, 157, 248, 222, 69]),
    ("a\u0085b \u0085\u0085 c", [64, 126, 227, 65, 1587, 227, 126, 227, 269]),
    ("a\x1cb\x1d\x1e c \x1f\x1f d", [64, 216, 65, 217, 218, 269, 220, 219, 219, 288]),
    ("\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1f3\U0001f1f4!\U0001f44d\U0001f3fd",
     [41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 12520, 229, 111, 8582, 229, 112, 0, 41840, 235, 8582, 237, 121]),
    ("\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8\u3002\u4e2d\u6587\uff0c\ud55c\uad6d\uc5b4",
     [33768, 98, 17312, 105, 45739, 252, 5641, 24336, 43302, 16764, 40792, 23877, 229, 171, 120, 234, 47991, 250, 166,
      113, 255, 168,
      244, 112]),
    ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ("na\u00efve caf\u00e9 e\u0301 \u0301x \u00dcn\u00efc\u00f6d\u00e9",
     [2616, 38776, 40304, 304, 136, 223, 220, 136, 223, 87, 49363, 77, 26884, 66, 9101, 67, 2634]),
    ("\u0939\u093f\u0928\u094d\u0926\u0940 \u05e2\u05b4\u05d1\u05b0 \u0627\u0644\u0639 \u0e44\u0e17\u0e22",
     [11976, 117, 11976, 123, 11976, 101, 24231, 235, 11976, 99, 24231, 222, 14360, 95, 146, 112, 49603, 146, 108, 28981,
      44690, 220, 31479, 226, 19567, 245, 19567, 95]),
    ("\u200b\ufeff\u200d \u180e\u00ad", [9525, 171, 119, 123, 447, 235, 28053, 254, 236, 3907]),
    ("\ufeffBOM",
     [171, 119, 123, 33, 2662]),
    ("\U0010ffff\ue000\U0001d7d8\U0001d4b3\U00010437",
     [176, 237, 123, 123, 29773, 222, 47728, 253, 246, 47728, 240, 111, 172, 238, 238, 115]),
    ("for i in range(10):\n    print(i)\n\n\n\treturn",
     [1640, 1312, 287, 2837, 7, 940, 2599, 198, 220, 220, 220, 3601, 7, 72, 8, 628, 198, 197, 7783]),
    ("\r\n\r\n \v\f\x00\x7f", [201, 198, 201, 198, 220, 199, 200, 188, 221]),
    ("\u02b0\u02c8a\u02c8 \u00aa\u00ba \u01c5 \ufb01",
     [134, 108, 45990, 64, 45990, 1587, 103, 36165, 220, 131, 227, 27332, 105, 223]),
    ("___--->>>!?!? $$$ a_b", [17569, 438, 3784, 4211, 0, 12248, 30, 720, 13702, 257, 62, 65]),
    ("", []),
]


@pytest.mark.parametrize("text, ids", GPT2_IDS, ids=[ascii(text)[:24] for text, _ in GPT2_IDS])
def test_gpt2_ids(text, ids):
    """Ids that differ from GPT-2's feed a real GPT-2 the wrong text, and it only gets a little worse."""
    tokenizer = load("gpt2")
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_gpt2_sizes():
    """A line lost at either end of merges.txt (its last line, or a merge that starts with #) goes unnoticed otherwise."""
    tokenizer = load("gpt2")
    assert (len(tokenizer.ids), len(tokenizer.rank), tokenizer.eos_id) == (50256, 50000, 50256)
    assert tokenizer.rank[b"#", b"#"] == 1979 and tokenizer.rank[b" g", b"azed"] == 49999


def test_every_character_falls_into_the_right_class():
    """A character in the wrong class moves the edges of pieces. All of Unicode, between letters, digits and blanks."""
    for code in (*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE0200), 0x10FFFF):
        char = chr(code)
        expected = [f" a{char}a"] if kind(char) == "letter" else [" a", " a"] if char == " " else [" a", char, "a"]
        assert pretokenize(f" a{char}a") == expected, f"U+{code:04X}"
        expected = ["1" + char] if kind(char) == "number" else ["1", char]
        assert pretokenize("1" + char) == expected, f"U+{code:04X}"


def test_pretokenize_is_the_pattern_by_hand():
    """A wrong order of the pattern's alternatives shows only in rare mixtures of blanks, quotes and symbols."""
    for text in random_texts(1, 3000):
        assert pretokenize(text) == naive_pretokenize(text), ascii(text)


def test_encode_is_naive_bpe(tokenizer):
    """The heap joins pairs in another order, or a stale pair: the text survives, the ids are not the model's."""
    for text in random_texts(2, 1500):
        expected = [i for piece in naive_pretokenize(text) for i in naive_bpe(tokenizer, piece.encode())]
        assert tokenizer.encode(text) == expected, ascii(text)


def test_merging_any_bytes_is_naive_bpe(tokenizer):
    """The same on pieces that no text has: long ones, runs of one byte, broken UTF-8."""
    r = random.Random(3)
    for _ in range(300):
        piece = bytes(r.choices(r.choice([b"a", b"ab", b"the ", b"\x00\xff\xc3\xa9", bytes(range(256))]), k=r.randrange(120)))
        assert tokenizer.piece(piece) == naive_bpe(tokenizer, piece), piece


def test_text_comes_back(tokenizer):
    """A text that is changed by encoding and decoding is a prompt the user did not write."""
    for text in random_texts(4, 1500):
        assert tokenizer.decode(tokenizer.encode(text)) == text, ascii(text)


def test_any_bytes_come_back(tokenizer):
    """Bytes that are not UTF-8 have ids, too: nothing may be lost, replaced or refused."""
    r = random.Random(5)
    for data in [bytes(range(256)), bytes(range(255, -1, -1)), b"\xed\xa0\x80\xff", b"caf\xc3", b"",
                 *(r.randbytes(r.randrange(60)) for _ in range(300)), "é日👩".encode() * 3]:
        assert tokenizer.decode_bytes(tokenizer.encode(data)) == data
    assert tokenizer.encode("naïve 日本".encode()) == tokenizer.encode("naïve 日本")


def test_lone_surrogates_become_the_replacement_character(tokenizer):
    """JSON may hold half a surrogate pair ("\\ud800"): it has no UTF-8, and must not end in an exception."""
    for text in ("\ud800", "\udfff", "a\ud83db", "\ude00\ud83d", "x\ud800\ud800y", " \udc00 \ud800"):
        replaced = "".join("\ufffd" if 0xD800 <= ord(char) < 0xE000 else char for char in text)
        assert tokenizer.encode(text) == tokenizer.encode(replaced), ascii(text)
        assert tokenizer.decode(tokenizer.encode(text)) == replaced
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"        # two halves that belong together


def test_end_of_text_can_not_be_forged(tokenizer):
    """A user who writes <|endoftext|> would get the control token, and could end or split other texts."""
    for text in ("<|endoftext|>", "a<|endoftext|>b", " <|endoftext|>"):
        assert tokenizer.eos_id not in tokenizer.encode(text)
        assert tokenizer.eos_id not in tokenizer.encode(text.encode())
    assert tokenizer.decode([tokenizer.eos_id]) == ""


def test_decode_replaces_what_is_not_utf8(tokenizer):
    """A token that ends within a character must not stop the text."""
    first_byte_of_e_acute, a = tokenizer.ids[b"\xc3"], tokenizer.ids[b"a"]
    assert tokenizer.decode([a, first_byte_of_e_acute, a]) == "a\ufffda"
    assert tokenizer.decode([]) == ""


def test_alphabet_is_one_to_one():
    """Two bytes with the same stand-in make one of them unreachable."""
    assert len(set(BYTE_TO_CHAR)) == 256 and all(len(char) == 1 and not char.isspace() for char in BYTE_TO_CHAR)
    assert BYTE_TO_CHAR[ord(" ")] == "Ġ" and BYTE_TO_CHAR[ord("\n")] == "Ċ" and BYTE_TO_CHAR[ord("a")] == "a"


def test_vocabulary_is_closed(tokenizer):
    """A byte without an id, a merge without one, or an id with two meanings is a KeyError on some unlucky text."""
    assert all(bytes([b]) in tokenizer.ids for b in range(256))
    assert all(left in tokenizer.ids and right in tokenizer.ids and left + right in tokenizer.ids for left, right in tokenizer.rank)
    assert sorted([*tokenizer.ids.values(), tokenizer.eos_id]) == list(range(len(tokenizer.bytes)))


def test_embedded_vocabulary_fits_the_model(tiny):
    """An id that the model can produce and the tokenizer can't spell breaks the stream of whoever draws it."""
    weights, tokenizer = tiny
    assert len(tokenizer.bytes) == weights.config.vocab_size


class CountingDict(dict):
    """Counts the questions it is asked."""

    questions = 0

    def __contains__(self, key):
        self.questions += 1
        return super().__contains__(key)

    def __getitem__(self, key):
        self.questions += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.questions += 1
        return super().get(key, default)


@pytest.mark.parametrize("pattern", ["a", "ab", "the", "abcdefghijklmnopqrstuvwxyz"])
def test_work_grows_with_the_length(tokenizer, pattern):
    """A quadratic merge turns one long word into a denial of service. Counted, not timed: questions to the merge table."""
    counting = Tokenizer.__new__(Tokenizer)
    counting.__dict__.update(vars(tokenizer), rank=CountingDict(tokenizer.rank))
    n = 200_000
    ids = counting._merge((pattern.encode() * n)[:n])
    assert tokenizer.decode_bytes(ids) == (pattern.encode() * n)[:n]
    # n - 1 pairs at the start; each of at most n - 1 merges makes at most 2 new pairs; each is looked up at most twice.
    assert n - 1 <= counting.rank.questions <= 2 * 3 * n


def test_a_long_text_in_one_piece_finishes(tokenizer):
    """Recursion, or a pattern that tries every length again, would not get through 200,000 characters."""
    for char in "aé 1!\n":
        text = char * 200_000
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_pieces_do_not_fill_the_memory():
    """A cache of pieces must not keep what strangers send: 65,536 pieces of a megabyte each are 64 GB, and their ids 8 times that."""
    tokenizer = load("tiny")
    tokenizer.encode("warm up")
    tracemalloc.start()
    try:
        for char in "abcdefgh":
            tokenizer.encode(char * 20_000)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 20_000, f"{kept} bytes are still held after encoding eight pieces of 20,000"
