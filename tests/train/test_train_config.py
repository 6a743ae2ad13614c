"""TrainConfig: values that are errors, and their messages."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, DataError, LayoutError
from jaxscale.step import NextToken
from tests.truth.errors import raises_saying


def test_the_defaults_are_valid():
    assert js.TrainConfig().micro_batch == 16


@pytest.mark.parametrize(
    "setting, value, least",
    [
        ("steps", 0, 1),
        ("batch_size", 0, 1),
        ("seq_len", 1, 2),
        ("seed", -1, 0),
        ("accumulate", 0, 1),
        ("eval_every", -1, 0),
        ("eval_batches", -1, 0),
        ("checkpoint_every", -1, 0),
        ("keep", 0, 1),
        ("keep_every", 0, 1),
    ],
)
def test_a_value_below_the_least_is_refused(setting, value, least):
    with raises_saying(ConfigError, f"train.{setting} = {value}", f"at least {least}"):
        js.TrainConfig(**{setting: value})


@pytest.mark.parametrize("setting", ["lr", "clip_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_what_must_be_positive_is_refused_otherwise(setting, value):
    with raises_saying(ConfigError, f"train.{setting} = {value}", "above 0"):
        js.TrainConfig(**{setting: value})


def test_a_seed_that_a_key_cannot_hold_is_refused():
    with raises_saying(ConfigError, f"train.seed = {2**32}", "below 2**32"):
        js.TrainConfig(seed=2**32)


@pytest.mark.parametrize("accumulate, nearest", [(3, 2), (5, 4), (32, 16)])
def test_micro_batches_that_do_not_divide_are_refused_with_the_nearest(accumulate, nearest):
    with raises_saying(ConfigError, f"train.accumulate = {accumulate}", "batch_size = 16", f"is {nearest}"):
        js.TrainConfig(accumulate=accumulate)


def test_a_value_of_the_parts_is_refused_by_the_parts():
    with raises_saying(ConfigError, "Transformer.width = 0", "at least 1"):
        js.models.Transformer.Config(width=0)
    with raises_saying(LayoutError, "'modle'", "known"):
        js.Layout("modle=2")
    with raises_saying(DataError, "synthetic.vocab_size=1", "2 or more"):
        js.data.synthetic(1)


@pytest.mark.parametrize(
    "setting, value, words",
    [
        (
            "model",
            js.models.Transformer.Config,
            [
                "a model such as Transformer()",
                "not the class TransformerConfig; write TransformerConfig() (@Transformer()",
            ],
        ),
        ("model", js.optim.AdamW(), ["a model", "not AdamW("]),
        ("data", "python_stdlib", ["a corpus such as python_stdlib()", "not 'python_stdlib'"]),
        ("tokenizer", "bytes", ["a tokenizer such as ByteTokenizer()"]),
        ("optimizer", "Muon", ["not 'Muon'; write Muon() (@Muon() in gin)"]),
        ("optimizer", js.optim.SOAP, ["not the class SOAP; write SOAP() (@SOAP() in gin)"]),
        ("schedule", None, ["a schedule such as WarmupCosine()", "not None"]),
        ("layout", "data=8", ["Layout('data=8')", "or None", "not 'data=8'"]),
    ],
)
def test_a_part_of_another_kind_is_refused(setting, value, words):
    with raises_saying(ConfigError, f"train.{setting} must be", *words):
        js.TrainConfig(**{setting: value})


@pytest.mark.parametrize(
    "setting, value, advice, right",
    [
        ("optimizer", "adamw", "AdamW()", js.optim.AdamW()),
        ("optimizer", "momentum", "SGD()", js.optim.SGD()),
        ("optimizer", "Moun", "Muon()", js.optim.Muon()),
        ("schedule", "cosine", "WarmupCosine()", js.optim.WarmupCosine()),
        ("objective", "next_token", "NextToken()", js.step.NextToken()),
        ("tokenizer", "bytes", "ByteTokenizer()", js.data.ByteTokenizer()),
        ("data", "stdlib", "python_stdlib()", js.data.python_stdlib()),
        ("model", "transformer", "TransformerConfig()", js.models.TransformerConfig()),
    ],
    ids=["optimizer", "another program's name", "misspelt", "schedule", "objective", "tokenizer", "data", "model"],
)
def test_a_word_for_a_part_is_answered_with_the_part_to_write(setting, value, advice, right):
    with raises_saying(ConfigError, f"train.{setting} must be", f"not '{value}'; write {advice} (@"):
        js.TrainConfig(**{setting: value})
    assert getattr(js.TrainConfig(**{setting: right}), setting) == right


@pytest.mark.parametrize("setting, value", [("optimizer", "WarmupCosine"), ("model", "AdamW"), ("optimizer", "xyzzy")])
def test_a_part_of_another_setting_is_not_advised(setting, value):
    with pytest.raises(ConfigError, match=f"train.{setting} must be .*not '{value}'$"):
        js.TrainConfig(**{setting: value})


def test_none_turns_off_what_may_be_off():
    config = js.TrainConfig(clip_norm=None, keep_every=None, layout=None, prompt=None)
    assert (config.clip_norm, config.keep_every, config.layout, config.prompt) == (None,) * 4


def test_every_setting_is_documented():
    text = inspect.getdoc(js.TrainConfig)  # Python 3.13 strips a docstring's indentation, earlier ones do not
    for field in dataclasses.fields(js.TrainConfig):
        assert f"\n  {field.name}: " in text, field.name


def test_every_setting_has_a_value_by_name():
    config = js.TrainConfig(steps=7)
    assert js.TrainConfig(**config.values()) == config


@pytest.mark.parametrize("weight", [-1e-4, float("inf"), float("nan")])
def test_a_weight_of_the_squared_log_partition_that_is_no_weight_is_refused(weight):
    with pytest.raises(ConfigError, match=rf"NextToken.z_loss = {weight}: must be at least 0 and finite"):
        NextToken(z_loss=weight)


@pytest.mark.parametrize("name", ["lr", "balance_rate"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_rate_that_is_no_number_is_refused_before_a_step(name, value):
    with pytest.raises(ConfigError, match=rf"train.{name} = {value}: must be "):
        js.TrainConfig(**{name: value})


@pytest.mark.parametrize(
    "value, advice, right",
    [
        ("fsdp=4", "write Layout('fsdp=4')", js.Layout("fsdp=4")),
        ({"fsdp": 4, "data": 2}, "write Layout('fsdp=4,data=2')", js.Layout("fsdp=4,data=2")),
        ("fdsp", "write Layout('fsdp=-1')", js.Layout("fsdp=-1")),
        ("zero1", "Layout('data=-1', rules='zero1')", js.Layout("data=-1", rules="zero1")),
        ("data=2,fspd=4", "did you mean 'fsdp'?", js.Layout("data=2,fsdp=4")),
    ],
    ids=["mesh", "dict", "misspelt axis", "rules", "misspelt mesh"],
)
def test_what_is_no_layout_is_answered_with_the_layout_that_it_means(value, advice, right):
    with raises_saying(ConfigError, "train.layout must be a layout", advice):
        js.TrainConfig(layout=value)
    js.TrainConfig(layout=right)


def test_whole_floats_are_answered_with_the_number_to_write():
    with raises_saying(ConfigError, "train.steps = 1000.0: must be a whole number; write 1000"):
        js.TrainConfig(steps=1e3)


def test_arrays_that_are_no_corpus_are_named_by_type_and_shape():
    with raises_saying(ConfigError, "not a dict of 'tokens': int32 of shape (100, 17), 'names': ['a']"):
        js.TrainConfig(data={"tokens": np.zeros((100, 17), np.int32), "names": ["a"]})
