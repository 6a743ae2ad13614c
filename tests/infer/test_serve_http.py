"""A server and wrong requests: broken HTTP, wrong fields, and keys. The engine is a fake."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxscale.errors import ConfigError
from jaxscale.infer.serve import Limits, Server
from jaxscale.infer.serve.requests import read_completion
from tests.truth.errors import raises_saying
from tests.truth.serving import JSON, SERVED, call, post, raw, serving


@pytest.fixture(scope="module")
def server():
    with serving(body=10_000, head=4_000, prompt=500) as server:
        yield server


@pytest.mark.parametrize(
    "body, status, words",
    [
        (b"", 400, ["not JSON"]),
        (b"{", 400, ["not JSON"]),
        (b"\xff\xfe", 400, ["not JSON"]),
        (b"[" * 4_000 + b"]" * 4_000, 400, ["nested more than 100 deep"]),
        (b"[" * 150 + b"]" * 150, 400, ["nested more than 100 deep"]),
        (b'{"n": ' + b"9" * 5_000 + b"}", 400, ["a whole number of 5000 digits; at most 40"]),
        (b'{"n": ' + b"9" * 41 + b"}", 400, ["a whole number of 41 digits; at most 40"]),
        (b'{"temperature": NaN}', 400, ["not JSON", "NaN"]),
        (b"[]", 400, ["JSON object"]),
    ],
    ids=["empty", "open", "no text", "deep", "a little deep", "long number", "too long", "not a number", "list"],
)
def test_a_body_that_is_no_json_object_is_refused(server, body, status, words):
    got, _, answer = call(server, body=body)
    assert got == status and all(w in answer["error"]["message"] for w in words), answer
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("temperature", -1, ["temperature = -1", "0 or more"]),
        ("temperature", "hot", ['temperature = "hot"', "a number"]),
        ("temperature", True, ["temperature = true"]),
        ("top_p", 0, ["top_p", "above 0"]),
        ("top_k", 0.5, ["top_k"]),
        ("min_p", 2, ["min_p"]),
        ("repetition_penalty", 0, ["repetition_penalty"]),
        ("max_tokens", 0, ["max_tokens = 0", "at least 1"]),
        ("n", 0, ["n = 0"]),
        ("n", 10_000, ["10000 completions", "256"]),
        ("prompt", ["a"] * 600, ["prompt has 600 prompts", "allows a client 256 sequences at once"]),
        ("stop", [""], ["stop"]),
        ("stop", ["x"] * 17, ["16"]),
        ("stream", "yes", ["stream"]),
        ("stream_options", {"include_usage": True}, ["stream = true"]),
        ("logprobs", 21, ["logprobs", "0 to 20"]),
        ("seed", 1.5, ["seed"]),
        ("prompt", {}, ["prompt"]),
        ("prompt", [], ["nothing to continue"]),
        ("prompt", [[]], ["prompt"]),
        ("prompt", ["a", 3], ["prompt"]),
        ("prompt", [1, -2], ["-2", "0 to 255"]),
        ("prompt", [1, 256], ["256", "0 to 255"]),
        ("prompt", "\ud800", ["surrogate"]),
        ("prompt", "a\0b", ["NUL"]),
        ("presence_penalty", 0.5, ["presence_penalty = 0.5", "repetition_penalty"]),
        ("logit_bias", {"5": 1}, ["logit_bias", "not supported"]),
        ("temprature", 1, ["temprature", "'temperature'"]),
    ],
)
def test_a_wrong_field_is_named(server, field, value, words):
    status, _, answer = call(server, body={"prompt": "a"} | {field: value})
    assert status == 400 and answer["error"]["param"] == field, answer
    assert all(w in answer["error"]["message"] for w in words), answer


def test_fields_that_ask_for_nothing_are_taken(server):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "user": "me",
    }
    assert call(server, body={"prompt": "a", "model": "letters"} | neutral)[0] == 200


def test_what_a_request_leaves_out_is_as_the_checkpoint_came():
    served = dataclasses.replace(SERVED, choice={"temperature": 0.6, "top_k": 20})
    read = lambda **fields: read_completion(json.dumps({"prompt": "a", **fields}).encode(), served, 100, 8)  # noqa: E731
    chosen = [(s.temperature, s.top_k, s.top_p) for s in (t.common.sampling for t in (read(), read(temperature=1)))]
    assert chosen == [(0.6, 20, 1.0), (1.0, 20, 1.0)]
    assert [read(top_k=k).common.sampling.top_k for k in (0, -1, 5)] == [None, None, 5]


def test_another_model_is_not_here(server):
    status, _, answer = call(server, body={"prompt": "a", "model": "words"})
    assert status == 404 and answer["error"]["code"] == "model_not_found" and "letters" in answer["error"]["message"]


def test_a_model_without_a_template_cannot_converse(server):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    status, _, answer = call(server, path="/v1/chat/completions", body=body)
    assert status == 400 and "chat template" in answer["error"]["message"]


@pytest.mark.parametrize("role", ["user<|im_end|>", "im_end", "", "User"])
def test_a_role_that_no_client_of_openai_sends_is_refused(server, role):
    """A template may write '<|' + role + '|>'."""
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": "hi"}]}
    status, _, answer = call(server, path="/v1/chat/completions", body=body)
    assert status == 400 and "messages[1].role" in answer["error"]["message"], answer
    assert "user, assistant" in answer["error"]["message"]


def test_a_prompt_beyond_the_limit_says_its_length(server):
    status, _, answer = call(server, body={"prompt": "x" * 600})
    assert (
        status == 400 and answer["error"]["code"] == "context_length_exceeded" and "601" in answer["error"]["message"]
    )


def test_more_tokens_than_the_model_length_are_refused(server):
    status, _, answer = call(server, body={"prompt": "x", "max_tokens": 999})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_what_the_engine_refuses_is_an_error_of_the_request():
    with serving() as server:
        status, _, answer = call(server, body={"prompt": "x" * 950, "max_tokens": 1})
        assert status == 400 and "the fake engine takes 900" in answer["error"]["message"]
        assert call(server, body={"prompt": "x"})[0] == 200


@pytest.mark.parametrize(
    "method, path, status, words",
    [
        ("GET", "/", 404, ["no such path", "/v1/completions"]),
        ("GET", "/../../etc/passwd", 404, ["no such path"]),
        ("GET", "/v1/models/words", 404, ["does not exist"]),
        ("GET", "/v1/completions", 405, ["accepts POST only"]),
        ("POST", "/health", 405, ["accepts GET only"]),
        ("DELETE", "/v1/models/letters", 405, ["accepts GET only"]),
        ("OPTIONS", "/v1/completions", 405, ["accepts POST only"]),
    ],
)
def test_paths_and_methods_that_are_not_there(server, method, path, status, words):
    got, headers, answer = call(server, method, path)
    assert got == status and all(w in answer["error"]["message"] for w in words), answer
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_form_is_no_json(server):
    assert call(server, body=b"prompt=a", headers={"Content-Type": "application/x-www-form-urlencoded"})[0] == 415


def test_the_models_are_listed(server):
    listed = call(server, "GET", "/v1/models")[2]["data"]
    assert [m["id"] for m in listed] == ["letters"] and call(server, "GET", "/v1/models/letters")[2] == listed[0]


def test_prompts_without_a_seed_get_different_seeds(server):
    """The fake engine begins at the letter that the seed says."""
    body = {"prompt": ["x"] * 4, "max_tokens": 1}
    firsts = [c["text"] for c in call(server, "POST", "/v1/completions", body)[2]["choices"]]
    assert len(set(firsts)) == 4
    seeded = [c["text"] for c in call(server, "POST", "/v1/completions", body | {"seed": 3})[2]["choices"]]
    assert len(set(seeded)) == 1


@pytest.mark.parametrize(
    "request_line, status",
    [
        (b"GET\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 2_000 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nno header\r\nContent-Length: 9\r\n\r\n", 400),
    ],
    ids=["word", "0.9", "9.9", "tls", "long path", "many headers", "long header", "no header"],
)
def test_what_is_not_http_is_answered_and_closed(server, request_line, status):
    answer = raw(server, request_line)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
    assert b"Connection: close" in answer and b'"error"' in answer


@pytest.mark.parametrize(
    "headers, status",
    [
        ([], 411),
        (["Transfer-Encoding: chunked"], 411),
        (["Content-Length: 2", "Transfer-Encoding: chunked"], 400),
        (["Transfer-Encoding: chunked", "Content-Length: 0"], 400),
        (["Transfer-Encoding: identity", "Transfer-Encoding: chunked"], 400),
        (["Content-Length: 2, 2"], 400),
        (["Content-Length: +2"], 400),
        (["Content-Length: 2\xa0"], 400),
        (["Content-Length: 2", "Content-Length: 2"], 400),
        (["Content-Length: -1"], 400),
        (["Content-Length: 1e3"], 400),
        (["Content-Length: 10001"], 413),
        (["Content-Length: 99999999999", "Expect: 100-continue"], 413),
    ],
)
def test_a_body_of_no_certain_or_too_great_length_is_refused_unread(server, headers, status):
    assert raw(server, post(b"", *headers)).startswith(b"HTTP/1.1 %d " % status)


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head, words",
    [
        (HEALTH + b"X: a\rContent-Length: 5\r\n", b"header line"),
        (HEALTH + b"X: a\x00b\r\n", b"header line"),
        (HEALTH + b"X: a\x0bb\r\n", b"header line"),
        (HEALTH + b"X: a\n", b"header line"),
        (HEALTH + b"Host: 127.0.0.1\r\n", b"Host may occur only once in a request"),
        (HEALTH + b"hOST: localhost\r\n", b"Host may occur only once in a request"),
        (HEALTH + b"X: a\r\n folded: 5\r\n", b"second line"),
        (HEALTH + b"\tX: a\r\n", b"second line"),
        (HEALTH + b"Content-Length : 5\r\n", b"header line"),
        (HEALTH + b": 5\r\n", b"header line"),
        (HEALTH + b"X\xc3\xa9: 5\r\n", b"header line"),
        (HEALTH + b"Content-Length: 1\r\nContent-Length: 1\r\n", b"Content-Length may occur only once in a request"),
        (b"GET /health\rX HTTP/1.1\r\n", b"request line"),
        (b"GET /health\x00 HTTP/1.1\r\n", b"request line"),
        (b"GET  /health HTTP/1.1\r\n", b"request line"),
        (b"GET /health HTTP/1.1 \r\n", b"request line"),
        (b"GET /health HTTP/1.1\n", b"request line"),
        (b"G\x01ET /health HTTP/1.1\r\n", b"request line"),
        (b"\r\n" + HEALTH, b"request line"),
    ],
)
def test_a_head_that_two_programs_could_parse_differently_ends_the_connection(server, head, words):
    """What follows it is not read as a request."""
    answer = raw(server, head + b"\r\n" + HEALTH + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and words in answer and b"Connection: close" in answer, answer
    assert answer.count(b"Server: jaxscale") == 1, answer


def test_a_request_of_http_1_1_names_its_host(server):
    answer = raw(server, b"GET /health HTTP/1.1\r\n\r\n" + HEALTH + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"needs the header Host" in answer, answer
    assert answer.count(b"Server: jaxscale") == 1, "what follows it is not read as a request"
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n")[9:12] == b"200"


def test_an_oversize_body_that_is_sent_anyway_still_gets_its_answer(server):
    status, _, answer = call(server, body=b"x" * 3_000_000)
    assert status == 413 and "10000" in answer["error"]["message"]


def test_a_client_that_asks_first_is_told_to_go_on(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    answer = raw(server, post(body, f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_requests_follow_each_other_on_a_connection(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    one, last = post(body, f"Content-Length: {len(body)}"), HEALTH + b"Connection: close\r\n\r\n"
    assert raw(server, one + one + last).count(b"HTTP/1.1 200 OK") == 3


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server):
    body = b'{"prompt": "a", "max_tokens": 3, "seed": 0, "stream": true}'
    request = post(body, f"Content-Length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    head, _, events = raw(server, request).partition(b"\r\n\r\n")
    assert b"chunked" not in head and events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_without_the_key_nothing_but_health_is_answered():
    with serving(key="sesame") as server:
        assert call(server, "GET", "/health")[0] == 200
        for header in (
            {},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "\xff"},
        ):
            for method, path in (
                ("GET", "/metrics"),
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("GET", "/x"),
            ):
                status, headers, answer = call(server, method, path, b"{}", JSON | header)
                assert status == 401 and headers["WWW-Authenticate"] == "Bearer", (method, path, header)
                assert answer["error"]["code"] == "invalid_api_key" and "sesame" not in json.dumps(answer)
        right = JSON | {"Authorization": "Bearer sesame", "Host": "models.example"}
        assert call(server, body={"prompt": "a"}, headers=right)[0] == 200


def test_without_a_key_only_loopback_names_are_answered(server):
    assert call(server, body={"prompt": "a"}, headers=JSON | {"Host": "rebound.example"})[0] == 403
    for name in ("localhost:80", "127.0.0.1", "[::1]:8000"):
        assert call(server, "GET", "/v1/models", headers={"Host": name})[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_others_are_let_in_only_with_a_key(host):
    with raises_saying(ConfigError, repr(host), "API key", "127.0.0.1"):
        Server(host=host, port=0)


def test_with_a_key_others_are_let_in():
    with Server(host="0.0.0.0", port=0, key="sesame") as server:
        assert call(server, "GET", "/health")[0] == 503


@pytest.mark.parametrize("key", ["", " ", "a b\n", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with raises_saying(ConfigError, "API key"):
        Server(port=0, key=key)


def test_a_port_in_use_is_an_error_at_once(server):
    with raises_saying(ConfigError, str(server.server_address[1]), "--port"):
        Server(port=server.server_address[1])


def test_limits_are_above_zero():
    with raises_saying(ConfigError, "Limits.body = 0"):
        Limits(body=0)
