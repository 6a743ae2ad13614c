"""A server under load: slow clients, many clients, clients that disconnect; and stopping. The engine is a fake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import socket
import threading
import time

import pytest

from jaxscale.cli import main
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve import Limits, Server
from jaxscale.infer.serve.errors import ApiError
from jaxscale.infer.serve.fair_queue import FairQueue
from jaxscale.infer.serve.metrics import Metrics
from jaxscale.infer.serve.requests import read_completion
from jaxscale.infer.serve.worker import NewSequence, Worker
from tests.truth.fake_engine import FakeEngine
from tests.truth.serving import SERVED, call, eventually, pages_used, post, raw, serving


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
        assert raw(server, b"") == b""  # a silent connection is closed without an answer
        assert time.monotonic() - start < 15


def test_a_client_that_leaves_frees_its_pages():
    with serving(FakeEngine(seconds=0.01)) as server:
        for stream in (b"true", b"false"):
            body = b'{"prompt": "a", "max_tokens": 900, "stream": %b}' % stream
            with socket.create_connection(server.server_address[:2]) as connection:
                connection.sendall(post(body, f"Content-Length: {len(body)}"))
                assert eventually(lambda: pages_used(server) == 1)
            assert eventually(lambda: pages_used(server) == 0)
        assert 'jaxscale_requests_total{state="cancelled"} 2' in call(server, "GET", "/metrics")[2]


def test_a_client_that_does_not_read_is_given_up():
    with serving(FakeEngine(seconds=0.001), write=0.3) as server:
        body = json.dumps({"prompt": ["a"] * 20, "max_tokens": 900, "stream": True, "logprobs": 20}).encode()
        with socket.create_connection(server.server_address[:2]) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: 'state="cancelled"} 1' in call(server, "GET", "/metrics")[2])
        assert eventually(lambda: pages_used(server) == 0)


def test_one_sequence_too_many_is_answered_429():
    with serving(FakeEngine(seconds=0.02), requests=2, share=2) as server:
        with socket.create_connection(server.server_address[:2]) as connection:
            body = b'{"prompt": "a", "max_tokens": 900, "n": 2}'
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: pages_used(server) == 2)
            status, headers, answer = call(server, body={"prompt": "b"})
            assert status == 429 and headers["Retry-After"] == "1" and answer["error"]["type"] == "rate_limit_error"
            words = "this client has 2 of at most 2 unfinished, and all clients 2 of at most 2"
            assert words in answer["error"]["message"]
        assert eventually(lambda: call(server, body={"prompt": "b"})[0] == 200)


def submit(worker, client, n, letter="a", tokens=1):
    sampling = Sampling(max_tokens=tokens)
    prompt = (0, ord(letter))
    return worker.submit([NewSequence(prompt, dataclasses.replace(sampling, seed=i)) for i in range(n)], client)


def test_one_client_leaves_half_of_the_places_to_the_others():
    engine = FakeEngine(seconds=0.02)
    worker = Worker(engine, Limits(requests=8), Metrics())
    try:
        submit(worker, "a", 4, tokens=900)
        with pytest.raises(ApiError, match="no place for 1 more sequences: this client has 4 of at most 4") as caught:
            submit(worker, "a", 1)
        assert caught.value.status == 429
        submit(worker, "b", 4, tokens=900)
        with pytest.raises(ApiError, match="has 0 of at most 4 unfinished, and all clients 8 of at most 8"):
            submit(worker, "c", 1)
    finally:
        worker.stop()
    with pytest.raises(ApiError, match="allows a client 4 sequences at once"):
        read_completion(b'{"prompt": "a", "n": 5}', SERVED, 100, Limits(requests=8).per_client)


def test_a_client_with_one_sequence_does_not_wait_for_all_of_another_clients():
    """Two slots: the first client's forty sequences wait when its second request and a second client come."""
    order, engine = [], FakeEngine(slots=2)
    engine_submit = engine.submit
    engine.submit = lambda request: (order.append(chr(request.prompt[1])), engine_submit(request))
    gate = threading.Event()
    engine.check = lambda request: gate.wait(10)  # nothing starts before all are submitted
    worker = Worker(engine, Limits(), Metrics())
    try:
        jobs = ("first", 40, "a"), ("first", 2, "b"), ("second", 2, "c")
        submissions = [submit(worker, *job) for job in jobs]
        gate.set()
        for one in submissions:
            with one:
                deadline = time.monotonic() + 30
                for batch in one.batches(deadline, lambda: False):
                    for index, _ in batch:  # the only token of its sequence
                        one.end(index)
    finally:
        worker.stop()
    assert len(order) == 44 and order.index("c") <= 4 and order.index("b") <= 4
    assert order[:8].count("c") == 2 and order[:8].count("b") == 2


def test_the_queue_takes_turns_over_clients_and_requests_and_items_can_be_removed():
    queue = FairQueue()
    for client, request, items in (("a", 1, "uvw"), ("a", 2, "xy"), ("b", 1, "z")):
        for item in items:
            queue.put(client, request, item)
    assert queue.remove("a", 1, "v") and not queue.remove("a", 1, "v") and not queue.remove("c", 1, "z")
    assert [queue.take() for _ in range(len(queue))] == ["u", "z", "x", "w", "y"]
    with pytest.raises(LookupError):
        queue.take()


def test_the_command_keeps_compiled_programs_for_the_next_start(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr("jaxscale.sweep.programs.keep_programs", lambda: calls.append(1))
    assert main(["serve", str(tmp_path / "nothing")]) == 2 and "nothing" in capsys.readouterr().err
    assert calls


def test_one_connection_too_many_is_answered_503():
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
        assert eventually(lambda: pages_used(server) == 0)


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
        request = threading.Thread(target=lambda: answers.append(call(server, body={"prompt": "a", "max_tokens": 40})))
        request.start()
        assert eventually(lambda: pages_used(server) == 1)
        drained = []
        draining = threading.Thread(target=lambda: drained.append(server.drain(10)))
        draining.start()
        assert eventually(lambda: server.state == "draining")
        status, headers, _ = call(server, body={"prompt": "b"})
        assert status == 503 and headers["Retry-After"]
        assert call(server, "GET", "/health")[0] == 503
        draining.join(10), request.join(10)
        assert drained == [True] and answers[0][0] == 200 and answers[0][2]["usage"]["completion_tokens"] == 40


def test_draining_ends_after_its_time():
    with serving(FakeEngine(seconds=0.02)) as server:
        with socket.create_connection(server.server_address[:2]) as connection:
            body = b'{"prompt": "a", "max_tokens": 900}'
            connection.sendall(post(body, f"Content-Length: {len(body)}"))
            assert eventually(lambda: pages_used(server) == 1)
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
        metrics = {
            (s.name, *s.labels.values()): s.value
            for f in parser.text_string_to_metric_families(text)
            for s in f.samples
        }
        assert metrics["jaxscale_requests_total", "done"] == 2
        assert metrics["jaxscale_http_responses_total", "400"] == 1
        assert metrics["jaxscale_prompt_tokens_total",] == 12  # three sequences of four tokens
        assert metrics["jaxscale_generation_tokens_total",] == 15
        assert metrics["jaxscale_parameter_bytes",] == 1234
        rate = 15 / metrics["jaxscale_engine_seconds_total",]
        assert metrics["jaxscale_tokens_per_second",] == pytest.approx(rate)
        assert re.fullmatch(r"15 tokens, \S+ tokens/s of the engine's steps, 1.21 KiB of parameters", server.summary())
        assert metrics["jaxscale_time_to_first_token_seconds_count",] == 3
        assert metrics["jaxscale_time_per_output_token_seconds_count",] == 12
        assert metrics["jaxscale_time_per_output_token_seconds_bucket", "+Inf"] == 12
        assert metrics["jaxscale_cache_pages_free",] == 1000 and metrics["jaxscale_requests_running",] == 0
