"""A running server, asked by OpenAI's own client: answers are the model's, whoever else asks at the same time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
import signal
import time
import urllib.request

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.data.chat import ChatTemplate
from jaxscale.infer.loaded import load_model
from jaxscale.infer.serve import Limits, Server, engine_of, served_by
from tests.truth.runs import start, transformer, write_text

openai = pytest.importorskip("openai")

LENGTH = 32
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture(scope="module")
def stored(finished_run):
    """The finished run as another process finds it."""
    return js.load(finished_run.path)


@pytest.fixture(scope="module")
def served(stored):
    pytest.importorskip("jinja2")
    template = ChatTemplate(CHAT)
    served = served_by(stored, "tiny", LENGTH)
    return dataclasses.replace(served, chat=lambda messages: template.ids(messages, served.tokenizer).tolist())


@pytest.fixture(scope="module")
def server(stored, served):
    # 4 rows of 32 tokens want 16 pages: with 10 of them, some texts are sent back and come again
    engine = engine_of(stored, served, rows=4, budget=16, page=8, pages=10)
    with Server(port=0, key="sesame", limits=Limits(body=4096)) as server:
        server.open(served, engine)
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0, timeout=60) as client:
        yield client


def complete(client, prompt="def ", **options):
    return client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 8, "temperature": 0} | options)


def metric(server, name):
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": "Bearer sesame"})
    text = urllib.request.urlopen(request, timeout=10).read().decode()
    return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


def test_the_model_is_listed(client):
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_a_completion_is_what_the_run_says(client, stored):
    answer = complete(client)
    assert "def " + answer.choices[0].text == stored.sample("def ", 8, temperature=0)
    assert answer.choices[0].finish_reason == "length" and answer.model == "tiny"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


def test_an_echo_begins_with_the_prompt(client):
    assert complete(client, echo=True).choices[0].text == "def " + complete(client).choices[0].text


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"n": 3, "temperature": 1.0, "seed": 3}])
def test_a_stream_joined_is_the_answer_at_once(client, options):
    whole = complete(client, max_tokens=16, **options)
    parts = list(complete(client, max_tokens=16, stream=True, stream_options={"include_usage": True}, **options))
    texts = [""] * len(whole.choices)
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]
    assert parts[-1].usage == whole.usage and not parts[-1].choices and parts[0].usage is None


def test_a_chat_stream_joined_is_the_answer_at_once(client):
    ask = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 9, "temperature": 1, "seed": 5}
    whole = client.chat.completions.create(**ask)
    deltas = [part.choices[0] for part in client.chat.completions.create(**ask, stream=True)]
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == whole.choices[0].message.role == "assistant"
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_chat_is_the_completion_of_what_its_template_writes(client, served):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, temperature=0)
    ids = served.tokenizer.encode("s: Be\nu: hi\na: ").tolist()
    assert answer.choices[0].message.content == complete(client, ids, max_tokens=6).choices[0].text


def test_a_chat_without_a_number_goes_on_for_as_long_as_there_is_room(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == LENGTH


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    whole = complete(client, max_tokens=12).choices[0].text
    stop = whole[5:7]
    answer = complete(client, max_tokens=12, stop=[stop, "\0never"], stream=stream)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(c.text for c in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def forward(stored, ids):
    """Log-probabilities of what follows each id, float32."""
    loaded, ids = load_model(stored), np.asarray(ids, np.int32)
    logits = jax.jit(lambda params, ids: nnx.merge(loaded.graphdef, params)(ids))(loaded.params, ids[None])[0]
    return np.asarray(jax.nn.log_softmax(logits.astype("float32")))


def test_log_probabilities_are_those_of_a_forward_pass(client, stored, served):
    logprobs = complete(client, logprobs=3).choices[0].logprobs
    text = "".join(logprobs.tokens)
    ids = np.asarray(served.encode("def " + text), np.int32)
    expected = forward(stored, ids)[4:-1]
    np.testing.assert_allclose(logprobs.token_logprobs, expected[np.arange(8), ids[5:]], atol=1e-4)
    for likely, row in zip(logprobs.top_logprobs, expected, strict=True):
        np.testing.assert_allclose(sorted(likely.values(), reverse=True), np.sort(row)[::-1][:3], atol=1e-4)
    assert logprobs.text_offset == [0, *np.cumsum([len(t) for t in logprobs.tokens])[:-1]]


@pytest.mark.parametrize(("most", "stream"), [(0, False), (1, False), (3, True)])
def test_an_echos_log_probabilities_are_those_of_a_forward_pass(client, stored, served, most, stream):
    text = "def f(x):\n"
    answer = complete(client, text, max_tokens=most, echo=True, logprobs=2, stream=stream)
    logprobs_of_parts = [part.choices[0].logprobs for part in answer] if stream else [answer.choices[0].logprobs]
    fields = ("tokens", "token_logprobs", "top_logprobs")
    tokens, logprobs, top = ([x for part in logprobs_of_parts for x in getattr(part, name)] for name in fields)
    opening, *ids = served.encode(text)
    assert tokens[0] == served.tokenizer.decode(np.asarray([opening])) and (logprobs[0], top[0]) == (None, None)
    assert "".join(tokens[1 : 1 + len(ids)]) == text and len(tokens) == 1 + len(ids) + most
    expected = forward(stored, [opening, *ids])
    np.testing.assert_allclose(logprobs[1 : 1 + len(ids)], expected[np.arange(len(ids)), ids], atol=1e-4)
    for likely, row in zip(top[1 : 1 + len(ids)], expected, strict=False):
        np.testing.assert_allclose(max(likely.values()), row.max(), atol=1e-4)  # two may have one text
    if not stream:
        assert answer.usage.completion_tokens == most and (most > 0 or answer.choices[0].text == text)


def test_a_chats_log_probabilities_are_the_completions(client, served):
    ids = served.tokenizer.encode("s: Be\nu: hi\na: ").tolist()
    expected = complete(client, ids, max_tokens=4, logprobs=2).choices[0].logprobs
    ask = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    parts = [p.choices[0].logprobs for p in client.chat.completions.create(**ask, stream=True)]
    for got in (whole, [token for p in parts if p is not None for token in p.content]):
        assert [t.logprob for t in got] == expected.token_logprobs
        assert [{top.token: top.logprob for top in t.top_logprobs} for t in got] == expected.top_logprobs
        assert [bytes(t.bytes).decode() for t in got] == expected.tokens


def test_a_seed_reproduces_and_another_does_not(client):
    draw = lambda seed: complete(client, temperature=1.0, seed=seed, max_tokens=16).choices[0].text  # noqa: E731
    assert draw(7) == draw(7) != draw(8)


def test_prompts_of_one_request_are_answered_in_order(client):
    prompts = ["def ", "x + ", "retur"]
    together = complete(client, prompts, n=2, temperature=1.0, seed=4)
    alone = [complete(client, p, n=2, temperature=1.0, seed=4).choices for p in prompts]
    assert [c.text for c in together.choices] == [c.text for choices in alone for c in choices]
    assert [c.index for c in together.choices] == list(range(6))


def test_sixty_four_at_once_are_answered_as_one_at_a_time(server, client):
    requests = [
        ("def f"[: 1 + i % 5], {"seed": i, "temperature": float(i % 3 > 0), "max_tokens": 6 + i % 9}) for i in range(64)
    ]

    def text(one):
        prompt, options = one
        if options["seed"] % 2:
            return "".join(part.choices[0].text for part in complete(client, prompt, stream=True, **options))
        return complete(client, prompt, **options).choices[0].text

    alone = [text(one) for one in requests]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert list(pool.map(text, requests)) == alone
    assert metric(server, "jaxscale_cache_pages_used") == 0


def test_a_stream_that_is_left_frees_its_pages(server, client):
    before = metric(server, 'jaxscale_requests_total{state="cancelled"}'.replace("{", r"\{"))
    stream = complete(client, "", max_tokens=LENGTH - 1, n=16, temperature=1.0, stream=True)
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 20
    while metric(server, r'jaxscale_requests_total\{state="cancelled"}') == before and time.monotonic() < until:
        time.sleep(0.02)
    while metric(server, "jaxscale_cache_pages_used") and time.monotonic() < until:
        time.sleep(0.02)
    assert metric(server, "jaxscale_cache_pages_used") == metric(server, "jaxscale_requests_waiting") == 0


def test_a_wrong_key_is_refused(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="basil", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            complete(stranger)


def test_a_body_too_large_is_refused(client):
    with pytest.raises(openai.APIStatusError, match="4096") as caught:
        complete(client, "x" * 100_000)
    assert caught.value.status_code == 413


def test_a_prompt_too_long_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="41 tokens") as caught:
        complete(client, "x" * 40)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def test_another_model_is_refused(client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="huge", prompt="x")


SERVE = "import sys; from jaxscale.cli import main; sys.exit(main(sys.argv[1:]))"


@contextlib.contextmanager
def commanded(run, folder, *options):
    """Serve a run by the command; yield its process, and the URL of the server."""
    sizes = ["--budget", "16", "--page", "8", "--length", str(LENGTH)]
    process = start(SERVE, ["serve", str(run.path), "--port", "0", *sizes, *options], folder)
    try:
        line = process.stdout.readline()
        yield (
            process,
            re.search(r"http://\S+", line)[0] if "http" in line else pytest.fail(line + process.stderr.read()),
        )
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.usefixtures("interruptible")
def test_the_command_serves_and_ends_what_runs_when_told_to_stop(stored, tmp_path):
    with commanded(stored, tmp_path, "--rows", "2") as (process, url):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            stream = client.completions.create(
                model=stored.path.name, prompt="", max_tokens=31, n=8, seed=1, stream=True
            )
            parts = [next(stream)]
            process.send_signal(signal.SIGTERM)
            parts += list(stream)
        ends = [c.finish_reason for part in parts for c in part.choices if c.finish_reason]
        assert len(ends) == 8 and set(ends) <= {"stop", "length"}
        assert process.wait(30) == 0
    out, err = process.communicate()
    steps = [int(of) for _, of in re.findall(r"compiling program (\d+) of (\d+)", err)]
    assert steps and len(steps) == steps[0]
    assert "POST" not in err or json.dumps("def ") not in err


@pytest.mark.long
def test_the_models_own_modules_draft_for_the_command_and_change_no_greedy_answer(tmp_path):
    model = js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64, multi_token=1)
    run = js.fit(
        transformer(write_text(tmp_path / "text"), model=model, layout=None, objective=js.step.NextTokens(), steps=40),
        run=tmp_path / "run",
        quiet=True,
    )
    answers, drafted = [], []
    for options in ([], ["--draft", "mtp", "--draft-tokens", "2"]):
        with commanded(run, tmp_path, "--rows", "1", *options) as (_, url):
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                ask = functools.partial(client.completions.create, model="run", max_tokens=16, temperature=0)
                whole = [ask(prompt=p).choices[0] for p in ("def ", "", "  return")]
                parts = [list(ask(prompt=p, stream=True)) for p in ("def ", "", "  return")]
            assert ["".join(part.choices[0].text for part in of) for of in parts] == [c.text for c in whole]
            metrics = urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10).read().decode()
        answers.append([(c.text, c.finish_reason) for c in whole])
        drafted.append(float(re.search(r"^jaxscale_draft_tokens_accepted_total (\S+)$", metrics, re.MULTILINE)[1]))
    assert answers[0] == answers[1]
    assert drafted[0] == 0 < drafted[1]


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.long) for w in ("draft", "layers")])
def test_a_server_with_a_draft_or_streamed_layers_says_the_same(client, stored, served, way):
    texts = [complete(client, p, max_tokens=n).choices[0].text for p, n in (("def ", 8), ("a", 5))]
    more = {"draft": dict(draft=stored, draft_tokens=2), "layers": dict(stream_layers="host")}[way]
    engine = engine_of(stored, served, rows=2, budget=8, page=8, **more)
    with Server(port=0, key="sesame", limits=Limits()) as other:
        other.open(served, engine)
        with openai.OpenAI(base_url=f"{other.url}/v1", api_key="sesame", max_retries=0, timeout=60) as other_client:
            assert [
                complete(other_client, p, max_tokens=n).choices[0].text for p, n in (("def ", 8), ("a", 5))
            ] == texts
            if way == "draft":
                with pytest.raises(openai.BadRequestError, match="no log-probabilities of a prompt"):
                    complete(other_client, logprobs=1, echo=True)
        assert metric(other, "jaxscale_generation_tokens_total") == 13
    assert engine.stats.tokens_out == 13 and engine.stats.running == 0
    if way == "draft":  # the model is its own draft, so that every proposal is right
        assert engine.stats.acceptance == 1
