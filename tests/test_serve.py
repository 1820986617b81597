"""The HTTP endpoint as its clients meet it: the shapes of answers, every mistake one can make, clients that leave, faults."""

import contextlib
import http.client
import json
import os
import random
import re
import select
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import load
import nanoserve
import numpy as np
import pytest
from nanoserve import Engine, SamplingParams, Server
from test_cli import assert_one_sentence, command, run_here

LIMIT = 60                                              # seconds until something that should happen counts as not happening
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {"prompt": "Once upon a time", "max_tokens": 400, **GREEDY}


# ----------------------------------------------------------------------------------------------
# a server, and clients of several kinds


@contextlib.contextmanager
def serving(max_queue=256, **fields):
    """A server on a free port with an engine of its own. In the end it must be idle, and its pool whole."""
    server = Server(Engine(dtype="float64", **fields), "127.0.0.1", 0, max_queue)
    try:
        yield server
        wait_until(lambda: idle(server) and not server.active, "all requests are gone")
        server.worker.call(server.worker.engine.check)
        assert not server.worker.streams, "queues of requests that have ended: memory that never comes back"
    finally:
        server.stop(0)


@pytest.fixture(scope="module")
def server():
    """One for all tests that leave no trace in it."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def reference():
    """The engine whose texts the server has to give."""
    return Engine(dtype="float64", enable_prefix_caching=False)


def wait_until(condition, words):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT} s: {words}"
        time.sleep(0.005)


def look(server, what):
    """what(engine), taken between two steps."""
    return server.worker.call(lambda: what(server.worker.engine))


def idle(server):
    return look(server, lambda engine: not engine.has_unfinished() and not engine.pool.num_used and not engine.scheduler.waiting)


def slow(server, seconds):
    """Let every step take `seconds` longer: what is to happen during a request, happens during it."""
    model = server.worker.engine.model
    forward = model.forward

    def slow_forward(*args):
        time.sleep(seconds)
        return forward(*args)

    model.forward = slow_forward


@contextlib.contextmanager
def connected(server, receive_buffer=None):
    with socket.socket() as sock:
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(LIMIT)
        sock.connect(("127.0.0.1", server.server_port))
        yield sock


def raw(server, data, end=True):
    """Send bytes, and no more after them if `end`. -> all that comes back until the server closes."""
    with connected(server) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):      # a reset, if the server left without reading all of it
            sock.sendall(data)
            if end:
                with contextlib.suppress(OSError):      # the server may have left before
                    sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def request_bytes(body, **headers):
    """A POST /v1/completions as it goes over the line."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Host": "here", "Content_Length": len(data)} | headers                   # None leaves one out
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "", ""]).encode() + data


def ask(server, method, path, body=None, connection=None):
    """-> (status, headers, bytes of the body). body: bytes, or what becomes JSON."""
    own = connection or http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    own.request(method, path, data, {"Content-Type": "application/json"} if data is not None else {})
    response = own.getresponse()
    answer = response.status, response.headers, response.read()
    if not connection:
        own.close()
    return answer


def post(server, body):
    return ask(server, "POST", "/v1/completions", body)


def complete(server, **body):
    """A completion that has to work. -> the object."""
    status, headers, data = post(server, body)
    assert (status, headers["Content-Type"]) == (200, "application/json"), data
    return json.loads(data)


def events(data):
    """The objects of a stream, whose framing must be exact."""
    assert re.fullmatch(rb"(data: \{[^\r\n]*\}\n\n)+data: \[DONE\]\n\n", data), data[-300:]
    return [json.loads(event[6:]) for event in data.split(b"\n\n")[:-2]]


def stream(server, **body):
    status, headers, data = post(server, body | {"stream": True})
    assert (status, headers["Content-Type"], headers["Content-Length"]) == (200, "text/event-stream", None)
    return events(data)


def texts(chunks):
    """index -> (text, finish_reason) of the choices of a stream; nothing may come after a finish_reason."""
    said = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, reason = said.get(choice["index"], ("", None))
        assert reason is None, "a chunk after the last one"
        said[choice["index"]] = text + choice["text"], choice["finish_reason"]
    return said


def assert_error(answer, status, *parts):
    """OpenAI's error object, and one sentence that says what was wrong."""
    found, headers, data = answer
    assert found == status, data
    assert headers["Content-Type"] == "application/json"
    error = json.loads(data)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    for part in parts:
        assert part in error["message"], f"{part!r} not in: {error['message']}"


def assert_alive(server):
    assert complete(server, prompt="The", max_tokens=1, temperature=0)["choices"][0]["finish_reason"] == "length"


def expected(reference, prompt, **params):
    [answer] = reference.generate([prompt], SamplingParams(**params))
    return answer.text, answer.finish_reason


# ----------------------------------------------------------------------------------------------
# the answers


SAMPLINGS = [{"temperature": 0}, {"temperature": 0.9, "seed": 4}, {"temperature": 1.5, "top_k": 9, "seed": 5},
             {"top_p": 0.7, "seed": -6}, {"temperature": 0, "ignore_eos": True, "max_tokens": 30},
             {"temperature": 0, "stop": " a"}, {"temperature": 0, "stop": ["never\0", " a", "e"], "max_tokens": 30}]


@pytest.mark.parametrize("params", SAMPLINGS, ids=json.dumps)
def test_text_is_the_engines(server, reference, params):
    """A parameter that is read and dropped changes nothing, silently; and a streamed answer is not another answer."""
    text, reason = expected(reference, "Once upon a time", **params)
    [choice] = complete(server, prompt="Once upon a time", **params)["choices"]
    assert choice == {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
    assert texts(stream(server, prompt="Once upon a time", **params)) == {0: (text, reason)}


def test_completion_object(server):
    """Client libraries read these fields, and break on others."""
    before = int(time.time())
    answer = complete(server, prompt="Once upon a time", max_tokens=5, model="tiny", user="me", **GREEDY)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert before <= answer["created"] <= time.time()
    prompt = len(server.worker.engine.tokenizer.encode("Once upon a time"))
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5,
                               "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["id"] != complete(server, prompt="Once", max_tokens=1)["id"]


def test_stream_objects(server):
    """One object per event, all with the same id; the last chunk of a choice has its finish_reason, the others null."""
    chunks = stream(server, prompt="Once upon a time", max_tokens=5, **GREEDY)
    assert len(chunks) == 5 and len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["object"] == "text_completion" and chunk["model"] == "tiny"
        [choice] = chunk["choices"]
        assert set(choice) == {"text", "index", "logprobs", "finish_reason"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]


def test_stream_with_usage(server):
    """include_usage: one more event before the end, without choices; in all others usage is null."""
    body = {"prompt": ["Once upon a time", "The"], "max_tokens": 4, "n": 2, **GREEDY}
    *chunks, last = stream(server, stream_options={"include_usage": True}, **body)
    assert last["choices"] == [] and set(last) == set(chunks[0]) == {"id", "object", "created", "model", "choices", "usage"}
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    whole = complete(server, **body)["usage"]
    assert {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        name: whole[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert whole["completion_tokens"] == 16
    assert all("usage" not in chunk for chunk in stream(server, stream_options={"include_usage": False}, **body))


def test_stream_comes_as_it_is_made():
    """A stream that is sent in the end is no stream."""
    with serving() as server, connected(server) as sock:
        slow(server, 0.01)
        sock.sendall(request_bytes(LONG | {"stream": True, "max_tokens": 50}))
        data = sock.recv(65536)
        while b"data: " not in data:
            data += sock.recv(65536)
        assert look(server, lambda engine: len(engine.requests)) == 1, "the first event came when all was over"
        while chunk := sock.recv(65536):
            data += chunk
        assert len(events(data.partition(b"\r\n\r\n")[2])) == 50


def test_cached_tokens(server):
    """The usage says what the prefix cache saved: whole blocks, and never the last token of the prompt."""
    prompt = [random.Random(77).randrange(200) for _ in range(48)]
    for cached in (0, 32):
        details = complete(server, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": cached}
    for cached in (32, 32):                             # once more as a stream; and the cache does not change the text
        *_, last = stream(server, prompt=prompt, max_tokens=1, stream_options={"include_usage": True})
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


def test_kinds_of_prompt(server, reference):
    """Text, token ids, and lists of both: choice i answers prompt i."""
    ids = [server.worker.engine.tokenizer.encode(prompt) for prompt in ("Once upon a time", "The owl")]
    first, second = (expected(reference, prompt, max_tokens=6, temperature=0) for prompt in ids)
    for prompt, answers in (("The owl", [second]), (ids[1], [second]), (["Once upon a time"], [first]),
                            (["Once upon a time", "The owl"], [first, second]), (ids, [first, second]),
                            (["The owl", ids[0]], [second, first])):
        choices = complete(server, prompt=prompt, max_tokens=6, temperature=0)["choices"]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == answers
        assert [choice["index"] for choice in choices] == list(range(len(answers)))
        assert texts(stream(server, prompt=prompt, max_tokens=6, temperature=0)) == dict(enumerate(answers))


def test_n(server, reference):
    """n answers for each prompt, in order, and not n times the same; a prompt's tokens are counted once."""
    prompts = ["Once upon a time", "The owl"]
    answer = complete(server, prompt=prompts, n=3, seed=10, max_tokens=8)
    answers = [expected(reference, prompt, seed=seed, max_tokens=8) for prompt in prompts for seed in (10, 11, 12)]
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == answers
    assert len(set(answers)) == 6
    assert answer["usage"]["prompt_tokens"] == sum(len(server.worker.engine.tokenizer.encode(prompt)) for prompt in prompts)
    unseeded = complete(server, prompt="Once upon a time", n=4, max_tokens=12)["choices"]
    assert len({choice["text"] for choice in unseeded}) > 1


def test_echo(server, reference):
    """The prompt, then the completion; it costs nothing."""
    text, reason = expected(reference, "Héllo Once", max_tokens=6, temperature=0)
    body = {"prompt": "Héllo Once", "echo": True, "max_tokens": 6, "temperature": 0}
    answer = complete(server, **body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Héllo Once" + text, reason)
    assert answer["usage"]["completion_tokens"] <= 6
    assert texts(stream(server, **body)) == {0: ("Héllo Once" + text, reason)}


def test_null_and_neutral_values_are_accepted(server):
    """Client libraries send parameters that ask for nothing: no reason to refuse them."""
    nothing = {"best_of": 1, "logprobs": None, "suffix": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    own = dict.fromkeys(("model", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "stream_options", "echo",
                         "ignore_eos", "user", "max_tokens"))
    answer = complete(server, prompt="Once upon a time", **nothing, **own)
    assert answer["usage"]["completion_tokens"] <= 16 and len(answer["choices"]) == 1
    complete(server, prompt="The", max_tokens=1, suffix="", logit_bias=None, stop=[], model="tiny", temperature=1, top_p=1)


def test_models_health_and_what_follows_a_question_mark(server):
    """What client libraries and load balancers ask first."""
    status, headers, data = ask(server, "GET", "/v1/models")
    [model] = json.loads(data)["data"]
    assert (status, headers["Content-Type"], json.loads(data)["object"]) == (200, "application/json", "list")
    assert set(model) == {"id", "object", "created", "owned_by"} and (model["id"], model["object"]) == ("tiny", "model")
    assert abs(model["created"] - time.time()) < 3600
    assert ask(server, "GET", "/health")[0] == 200
    assert ask(server, "GET", "/v1/models?limit=20&after=x")[2] == data
    status, _, data = ask(server, "GET", f"/v1/models/{model['id']}")
    assert (status, json.loads(data)) == (200, model)
    assert ask(server, "GET", "/v1/models/another")[0] == 404
    assert ask(server, "GET", "/metrics?")[0] == ask(server, "POST", "/v1/completions?api-version=1", {"prompt": "The"})[0] == 200


def test_metrics(server):
    """Prometheus refuses the whole page for one bad line; and dashboards made for vLLM look for its names."""
    complete(server, prompt="Once upon a time", max_tokens=3, **GREEDY)
    status, headers, data = ask(server, "GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4") and data.endswith(b"\n")
    types, samples = {}, {}
    for line in data.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types and kind in ("counter", "gauge", "histogram")
            types[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = re.fullmatch(r'(nanoserve:[a-z][a-z0-9_]*)((?:\{[a-z_]+="[^"\\\n]*"\})?) (\S+)', line).groups()
            family = name if name in types else re.sub("_(bucket|sum|count)$", "", name)
            assert list(types)[-1] == family, f"{line!r} does not stand under its TYPE"
            assert (name, labels) not in samples
            samples[name, labels] = float(value)
    assert all(np.isfinite(value) for value in samples.values())
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
        if kind == "histogram":
            buckets = [(float(labels[5:-2]), value) for (sample, labels), value in samples.items() if sample == f"{name}_bucket"]
            assert buckets == sorted(buckets) and [value for _, value in buckets] == sorted(value for _, value in buckets), name
            assert buckets[-1] == (float("inf"), samples[f"{name}_count", ""]), name
            assert samples[f"{name}_sum", ""] >= 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "generation_tokens_total", "prefix_cache_hits_total", "request_success_total", "time_to_first_token_seconds",
                 "inter_token_latency_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds",
                 "spec_decode_num_draft_tokens_total"):
        assert f"nanoserve:{name}" in types, name
    assert samples["nanoserve:request_success_total", '{finished_reason="length"}'] >= 1
    assert samples["nanoserve:generation_tokens_total", ""] >= 3
    assert samples["nanoserve:time_to_first_token_seconds_count", ""] >= 1


# ----------------------------------------------------------------------------------------------
# mistakes


NAN, INF = float("nan"), float("inf")
BAD_VALUES = {
    "max_tokens": [0, -1, 1.5, "5", True, [], {}, NAN, INF], "temperature": [-0.1, "hot", NAN, INF, -INF, True, [1]],
    "top_p": [0, -0.5, 1.1, "1", NAN, False, {}], "top_k": [-1, 1.5, "5", True, []], "seed": [1.5, "1", True, NAN, []],
    "stop": ["", [""], ["a", ""], 5, [5], [["a"]], {}, True], "n": [0, -1, 129, 1.5, "2", True, []],
    "stream": ["true", 1, 0, [], {}], "echo": ["yes", 1, []], "ignore_eos": ["no", 0, {}],
    "stream_options": ["include_usage", 1, [], True, {"include_usage": "yes"}, {"include_usage": 1}, {"unknown": True}],
    "user": [5, True, [], {}], "model": ["gpt-4", "", 5, [], {}, True],
    "prompt": [None, "", [], [""], ["fine", ""], [[]], 5, True, {}, [True], [1.5], [None], [1, "a"], [[1], [1.5]], [[[1]]],
               [-1], [10**6], [10**30], ["fine", {}], [1] * 512, "word " * 600]}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(server, name):
    """Each is refused with a sentence that names the parameter; none is guessed at, none disturbs the server."""
    for value in BAD_VALUES[name]:
        body = {"prompt": "Once upon a time", "max_tokens": 2} | {name: value}
        what = {"prompt": "token" if value == [-1] or isinstance(value, list) and value[:1] in ([10**6], [10**30]) else "prompt"}
        with about(name, value):
            assert_error(post(server, body), 400, what.get(name, name))
            assert_error(post(server, body | {"stream": True} if name != "stream" else body), 400)
    assert_alive(server)


@contextlib.contextmanager
def about(*values):
    """Say which of many cases a failed assertion is about."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{' '.join(repr(value)[:80] for value in values)}: {error}") from None


@pytest.mark.parametrize("name, value", [
    ("logprobs", 1), ("logprobs", 0), ("best_of", 2), ("suffix", "end"), ("presence_penalty", 0.5), ("frequency_penalty", -1),
    ("logit_bias", {"5": 1}), ("messages", []), ("max_new_tokens", 5), ("Temperature", 1), ("", 1)])
def test_what_is_not_supported_is_refused(server, name, value):
    """A parameter that is ignored silently gives another answer than was asked for."""
    assert_error(post(server, {"prompt": "Once", name: value}), 400, name, "not supported")


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"5", b"null", b'"prompt"', b"{'prompt': 'x'}", b'{"prompt": "x"} trailing', b'{"prompt": "\xff"}',
    b'\xef\xbb\xbf{"prompt": "x"}', '{"prompt": "x"}'.encode("utf-16"), b'{"prompt": "a\nb"}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"max_tokens": ' + b"9" * 5000 + b"}", b"\0" * 1000], ids=lambda body: ascii(body[:24]))
def test_not_json(server, body):
    """Malformed bodies of every kind, among them those that make a parser's stack overflow."""
    assert_error(post(server, body), 400)
    assert_alive(server)


@pytest.mark.parametrize("text", [
    '"max_tokens": 1e999', '"max_tokens": 1' + "0" * 4000 + ".0", '"seed": 1e5', '"temperature": -1e999',
    '"top_p": 1' + "0" * 4000, '"n": 1' + "0" * 4000, '"prompt": [1' + "0" * 4000 + "]"], ids=lambda text: text[:24])
def test_huge_numbers_refused(server, text):
    """Numbers beyond all floats, in every place that takes one."""
    assert_error(post(server, ('{"prompt": "x", %s}' % text).encode()), 400)
    assert_alive(server)


def test_huge_numbers_that_mean_something(server):
    """No limit that was not announced: 10^4000 tokens end at the context length, seeds are any integers."""
    huge = 10**4000
    for name, value in (("seed", huge), ("seed", -huge), ("top_k", huge), ("temperature", huge), ("temperature", 1e-320),
                        ("top_p", 1e-320)):
        with about(name, value):
            assert len(complete(server, prompt="The", max_tokens=2, n=2, ignore_eos=True, **{name: value})["choices"]) == 2
    answer = complete(server, prompt=[5] * 510, max_tokens=huge, **GREEDY)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (2, "length")


def test_strange_text_is_no_mistake(server):
    """Any string is a prompt: NUL, lone surrogates, what looks like the end of a text."""
    for text in ("\0", "\ud800", "\U0001f600", "<|endoftext|>", "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "\u2028data: [DONE]\n\n"):
        with about(text):
            [choice] = complete(server, prompt=text, max_tokens=2, stop=[text], echo=True)["choices"]
            assert choice["text"].startswith(text.replace("\ud800", "\ufffd"))
            assert len(texts(stream(server, prompt=text, max_tokens=2, echo=True))) == 1


def test_larger_than_the_pool():
    """It could never be computed: the sentence says what to change, and others are not disturbed."""
    with serving(num_blocks=4) as server:
        assert_error(post(server, {"prompt": "Once", "max_tokens": 100}), 400, "max_tokens", "num_blocks")
        assert_alive(server)


def test_unknown_paths_and_methods(server):
    """404 says what there is; 405 says how to ask."""
    for path in ("/", "/v1", "/v1/chat/completions", "/v1/completions/", "/favicon.ico", "/../etc/passwd", "*", "/%00"):
        assert_error(ask(server, "GET", path), 404, "/v1/completions")
    assert_error(ask(server, "POST", "/v1/chat/completions", {}), 404, "/v1/chat/completions")
    for path, allowed in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/health", "GET"), ("/metrics", "GET")):
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - {allowed}:
            answer = ask(server, method, path, {} if method == "POST" else None)
            assert_error(answer, 405, allowed)
            assert allowed in answer[1]["Allow"].split(", ")
    assert ask(server, "HEAD", "/nothing")[::2] == (404, b"")
    status, headers, data = ask(server, "HEAD", "/v1/completions")
    assert (status, headers["Allow"], data) == (405, "POST", b"")


def test_head(server):
    """HTTP asks every server for it where there is a GET: the same headers, and no body."""
    for path in ("/health", "/v1/models"):
        status, headers, data = ask(server, "HEAD", path)
        assert (status, data) == (200, b""), path
        assert headers["Content-Length"] == ask(server, "GET", path)[1]["Content-Length"]


def test_lengths(server):
    """A body without a length, or with one that is no number, can't be read; guessing would mix up two requests."""
    body = {"prompt": "The", "max_tokens": 1}
    chunked = {"Transfer_Encoding": "chunked"}
    for headers in ({"Content_Length": None}, {"Content_Length": None, **chunked}, chunked):
        assert raw(server, request_bytes(body, **headers), end=False).startswith(b"HTTP/1.1 411 "), headers
    for length in ("-1", "1.5", "0x10", "abc", "1 1", "1,1", "+5", "1_0", "\u0663".encode().decode("latin-1"), "9" * 30):
        answer = raw(server, request_bytes(body, Content_Length=length), end=False)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"Content-Length" in answer, length
    assert raw(server, request_bytes(body, Content_Length="0"), end=False).startswith(b"HTTP/1.1 400 ")
    answer = raw(server, request_bytes(body, Content_Length="10"), end=False)          # too short: half an object
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, "the rest was taken for another request"
    assert_alive(server)


def test_body_too_large(server):
    """Over 1 MiB: the client hears why, also if it sends all of it before it listens."""
    limit = 2**20
    body = b'{"prompt": "The", "max_tokens": 1}'
    assert post(server, body.ljust(limit))[0] == 200
    assert_error(post(server, body.ljust(limit + 1)), 413, str(limit))
    assert_error(post(server, b" " * (5 * limit)), 413, str(limit))
    assert raw(server, request_bytes(b"", Content_Length="9" * 18)).startswith(b"HTTP/1.1 413 ")
    assert raw(server, request_bytes(body, Expect="100-continue", Connection="close"), end=False).startswith(b"HTTP/1.1 100 ")
    assert_alive(server)


def test_a_huge_batch_is_refused_at_once(server):
    """A megabyte can ask for millions of completions: saying no must not cost a gigabyte, nor a minute."""
    before, began = load.rss(os.getpid()), time.monotonic()
    answer = post(server, {"prompt": ["a"] * 100_000, "n": 128})
    assert 400 <= answer[0] < 500
    assert_error(answer, answer[0], "256")
    assert time.monotonic() - began < 10
    if before:
        assert load.rss(os.getpid()) - before < 100
    assert_alive(server)


def test_client_that_stalls(monkeypatch):
    """A client that promises more than it sends, or says nothing, does not keep its thread for ever."""
    with serving() as server:
        monkeypatch.setattr(nanoserve.Handler, "timeout", 0.3)
        began = time.monotonic()
        for data in (b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nHost:",
                     request_bytes({"prompt": "The"}, Content_Length="1000"), request_bytes(b"x", Content_Length=str(2**20 + 1))):
            answer = raw(server, data, end=False)
            assert not answer or answer[9:12] in (b"408", b"413", b"400"), answer
        assert time.monotonic() - began < LIMIT
        assert_alive(server)


# ----------------------------------------------------------------------------------------------
# connections


def test_keep_alive(server):
    """Several requests on one connection: a client library's pool would otherwise see broken connections."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT)
    connection.connect()
    port = connection.sock.getsockname()
    for _ in range(3):
        for method, path, body in (("GET", "/health", None), ("POST", "/v1/completions", {"prompt": "The", "max_tokens": 2}),
                                   ("GET", "/metrics", None), ("GET", "/v1/models?x=1", None)):
            assert ask(server, method, path, body, connection)[0] == 200
            assert connection.sock.getsockname() == port
    connection.close()


def test_pipelined(server):
    """Requests sent without waiting are answered in order."""
    one = request_bytes({"prompt": "The", "max_tokens": 1})
    last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    answer = raw(server, one + one + last, end=False)
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"text_completion") == 2 and answer.endswith(b"{}")


def test_after_an_error_the_connection_ends(server):
    """Nobody knows what of a refused request is still to come: it must not be taken for the next one."""
    bad = request_bytes(b"{" * 10)
    answer = raw(server, bad + request_bytes({"prompt": "The"}), end=False)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer


def test_queue_full():
    """429 with Retry-After, at once; those who were accepted are served."""
    with serving(max_queue=2, max_num_seqs=1) as server:
        slow(server, 0.005)
        with connected(server) as running, connected(server) as waiting:
            running.sendall(request_bytes(LONG))
            wait_until(lambda: look(server, lambda engine: len(engine.scheduler.running)) == 1, "the first runs")
            waiting.sendall(request_bytes(LONG | {"prompt": ["The", "Once"]}))
            wait_until(lambda: look(server, lambda engine: len(engine.scheduler.waiting)) == 2, "two wait")
            for body in ({"prompt": "The"}, {"prompt": "The", "stream": True}, {"prompt": ["The", "Once"]}):
                answer = post(server, body)
                assert_error(answer, 429, "queue")
                assert int(answer[1]["Retry-After"]) >= 1
            assert look(server, lambda engine: len(engine.requests)) == 3, "a refused request left something behind"
        wait_until(lambda: idle(server), "all are gone")
        assert_alive(server)
        assert complete(server, prompt=["The", "Once"], max_tokens=1)["choices"][1]["index"] == 1


@pytest.fixture(scope="module")
def one_seat():
    """A server where the second request waits, and each step takes a while."""
    with serving(max_num_seqs=1) as server:
        slow(server, 0.005)
        yield server


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_client_gone(one_seat, state, streaming, reset):
    """Nobody reads the answer: computing it to the end would take the seat and the blocks of those who do."""
    server = one_seat
    aborted = look(server, lambda engine: engine.stats.finished["abort"])
    with contextlib.ExitStack() as others:
        if state == "waiting":
            others.enter_context(connected(server)).sendall(request_bytes(LONG))
            wait_until(lambda: look(server, lambda engine: len(engine.scheduler.running)) == 1, "the seat is taken")
        with connected(server) as sock:
            sock.sendall(request_bytes(LONG | {"stream": streaming}))
            wait_until(lambda: look(server, lambda engine: len(getattr(engine.scheduler, state))) == 1, f"it is {state}")
            if streaming and state == "running":
                sock.recv(100)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: look(server, lambda engine: engine.stats.finished["abort"]) == aborted + 1, "the request is aborted")
        assert look(server, lambda engine: len(engine.requests)) == (state == "waiting"), "another one was aborted, too"
        look(server, lambda engine: engine.check())
    wait_until(lambda: idle(server), "the blocks are back")


def test_client_gone_with_many_completions():
    """All n of them end, those that run and those that wait."""
    with serving(max_num_seqs=2) as server:
        slow(server, 0.005)
        with connected(server) as sock:
            sock.sendall(request_bytes(LONG | {"prompt": ["The", "Once"], "n": 3, "stream": True}))
            assert sock.recv(100)
        wait_until(lambda: look(server, lambda engine: engine.stats.finished["abort"]) == 6, "all six are aborted")


def test_slow_reader():
    """One who does not read his stream stalls nobody, and finds all of it when he does."""
    with serving() as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request_bytes(LONG | {"stream": True, "n": 4, "max_tokens": 150}))
            wait_until(lambda: look(server, lambda engine: engine.stats.finished["length"]) == 4, "his requests are computed")
            assert texts(stream(server, **LONG | {"max_tokens": 20}))[0][1] == "length"
            assert len(server.active) == 1, "all of it fitted the buffers: this test shows nothing"
            data = b""
            while chunk := sock.recv(65536):
                data += chunk
        assert len(events(data.partition(b"\r\n\r\n")[2])) == 600


def test_reader_too_slow(monkeypatch):
    """One who never reads is gone in the end: his requests are aborted, and his thread ends."""
    with serving() as server:
        slow(server, 0.005)
        monkeypatch.setattr(nanoserve.Handler, "timeout", 0.2)
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connected(server, receive_buffer=4096) as sock:
            sock.sendall(request_bytes(LONG | {"stream": True, "n": 4}))
            wait_until(lambda: look(server, lambda engine: engine.stats.finished["abort"]) == 4, "his requests are aborted")
            wait_until(lambda: not server.active, "his connection is given up")
        assert_alive(server)


# ----------------------------------------------------------------------------------------------
# fuzz


VALID = request_bytes({"prompt": "The", "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "n": 1, "stream": False})
GET = b"GET /health HTTP/1.1\r\n"
GARBAGE = [
    b"", b"\r\n", b"\n\n\n\n", b"\0" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/0.9\r\n\r\n",
    b"GET  /health  HTTP/1.1\r\n\r\n", b"GET /health HTTP/2.0\r\n\r\n", b"GET /health HTTP/1.x\r\n\r\n",
    b"GET /health HTTQ/1.1\r\n\r\n", b"GET /health HTTP/1.1.1\r\n\r\n", b"FLY /health HTTP/1.1\r\n\r\n",
    b"get /health HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    b"GET http://[::1/health HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    GET + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n", GET + b"no colon\r\n\r\n", GET + b": empty\r\n\r\n",
    GET + b"X: a\r\n folded\r\n\r\n", GET + b"X\xff: \xff\r\n\r\n", GET + b"Expect: 100-continue\r\n\r\n",
    GET + b"Connection: \xff\r\n\r\n", b"POST /v1/completions HTTP/1.0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}   "]


def assert_never_a_fault(answer):
    """Whatever was sent: no answer, or well-formed ones. 501 and 505 are HTTP's words for unknown methods and versions."""
    for status in re.findall(rb"^HTTP/1\.1 (\d+) ", answer, re.M):
        assert status[:1] in b"1234" or status in (b"501", b"505"), answer[:500]
    assert b"Traceback" not in answer


@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: ascii(data[:24]))
def test_garbage(server, data):
    """Port scanners, TLS on the wrong port, broken proxies."""
    assert_never_a_fault(raw(server, data))
    assert_alive(server)


def test_http_1_0(server):
    """An old client closes by itself after the answer; a stream ends with the connection."""
    for streaming, last in ((False, b"}"), (True, b"data: [DONE]\n\n")):
        data = request_bytes({"prompt": "The", "max_tokens": 1, "stream": streaming})
        answer = raw(server, data.replace(b"HTTP/1.1", b"HTTP/1.0"), end=False)
        assert b" 200 OK\r\n" in answer and answer.endswith(last)


@pytest.mark.parametrize("seed", range(3))
def test_fuzz_bytes(server, seed):
    """A valid request with bytes changed, dropped, doubled or cut off; and bytes that never were one."""
    rng = random.Random(seed)
    for i in range(60):
        data = bytearray(VALID if i % 6 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.choice([0, 1, 3, 10])):
            at = rng.randrange(len(data) + 1)
            new = rng.choice([b"", bytes([rng.randrange(256)]), bytes(data[at:at + 9]) * 3, b"\r\n", b'"', b"9"])
            data[at:at + rng.choice([0, 1, 1, 8])] = new
        data = bytes(data[:rng.randrange(len(data) + 1)] if i % 3 else data)
        with about(data):
            assert_never_a_fault(raw(server, data))
        if i % 10 == 0:
            assert_alive(server)
    assert_alive(server)


@pytest.mark.parametrize("seed", range(2))
def test_fuzz_json(server, seed):
    """Well-formed bodies with any value anywhere: 200 or 400, and an object that says why."""
    rng = random.Random(seed)
    names = [*BAD_VALUES, "best_of", "logprobs", "suffix", "logit_bias", "x"]

    def value(depth=0):
        kind = rng.randrange(9 if depth < 3 else 7)
        if kind == 7:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 8:
            return {rng.choice(names): value(depth + 1) for _ in range(rng.randrange(3))}
        return [None, rng.random() < 0.5, rng.randrange(-2, 5), rng.choice([10**18, 2**64, -2**63, 10**400]), rng.uniform(-1, 3),
                rng.choice([NAN, INF, -INF, 1e308, 5e-324]), rng.choice(["", "a", "tiny", "\0", "\ud800", "é" * 50])][kind]

    for _ in range(80):
        body = {"prompt": "The"} | {rng.choice(names): value() for _ in range(rng.randrange(1, 4))}
        if isinstance(body.setdefault("max_tokens", 1), int):
            body["max_tokens"] = min(body["max_tokens"], 3)             # 10^18 tokens would take a while
        with about(body):
            status, headers, data = post(server, body)
            if status != 200:
                assert_error((status, headers, data), 400)
            elif headers["Content-Type"] == "text/event-stream":
                events(data)
            else:
                assert json.loads(data)["choices"]
    assert_alive(server)


# ----------------------------------------------------------------------------------------------
# faults within


def break_model(server, broken):
    """Have the model's forward pass replaced by broken(forward, batch, cache)."""
    model = server.worker.engine.model
    forward = model.forward
    model.forward = lambda batch, cache: broken(forward, batch, cache)


def test_a_step_that_fails():
    """Out of memory, a driver's error: those who were in the step hear of it, those who waited are served, no block is lost."""
    with serving(max_num_seqs=2) as server:
        def moody(forward, batch, cache):
            time.sleep(0.005)
            if any(len(request.tokens) == 30 for request, *_ in server.worker.engine.last_batch):
                raise RuntimeError("CUDA is in a bad mood")
            return forward(batch, cache)

        break_model(server, moody)
        answers = {}

        def client(name, **body):
            answers[name] = post(server, {**LONG, "max_tokens": 40, **body})

        threads = [threading.Thread(target=client, args=(name,), kwargs=body) for name, body in (
            ("whole", {}), ("stream", {"stream": True}), ("spared", {"prompt": "The", "max_tokens": 3}))]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda: look(server, lambda engine: len(engine.requests)) == number, "the request is in")
        for thread in threads:
            thread.join(LIMIT)
        assert_error(answers["whole"], 500, "CUDA is in a bad mood")
        assert answers["whole"][1]["Content-Type"] == "application/json"
        assert answers["stream"][0] == 200
        *chunks, error = events(answers["stream"][2])
        assert chunks and all("error" not in chunk for chunk in chunks)
        assert set(error) == {"error"} and error["error"]["type"] == "server_error" and "bad mood" in error["error"]["message"]
        assert answers["spared"][0] == 200
        look(server, lambda engine: engine.check())
        assert look(server, lambda engine: engine.stats.finished["error"]) == 2
        assert_alive(server)


def test_every_step_fails(capfd):
    """A model that is broken for good: every request hears so, none hangs, and none of its text is printed."""
    with serving() as server:
        def broken(forward, batch, cache):
            raise RuntimeError("never again")
        break_model(server, broken)
        for i in range(5):
            assert_error(post(server, {"prompt": "xyzzy plugh", "n": 3}), 500, "never again")
            assert "never again" in stream(server, prompt="xyzzy plugh")[-1]["error"]["message"]
            look(server, lambda engine: engine.check())
        assert ask(server, "GET", "/health")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_logits_that_are_no_numbers(reference):
    """They end the request they belong to; its batch mates do not notice."""
    with serving() as server:
        def broken(forward, batch, cache):
            time.sleep(0.01)
            logits = forward(batch, cache).clone()
            asked = [request for request, _, n, guesses in server.worker.engine.last_batch if n == request.num_missing + guesses]
            for i, request in enumerate(asked):
                if request.completion.prompt_token_ids == [7, 7, 7] and request.num_output_tokens == 3:
                    logits[i] = NAN
            return logits

        break_model(server, broken)
        for streaming in (False, True):
            with connected(server) as sock:
                body = {"prompt": [7, 7, 7], "stream": streaming, "max_tokens": 9, **GREEDY}
                sock.sendall(request_bytes(body, Connection="close"))
                answer = complete(server, prompt=["Once upon a time", "The"], max_tokens=12, **GREEDY)
                data = b""
                while chunk := sock.recv(65536):
                    data += chunk
            assert [choice["text"] for choice in answer["choices"]] == [
                expected(reference, prompt, max_tokens=12, **GREEDY)[0] for prompt in ("Once upon a time", "The")]
            head, _, body = data.partition(b"\r\n\r\n")
            if streaming:
                assert len(events(body)) == 4
                body = body.split(b"\n\n")[3][6:]
            else:
                assert head.startswith(b"HTTP/1.1 500 ")
            assert "not finite" in json.loads(body)["error"]["message"]
        assert look(server, lambda engine: engine.stats.finished["error"]) == 2


def test_nothing_of_a_request_is_printed(server, capfd):
    """Logs are kept and shared; prompts are private. No access log, no traceback with somebody's text."""
    for body in ({"prompt": "xyzzy"}, {"prompt": "xyzzy", "stream": True}, {"prompt": ["xyzzy", 5]}, {"prompt": 5, "xyzzy": 1},
                 b'{"prompt": "xyzzy'):
        post(server, body)
    for data in (b"xyzzy\r\n\r\n", b"XYZZY /xyzzy HTTP/1.1\r\n\r\n", b"GET /xyzzy HTTP/1.1\r\nxyzzy\r\n\r\n",
                 b"GET /xyzzy HTTP/9\r\n\r\n", VALID[:-5]):
        raw(server, data)
    with connected(server) as sock:                     # one who leaves while he is answered
        sock.sendall(request_bytes(LONG | {"stream": True}))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: idle(server), "he is gone")
    assert capfd.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------
# beginning and end


def test_stop_lets_those_who_are_served_finish():
    """stop(grace): the running stream comes to its end; nobody new gets in."""
    server = Server(Engine(dtype="float64"), "127.0.0.1", 0, 16)
    slow(server, 0.005)
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG | {"stream": True, "max_tokens": 60}))
        data = sock.recv(100)
        server.stop(LIMIT)
        with pytest.raises(ConnectionError), connected(server):
            pass
        while chunk := sock.recv(65536):
            data += chunk
    assert texts(events(data.partition(b"\r\n\r\n")[2]))[0][1] == "length"
    wait_until(lambda: idle(server), "the pool is whole")


def test_stop_without_grace():
    """stop(0): the others are told that it was not the end of their text."""
    server = Server(Engine(dtype="float64", max_num_seqs=1), "127.0.0.1", 0, 16)
    slow(server, 0.01)
    with connected(server) as sock, connected(server) as waiting:
        sock.sendall(request_bytes(LONG | {"stream": True}))
        data = sock.recv(100)
        waiting.sendall(request_bytes(LONG, Connection="close"))
        wait_until(lambda: look(server, lambda engine: len(engine.scheduler.waiting)) == 1, "one waits")
        server.stop(0)
        while chunk := sock.recv(65536):
            data += chunk
        assert waiting.recv(65536)
    *chunks, last = events(data.partition(b"\r\n\r\n")[2])
    text, reason = texts(chunks)[0]
    assert text and reason is None and "stopping" in last["error"]["message"]
    wait_until(lambda: idle(server), "the pool is whole")


def test_nobody_is_accepted_while_it_stops():
    """A connection that was there before can still ask; it is told to go elsewhere, and does not prolong the end."""
    server = Server(Engine(dtype="float64"), "127.0.0.1", 0, 16)
    slow(server, 0.01)
    open_connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT)
    assert ask(server, "GET", "/health", connection=open_connection)[0] == 200
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG, Connection="close"))
        wait_until(lambda: look(server, lambda engine: len(engine.requests)) == 1, "one is served")
        stopping = threading.Thread(target=server.stop, args=(LIMIT,))
        stopping.start()
        wait_until(lambda: server.worker.stopping, "it stops")
        assert_error(ask(server, "POST", "/v1/completions", {"prompt": "The"}, connection=open_connection), 503, "stopping")
        sock.close()
        stopping.join(LIMIT)
    open_connection.close()
    assert not stopping.is_alive()


def test_a_step_without_end_does_not_stop_the_stop():
    """A hung device: SIGTERM's grace is kept all the same."""
    server = Server(Engine(dtype="float64"), "127.0.0.1", 0, 16)
    slow(server, 6)
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG))
        time.sleep(0.2)
        began = time.monotonic()
        server.stop(0.1)
        assert time.monotonic() - began < 4


def test_many_callers_do_not_stop_the_steps():
    """Dozens of monitors that ask for /metrics without a pause must not keep the engine from its steps."""
    with serving() as server:
        over = threading.Event()

        def monitor():
            while not over.is_set():
                with contextlib.suppress(Exception):
                    server.worker.call(lambda: time.sleep(0.001))

        threads = [threading.Thread(target=monitor, daemon=True) for _ in range(24)]
        for thread in threads:
            thread.start()
        try:
            assert complete(server, prompt="The", max_tokens=5)["usage"]["completion_tokens"] == 5
        finally:
            over.set()
            for thread in threads:
                thread.join(LIMIT)


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux tells of a hang-up behind unread bytes")
def test_client_gone_behind_more_bytes(one_seat):
    """A client that has sent its next request already, and leaves, is gone as well."""
    ended = look(one_seat, lambda engine: dict(engine.stats.finished))
    with connected(one_seat) as sock:
        sock.sendall(request_bytes(LONG))
        wait_until(lambda: look(one_seat, lambda engine: len(engine.requests)) == 1, "it is served")
        sock.sendall(request_bytes(LONG))
    wait_until(lambda: idle(one_seat), "the first request is aborted, and the second never begins")
    assert look(one_seat, lambda engine: dict(engine.stats.finished)) == ended | {"abort": ended["abort"] + 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_thread_that_died():
    """Nobody waits for ever for an engine that is no more: 503, also at /health; and the server can be stopped."""
    server = Server(Engine(dtype="float64"), "127.0.0.1", 0, 16)
    server.worker.engine.step = server.worker.engine.fail = None                # calling them raises
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG))
        assert sock.recv(100) == b""
    wait_until(lambda: not server.worker.is_alive(), "the thread is dead")
    assert ask(server, "GET", "/health")[0] == 503
    assert_error(post(server, {"prompt": "The"}), 503, "stopped")
    server.stop(0)


def test_a_watcher_that_fails():
    """A view whose terminal is gone ends a request at most, and looks no more."""
    with serving() as server:
        def gone(outputs):
            raise OSError("no terminal")

        look(server, lambda engine: engine.watchers.append(gone))
        assert_error(post(server, {"prompt": "The"}), 500, "no terminal")
        assert_alive(server)
        assert look(server, lambda engine: engine.watchers) == []


@pytest.fixture(scope="module")
def processes():
    """python nanoserve.py serve, once for each test that ends one. They take their time to import torch, so they do it together.
    -> name: (process, an object with its port)"""
    patient = ["--grace", str(LIMIT)]
    flags = {"SIGTERM": patient, "SIGINT": patient, "no grace": ["--grace", "0", "--attention", "numpy"]}
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(command("serve", "--port", "0", *more)) for name, more in flags.items()}
        ports = {}
        for name, process in started.items():
            line = process.stdout.readline().decode()
            at = re.search(r"http://127\.0\.0\.1:(\d+)/v1/completions", line)
            assert at, line + process.stderr.read().decode()
            ports[name] = SimpleNamespace(server_port=int(at[1]))
        yield {name: (process, ports[name]) for name, process in started.items()}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal(processes, name):
    """A rolling update, or Ctrl-C: the running stream is finished, the exit code is 0, and nothing more was printed."""
    process, server = processes[name]
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG | {"stream": True, "prompt": "xyzzy plugh"}))
        data = sock.recv(100)
        process.send_signal(signal.Signals[name])
        while chunk := sock.recv(65536):
            data += chunk
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")
    assert texts(events(data.partition(b"\r\n\r\n")[2]))[0][1] == "length"


def test_signal_without_grace(processes):
    """--grace 0: it does not wait for a stream that takes minutes."""
    process, server = processes["no grace"]
    with connected(server) as sock:
        sock.sendall(request_bytes(LONG | {"stream": True, "n": 16}))
        data = sock.recv(100)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        with contextlib.suppress(ConnectionError):
            while chunk := sock.recv(65536):
                data += chunk
    assert (process.returncode, out, err) == (0, b"", b"")
    assert time.monotonic() - began < 10
    assert b'"length"' not in data and data.count(b"stopping") == 16 and data.endswith(b"[DONE]\n\n")


@pytest.fixture
def signals():
    """serve() takes over Ctrl-C and SIGTERM: they are pytest's again in the end. A server that should not run is ended."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    over = threading.Event()

    def end():
        while not over.wait(3):
            os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end)
    ending.start()
    yield
    over.set()
    ending.join()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_port_in_use(server, signals):
    """The commonest mistake of all."""
    code, out, err = run_here("serve", "--port", str(server.server_port))
    assert_one_sentence(code, err, "in use")
    assert out == ""


@pytest.mark.parametrize("flag, value", [("port", "70000"), ("port", "-1"), ("host", "no.such.host.invalid"), ("max-queue", "0"),
                                         ("max-queue", "-1"), ("grace", "-1"), ("grace", "nan")])
def test_bad_flags(flag, value, signals):
    """Each is refused in one sentence, and not by a server that can never serve."""
    code, _, err = run_here("serve", "--port=0", f"--{flag}={value}")
    assert_one_sentence(code, err)


# ----------------------------------------------------------------------------------------------
# load


def test_load():
    """Many at once, some of whom leave, on a pool that is too small for them: every text is right, and nothing is left behind."""
    with serving(num_blocks=36) as server:
        told = load.load(f"http://127.0.0.1:{server.server_port}", requests=120, concurrency=40, vanish=0.15, rate=400.0, seed=1)
        kinds = [outcome.kind for outcome in told["outcomes"]]
        assert "error" not in kinds and "refused" not in kinds, {outcome.words for outcome in told["outcomes"]}
        assert kinds.count("completed") >= 90 and kinds.count("vanished") >= 3
        assert told["wrong"] == []
        assert not any(told["left behind"].values())
        assert look(server, lambda engine: engine.stats.preemptions) > 0, "the pool was large enough: make it smaller"
        assert look(server, lambda engine: engine.stats.finished["abort"]) > 0
