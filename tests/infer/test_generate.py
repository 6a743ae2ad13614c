"""Generated texts are the model's own, whatever the batch, the layout and the way they are requested."""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest
from flax import nnx

import jaxscale as js
from jaxscale.errors import ConfigError, DataError, RunError
from jaxscale.infer import Sampling, sample_text
from jaxscale.infer.cache import Paged
from jaxscale.infer.loaded import load_model
from jaxscale.models.positions import Learned
from jaxscale.step import describe_model
from tests.truth.compiled import nothing_is_compiled
from tests.truth.errors import raises_saying
from tests.truth.params import random_params
from tests.truth.runs import STEPS, Bigram, bigram, transformer, write_text

CONFIG = js.models.Transformer.Config(depth=1, vocab=256, width=32, heads=2, hidden=64)
PROMPTS = ["def ", "", "é\n", "a longer prompt"]
WIDTH = 64


def _of(finished_run, path=None, model=CONFIG, **changes):
    """A run whose random model clearly prefers some tokens."""
    _, infos = describe_model(model)
    params = jax.tree.map(jax.numpy.asarray, random_params(infos))
    state = dataclasses.replace(finished_run.state, params=params)
    changes = {"layout": None, "optimizer": js.optim.SGD(), **changes}
    return js.Run(path or finished_run.path, dataclasses.replace(finished_run.config, model=model, **changes), state)


@pytest.fixture(scope="module")
def run(finished_run):
    return _of(finished_run, seq_len=256)


@pytest.fixture(scope="module")
def likeliest(run):
    """The likeliest next tokens and their log-probabilities, each from a pass over the whole text."""
    graphdef, _ = describe_model(run.config.model)
    logits = jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids))

    def of(prompt, n):
        ids, logprobs = [0, *prompt.encode()], []
        for _ in range(n):
            row = np.zeros((1, WIDTH), np.int32)
            row[0, : len(ids)] = ids
            x = np.asarray(logits(run.state.params, row)[0, len(ids) - 1], np.float64)
            ids.append(int(np.argmax(x)))
            logprobs.append(x[ids[-1]] - np.log(np.exp(x).sum()))
        return ids[-n:], logprobs

    return of


@pytest.fixture(scope="module")
def stored(finished_run):
    """The finished run, loaded as by another process."""
    return js.load(finished_run.path)


def test_greedy_texts_are_the_whole_models_likeliest_tokens(run, likeliest):
    results = run.generate(PROMPTS, temperature=0, max_tokens=20, ignore_end=True, logprobs=2)
    for prompt, text in zip(PROMPTS, results, strict=True):
        tokens, logprobs = likeliest(prompt, 20)
        assert list(text.ids) == tokens and text.text == run.tokenizer.decode(np.asarray(tokens)) == str(text)
        np.testing.assert_allclose(text.logprobs, logprobs, atol=1e-4)
        assert [top[0][0] for top in text.top] == tokens and {len(top) for top in text.top} == {2}
        assert (text.finished, text.prompt_tokens) == ("length", 1 + len(prompt.encode()))
        assert 0 < text.first_token <= text.seconds


def test_a_text_depends_on_its_seed_and_not_on_its_company(run):
    together = run.generate(PROMPTS, max_tokens=12, seed=3)
    assert run.generate(PROMPTS[3], max_tokens=12, seed=3).ids == together[3].ids
    assert run.generate(PROMPTS[3], max_tokens=12, seed=4).ids != together[3].ids
    each = run.generate([PROMPTS[0]] * 2, sampling=[Sampling(max_tokens=12, seed=i) for i in (3, 4)])
    assert each[0].ids == together[0].ids != each[1].ids


def test_one_likeliest_token_is_no_choice(run, likeliest):
    assert list(run.generate("x", top_k=1, max_tokens=9, ignore_end=True).ids) == likeliest("x", 9)[0]


def test_ids_are_a_prompt_as_they_are(run):
    text = run.generate("def ", temperature=0, max_tokens=8)
    assert run.generate([0, *b"def "], temperature=0, max_tokens=8).ids == text.ids
    assert run.generate([[0, *b"def "], "def "], temperature=0, max_tokens=8)[0].ids == text.ids


def test_a_stream_adds_up_to_the_text(run):
    whole = run.generate("def ", max_tokens=40, seed=5, ignore_end=True)
    pieces = list(run.stream("def ", max_tokens=40, seed=5, ignore_end=True))
    assert "".join(pieces) == whole.text and len(pieces) > 5


def test_the_end_of_a_text_ends_it_and_is_not_shown(run):
    end = next(s for s in range(200) if 0 in run.generate("e", max_tokens=40, seed=s, ignore_end=True).ids)
    on = run.generate("e", max_tokens=40, seed=end, ignore_end=True)
    text = run.generate("e", max_tokens=40, seed=end)
    assert text.finished == "stop" and text.ids == on.ids[: on.ids.index(0) + 1]
    assert text.text == run.tokenizer.decode(np.asarray(text.ids[:-1]))


def test_a_stop_string_ends_a_text_before_it(run):
    on = run.generate("a", max_tokens=40, seed=1, ignore_end=True)
    stop = on.text[10:13]
    text = run.generate("a", max_tokens=40, seed=1, ignore_end=True, stop=stop)
    assert text.text == on.text[: on.text.index(stop)] and text.finished == "stop"
    assert len(text.ids) < 40 and text.ids == on.ids[: len(text.ids)]
    assert "".join(run.stream("a", max_tokens=40, seed=1, ignore_end=True, stop=(stop,))) == text.text


def test_a_stored_runs_model_and_engine_are_kept(stored):
    first = stored.generate("def ", max_tokens=8)
    engine, loaded = stored.session._engine[-1], stored.session._model
    for piece in stored.stream("def ", max_tokens=8):
        assert piece and engine.busy
        break
    assert stored.generate(["def ", "x"], max_tokens=8, rows=1)[0].ids == first.ids
    assert stored.session._engine[-1] is engine and stored.session._model is loaded
    assert engine.stats.running == 0 and engine.stats.pages_used == 0


@pytest.mark.long
def test_the_same_layout_on_other_devices_generates_on_those(stored):
    layout, texts = js.Layout("tensor=2"), []
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        texts.append(stored.generate("def ", max_tokens=3, layout=layout.on(devices)).ids)
        engine = stored.session._engine[-1]
        for tree in (engine.stepper._params, engine.stepper._states):
            assert all(x.sharding.device_set == set(devices) for x in jax.tree.leaves(tree))
    assert texts[0] == texts[1]


def test_two_texts_under_way_on_one_run_get_all_their_tokens(stored):
    expected = {p: stored.generate(p, max_tokens=20, ignore_end=True).text for p in ("ab", "xyz")}
    first = stored.stream("ab", max_tokens=20, ignore_end=True)
    begun = next(first)
    assert stored.generate("xyz", max_tokens=20, ignore_end=True).text == expected["xyz"]
    assert begun + "".join(first) == expected["ab"]


def test_an_interrupt_within_a_step_leaves_a_run_that_goes_on(stored, monkeypatch):
    expected = stored.generate("def ", max_tokens=8).ids

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("jaxscale.infer.engine.engine.Engine._add_token", interrupted)
        stored.generate("def ", max_tokens=8)
    assert stored.generate("def ", max_tokens=8).ids == expected


# --- longer than the model knows


def test_learned_positions_end_a_text_with_a_warning(finished_run, caplog):
    model = dataclasses.replace(CONFIG, positions=Learned(length=16))
    run = _of(finished_run, model=model)
    with caplog.at_level(logging.WARNING, "jaxscale"):
        text = run.generate("0123456789", temperature=0, max_tokens=20, ignore_end=True)
    assert len(text.ids) == 5 and text.finished == "length"
    assert "ends after 5 of 20 new tokens: the model has 16 learned positions" in caplog.text
    with raises_saying(ConfigError, "the prompt has 17 tokens", "16 learned positions", "at most 15"):
        run.generate("0123456789abcdef")


def test_rotary_positions_continue_with_a_warning(finished_run, likeliest, caplog):
    short = _of(finished_run, seq_len=16)
    with caplog.at_level(logging.WARNING, "jaxscale"):
        text = short.generate("def ", temperature=0, max_tokens=20, ignore_end=True)
    assert list(text.ids) == likeliest("def ", 20)[0]
    assert "25 tokens" in caplog.text and "sequences of 16 (train.seq_len)" in caplog.text


# --- other models


def test_a_model_without_a_cache_computes_the_whole_sequence_for_every_token(finished_run, caplog):
    run = _of(finished_run, model=Bigram(vocab=256))
    with caplog.at_level(logging.WARNING, "jaxscale"):
        results = run.generate(["a", "b"], temperature=0, max_tokens=6, ignore_end=True, logprobs=1)
    assert "each token recomputes the whole sequence (slow): _Bigram has no KV cache; to give it one" in caplog.text
    assert "(jaxscale.models.Decodable)" in caplog.text
    embed, head = (np.asarray(run.state.params[n]["weight"], np.float64) for n in ("embed", "head"))
    for text, last in zip(results, b"ab", strict=True):
        for token, logprob, top in zip(text.ids, text.logprobs, text.top, strict=True):
            x = head @ embed[last]
            assert token == top[0][0] == np.argmax(x)
            assert logprob == pytest.approx(x.max() - np.log(np.exp(x).sum()), abs=1e-4)
            last = token
    with nothing_is_compiled():
        run.generate(["a", "b"], max_tokens=6, ignore_end=True, repetition_penalty=1.5)


def test_a_cache_of_8_bits_is_chosen_by_a_setting_and_refused_where_nothing_is_stored(finished_run, run, likeliest):
    eight = Paged(numbers="int8")
    text = run.generate("def ", temperature=0, max_tokens=8, ignore_end=True, cache=eight)
    assert list(text.ids[:4]) == likeliest("def ", 4)[0]
    np.testing.assert_allclose(text.logprobs[:4], likeliest("def ", 4)[1], atol=0.1)
    with raises_saying(ConfigError, "a draft needs keys and values in the type of the computation", "int8"):
        run.generate("a", cache=eight, draft=run)
    with raises_saying(ConfigError, "keys and values are not stored at all, so not as int8"):
        _of(finished_run, model=Bigram(vocab=256)).generate("a", cache=eight)


def test_experts_drop_no_token_while_generating(finished_run, caplog):
    model = dataclasses.replace(CONFIG, mlp=js.nn.MixtureOfExperts(experts=4, capacity=1.0))
    run = _of(finished_run, model=model)
    with caplog.at_level(logging.WARNING, "jaxscale"):
        graphdef = load_model(run, generation=True).graphdef
    assert nnx.merge(graphdef, run.state.params).config.mlp.capacity is None
    assert "experts drop no tokens" in caplog.text
    assert nnx.merge(load_model(run).graphdef, run.state.params).config.mlp.capacity == 1.0


@pytest.mark.long
def test_a_draft_changes_no_greedy_text_and_its_acceptance_is_reported(finished_run, run, likeliest):
    draft = _of(finished_run, model=dataclasses.replace(CONFIG, width=16), seq_len=256)
    results = run.generate(PROMPTS, temperature=0, max_tokens=10, ignore_end=True, draft=draft, draft_tokens=2)
    assert [list(f.ids) for f in results] == [likeliest(p, 10)[0] for p in PROMPTS]
    assert 0 <= results[0].acceptance < 1 and run.generate("a", max_tokens=1).acceptance is None


@pytest.mark.long
def test_the_modules_of_a_model_draft_for_it(finished_run):
    own = _of(finished_run, model=dataclasses.replace(CONFIG, multi_token=1), seq_len=256)
    plain, drafted = (
        own.generate("def ", temperature=0, max_tokens=10, ignore_end=True, draft=d) for d in (None, "mtp")
    )
    assert drafted.ids == plain.ids and plain.acceptance is None and 0 <= drafted.acceptance < 1
    with raises_saying(ConfigError, "draft = 'mtb'", "'mtp'"):
        own.generate("a", draft="mtb")


def test_a_draft_with_another_tokenizer_is_refused(finished_run, run, tmp_path):
    pytest.importorskip("tokenizers")
    other = js.data.train_bpe(["the cat"], 260, tmp_path / "small" / "tokenizer.json")
    draft = _of(finished_run, tokenizer=other)
    with raises_saying(ConfigError, "the draft", "'small' (", "'bytes' (256 ids)", "same tokenizer"):
        run.generate("a", draft=draft)


def test_a_chat_is_the_templates_tokens_continued(finished_run, tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    js.data.train_bpe(["the cat sat"] * 9, 300, tmp_path / "hf" / "tokenizer.json")
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    run = _of(finished_run, tmp_path, dataclasses.replace(CONFIG, vocab=320), seq_len=256)
    results = run.chat([{"role": "user", "content": "the cat"}], temperature=0, max_tokens=6)
    ids = run.tokenizer.encode("user: the cat\n>")
    assert results.ids == run.generate(ids, temperature=0, max_tokens=6).ids and results.prompt_tokens == len(ids)


# --- mistakes


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        ("a", {"temprature": 1}, ["'temprature'", "did you mean 'temperature'"]),
        ("a", {"temperature": -1}, ["temperature = -1"]),
        (["a", "b"], {"sampling": [Sampling()]}, ["1 samplings for 2 prompts"]),
        ([], {}, ["no prompt"]),
        ([256], {}, ["token id 256", "below 256"]),
        ([-1], {}, ["token id -1"]),
        ([1.5], {}, ["list of token ids"]),
        ("a", {"rows": 0}, ["rows = 0"]),
    ],
)
def test_what_cannot_be_generated_is_an_error(run, prompt, options, words):
    with raises_saying(ConfigError, *words):
        run.generate(prompt, **options)


def test_a_stream_is_of_one_prompt(run):
    with raises_saying(ConfigError, "one prompt"):
        next(run.stream(["a", "b"]))


# --- sample


def test_a_sample_is_a_prompt_and_what_is_generated(run):
    whole = run.generate("def f", max_tokens=8, temperature=0.5, seed=2)
    assert run.sample("def f", 8, temperature=0.5, seed=2) == "def f" + whole.text
    assert sample_text(run, "def f", 8, temperature=0.5, seed=2) == "def f" + whole.text


def test_an_empty_prompt_starts_a_document(stored):
    assert isinstance(stored.sample("", 8), str)


@pytest.mark.long
def test_a_run_in_memory_on_its_layout_and_its_checkpoint_on_one_device_say_the_same(finished_run, stored):
    assert stored.sample("def ", 8, temperature=0) == finished_run.sample("def ", 8, temperature=0)


def test_a_prompt_that_no_id_stands_for_is_refused(stored):
    with raises_saying(DataError, "NUL"):
        stored.sample("\0", 8)


def test_a_model_of_no_text_cannot_continue_one(tmp_path):
    run = js.fit(js.TrainConfig(**bigram(steps=1)), run=tmp_path / "run", quiet=True)
    with raises_saying(ConfigError, "token id 102", "below 32", "not text"):
        run.sample("def ", 8)


def test_a_run_without_a_checkpoint_cannot_be_sampled(stored, tmp_path):
    (tmp_path / "config.gin").write_text((stored.path / "config.gin").read_text())
    with raises_saying(RunError, str(tmp_path), "no finished checkpoint"):
        js.Run(tmp_path).sample("def ")


def test_an_earlier_checkpoint_can_be_read_for_sampling(stored):
    assert stored.params(STEPS)["embed"]["weight"].shape == (256, 32)
    assert stored.generate("def ", max_tokens=4, step=STEPS).ids == stored.generate("def ", max_tokens=4).ids


REVERSIBLE = dataclasses.replace(CONFIG, stack=js.nn.ReversibleRun)


def test_a_text_of_a_reversible_model_never_depends_on_its_padding(finished_run):
    experts = js.nn.MixtureOfExperts(experts=4, capacity=1.0, router=js.nn.ExpertChoiceRouter())
    run = _of(finished_run, model=dataclasses.replace(REVERSIBLE, mlp=experts))
    with raises_saying(ConfigError, "ExpertChoiceRouter", "padding", "SoftmaxRouter"):
        run.generate("a", max_tokens=1)


@pytest.mark.long
def test_a_reversible_model_generates_where_the_sequence_is_cut(finished_run):
    run = _of(finished_run, model=dataclasses.replace(REVERSIBLE, attention=js.nn.RingAttention()))
    options = dict(temperature=0, max_tokens=3, ignore_end=True)
    cut = run.generate("def ", layout=js.Layout("context=2"), **options)
    assert cut.ids == run.generate("def ", **options).ids


@pytest.mark.long
def test_a_run_of_overlapped_layers_generates_on_the_layout_that_it_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    model = js.models.Transformer.Config(depth=1, width=32, heads=2, hidden=64, overlap=("attention", "mlp"))
    layout = js.Layout("tensor=2", sequence_sharded=True)
    config = transformer(write_text(tmp_path / "text"), model=model, layout=layout, steps=1, eval_batches=1)
    run = js.fit(config, run=tmp_path / "run", quiet=True)
    sharded, one = (
        run.generate("def ", temperature=0, max_tokens=4, ignore_end=True, layout=where)
        for where in (None, js.Layout("data=1"))
    )
    assert sharded.ids == one.ids
