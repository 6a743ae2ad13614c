"""A server under load: slow clients, many, and some that leave; and how it ends. The engine is one of letters."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time

import pytest

from jaxscale.cli import main
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve import Limits, Server
from jaxscale.infer.serve.asked import read_completion
from jaxscale.infer.serve.errors import ApiError
from jaxscale.infer.serve.metrics import Metrics
from jaxscale.infer.serve.turns import Turns
from jaxscale.infer.serve.worker import Text, Worker
from tests.truth.fake_engine import FakeEngine
from tests.truth.serving import SERVED, call, eventually, held, post, raw, serving


def test_half_a_head_is_waited_for_only_so_long():
    with serving(read=0.4, idle=0.4) as server:

        def drip(connection):  # a byte now and then, which a timeout between bytes would allow for ever
            with contextlib.suppress(OSError):
                for _ in range(40):
                    connection.sendall(b"X")
                    time.sleep(0.05)

        start = time.monotonic()
        assert raw(server, b"POST /v1/completions HTTP/1.1\r\nX: ", then=drip).startswith(b"HTTP/1.1 408 ")
        assert raw(server, post(b'{"prompt"', "Content-Length: 40")).startswith(b"HTTP/1.1 408 ")
        assert raw(server, b"") == b""  # one that says nothing is closed without a word
        assert time.monotonic() - start < 15


def test_a_client_that_leaves_frees_its_pages():
    with serving(FakeEngine(seconds=0.01)) as server:
        for stream in (b"true", b"false"):
            body = b'{"prompt": "a", "max_tokens": 900, "stream": %b}' % stream
            with socket.create_connection(server.server_address[:2]) as connection:
                connection.sendall(post(body, f"Content-Length: {len(body)}"))
                assert eventually(lambda: held(server) == 1)
            assert eventually(lambda: held(server) == 0)
        assert 'jaxscale_requests_total{state="cancelled"} 2' in call(server, "GET", "/metrics")[2]


def test_a_client_that_does_not_read_is_given_up():
    with serving(FakeEngine(seconds=0.001), write=0.3) as server:
        body = json.dumps({"prompt": ["a"] * 20, "max_tokens": 900, "stream": True, "logprobs": 20}).encode()
        with socket.create_connection(server.server_address[:2]) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: 'state="cancelled"} 1' in call(server, "GET", "/metrics")[2])
        assert eventually(lambda: held(server) == 0)


def test_one_text_too_many_is_told_to_come_back():
    with serving(FakeEngine(seconds=0.02), requests=2, share=2) as server:
        with socket.create_connection(server.server_address[:2]) as connection:
            body = b'{"prompt": "a", "max_tokens": 900, "n": 2}'
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: held(server) == 2)
            status, headers, answer = call(server, body={"prompt": "b"})
            assert status == 429 and headers["Retry-After"] == "1" and answer["error"]["type"] == "rate_limit_error"
            assert "2 of this client's 2 places are taken, and 2 of all 2" in answer["error"]["message"]
        assert eventually(lambda: call(server, body={"prompt": "b"})[0] == 200)


def asking(worker, client, n, letter="a", tokens=1):
    sampling = Sampling(max_tokens=tokens)
    return worker.ask([Text((0, ord(letter)), dataclasses.replace(sampling, seed=i)) for i in range(n)], client)


def test_one_client_leaves_half_of_the_places_to_the_others():
    engine = FakeEngine(seconds=0.02)
    worker = Worker(engine, Limits(requests=8), Metrics())
    try:
        asking(worker, "a", 4, tokens=900)
        with pytest.raises(ApiError, match="1 more texts are too many now: 4 of this client's 4 places") as caught:
            asking(worker, "a", 1)
        assert caught.value.status == 429
        asking(worker, "b", 4, tokens=900)
        with pytest.raises(ApiError, match="0 of this client's 4 places are taken, and 8 of all 8"):
            asking(worker, "c", 1)
    finally:
        worker.stop()
    with pytest.raises(ApiError, match="takes 4 texts of a client"):
        read_completion(b'{"prompt": "a", "n": 5}', SERVED, 100, Limits(requests=8).most)


def test_who_asks_for_one_text_does_not_wait_for_another_clients_many():
    """Two places: the first client's forty texts are in line when a second client and its own second request come."""
    order, engine = [], FakeEngine(places=2)
    submit = engine.submit
    engine.submit = lambda request: (order.append(chr(request.prompt[1])), submit(request))
    gate = threading.Event()
    engine.check = lambda request: gate.wait(10)  # nothing begins before all have asked
    worker = Worker(engine, Limits(), Metrics())
    try:
        asked = [asking(worker, "first", 40, "a"), asking(worker, "first", 2, "b"), asking(worker, "second", 2, "c")]
        gate.set()
        for one in asked:
            with one:
                until = time.monotonic() + 30
                for batch in one.batches(until, lambda: False):
                    for place, _ in batch:  # the only one of its text
                        one.end(place)
    finally:
        worker.stop()
    assert len(order) == 44 and order.index("c") <= 4 and order.index("b") <= 4
    assert order[:8].count("c") == 2 and order[:8].count("b") == 2


def test_texts_are_taken_in_turns_and_may_be_taken_back():
    turns = Turns()
    for client, request, items in (("a", 1, "uvw"), ("a", 2, "xy"), ("b", 1, "z")):
        for item in items:
            turns.put(client, request, item)
    assert turns.remove("a", 1, "v") and not turns.remove("a", 1, "v") and not turns.remove("c", 1, "z")
    assert [turns.take() for _ in range(len(turns))] == ["u", "z", "x", "w", "y"]
    with pytest.raises(LookupError):
        turns.take()


def test_the_command_keeps_compiled_programs_for_the_next_start(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr("jaxscale.sweep.programs.keep_programs", lambda: calls.append(1))
    assert main(["serve", str(tmp_path / "nothing")]) == 2 and "nothing" in capsys.readouterr().err
    assert calls


def test_one_connection_too_many_is_told_to_come_back():
    with serving(connections=2) as server:
        with socket.create_connection(server.server_address[:2]), socket.create_connection(server.server_address[:2]):
            time.sleep(0.3)
            assert b"HTTP/1.1 503 " in raw(server, b"")
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert eventually(lambda: raw(server, health)[9:12] == b"200", 20)


def test_an_answer_that_takes_too_long_is_ended():
    with serving(FakeEngine(seconds=0.02), time=0.3) as server:
        status, headers, answer = call(server, body={"prompt": "a", "max_tokens": 900})
        assert status == 504 and answer["error"]["code"] == "timeout" and headers["x-should-retry"] == "false"
        text = call(server, body={"prompt": "a", "max_tokens": 900, "stream": True})[2]
        assert '"code":"timeout"' in text and "[DONE]" not in text
        assert eventually(lambda: held(server) == 0)


def test_an_engine_that_fails_is_told_to_all_and_to_the_health_check(caplog):
    caplog.set_level(logging.CRITICAL, "jaxscale.serve")
    with serving(FakeEngine(fail_at=3)) as server:
        status, _, answer = call(server, body={"prompt": "a", "max_tokens": 9})
        assert status == 500 and answer["error"]["code"] == "engine_failed" and "fire" not in answer["error"]["message"]
        assert call(server, body={"prompt": "a"})[0] == 500
        assert call(server, "GET", "/health")[::2] == (503, {"status": "failed"})


def test_what_runs_ends_and_nothing_new_begins_while_it_drains():
    with serving(FakeEngine(seconds=0.02)) as server:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(call(server, body={"prompt": "a", "max_tokens": 40})))
        asking.start()
        assert eventually(lambda: held(server) == 1)
        drained = []
        draining = threading.Thread(target=lambda: drained.append(server.drain(10)))
        draining.start()
        assert eventually(lambda: server.state == "draining")
        status, headers, _ = call(server, body={"prompt": "b"})
        assert status == 503 and headers["Retry-After"]
        assert call(server, "GET", "/health")[0] == 503
        draining.join(10), asking.join(10)
        assert drained == [True] and answers[0][0] == 200 and answers[0][2]["usage"]["completion_tokens"] == 40


def test_draining_ends_after_its_time():
    with serving(FakeEngine(seconds=0.02)) as server:
        with socket.create_connection(server.server_address[:2]) as connection:
            body = b'{"prompt": "a", "max_tokens": 900}'
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: held(server) == 1)
            assert not server.drain(0.1)


def test_nothing_is_answered_before_there_is_a_model():
    with Server(port=0) as server:
        assert call(server, "GET", "/health")[::2] == (503, {"status": "starting"})
        assert call(server, body={"prompt": "a"})[0] == 503
        server.open(SERVED, FakeEngine())
        assert call(server, "GET", "/health")[::2] == (200, {"status": "ok"})
        assert call(server, body={"prompt": "a"})[0] == 200


def test_the_metrics_add_up():
    with serving() as server:
        call(server, body={"prompt": "abc", "max_tokens": 5})
        call(server, body={"prompt": "abc", "max_tokens": 5, "n": 2, "stream": True})
        call(server, body={"prompt": "abc", "max_tokens": 0})
        text = call(server, "GET", "/metrics")[2]
        parser = pytest.importorskip("prometheus_client.parser")
        found = {
            (s.name, *s.labels.values()): s.value
            for f in parser.text_string_to_metric_families(text)
            for s in f.samples
        }
        assert found["jaxscale_requests_total", "done"] == 2
        assert found["jaxscale_http_responses_total", "400"] == 1
        assert found["jaxscale_prompt_tokens_total",] == 12  # three texts of four tokens
        assert found["jaxscale_generation_tokens_total",] == 15
        assert found["jaxscale_time_to_first_token_seconds_count",] == 3
        assert found["jaxscale_time_per_output_token_seconds_count",] == 12
        assert found["jaxscale_time_per_output_token_seconds_bucket", "+Inf"] == 12
        assert found["jaxscale_cache_pages_free",] == 1000 and found["jaxscale_requests_running",] == 0
