"""The look-up of settings: parsed docstrings, and `jaxscale settings`."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale import config_registry
from jaxscale.cli import main
from jaxscale.commands.settings import look_up, register_all
from jaxscale.config_docs import FAMILIES, describe, described, parse, words
from jaxscale.errors import ConfigError, check_whole

DOC = """Adam with decoupled weight decay
    (Loshchilov & Hutter 2019).

    More about it,
    on two lines:

        x = 1

    Args:
      b1, b2: decay of the moments,
        near 1.
      eps (float): added to the root: not below it.
      **changes: anything else.

    Returns:
      a transformation.

    Raises:
      ConfigError: a number out of its range.

    A last paragraph.
    """


def test_a_docstring_is_taken_apart():
    doc = parse(DOC)
    assert doc.summary == "Adam with decoupled weight decay (Loshchilov & Hutter 2019)."
    assert doc.description == "More about it, on two lines:\n\n    x = 1\n\nA last paragraph."
    assert doc.arguments == {
        "b1": "decay of the moments, near 1.",
        "b2": "decay of the moments, near 1.",
        "eps": "added to the root: not below it.",
        "changes": "anything else.",
    }
    assert doc.sections["Returns"] == {"": "a transformation."}
    assert doc.sections["Raises"] == {"ConfigError": "a number out of its range."}
    assert parse(None) == parse("")


def test_every_registered_name_belongs_to_a_family_and_says_what_it_is():
    register_all()
    ours = [item for item in described() if item.path.startswith("jaxscale.")]
    assert len(ours) > 100
    assert [item.name for item in ours if item.family == "Your own" or not item.summary] == []
    assert {item.family for item in ours} == set(FAMILIES) - {"Your own"}


def test_settings_have_type_default_and_meaning():
    lr = next(setting for setting in describe("train").settings if setting.name == "lr")
    assert (lr.type, lr.default) == ("float", "0.003")
    assert "learning rate" in lr.meaning
    defaults = {setting.name: setting.default for setting in describe("train").settings}
    assert defaults["optimizer"] == "@AdamW()"
    assert defaults["snapshots"] == "@Snapshots(every=0)"
    assert defaults["evaluate_on"] == "{}"  # made by a default_factory
    assert next(s.default for s in describe("FromRun").settings if s.name == "path") is None


def test_an_unregistered_object_is_written_as_python_has_it():
    assert words((1, "a", len)) == "(1, 'a', <built-in function len>)"
    assert words(len) == "len"


def test_a_subclass_has_the_meanings_of_its_base_and_may_say_others(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Base:
        """A base.

        Args:
            one: the base's one.
            two: the base's two.
        """

        one: int = 1
        two: int = 2

    @dataclasses.dataclass(frozen=True)
    class OfTests(Base):
        """A part.

        Args:
            two: its own two.
        """

    for name in ("BY_NAME", "BY_ID"):
        monkeypatch.setattr(config_registry, name, dict(getattr(config_registry, name)))
    config_registry.BY_NAME["OfTests"] = config_registry.Entry("OfTests", OfTests, "jaxscale_registry.OfTests")
    item = describe("OfTests")
    assert item.family == "Your own"
    assert {s.name: s.meaning for s in item.settings} == {"one": "the base's one.", "two": "its own two."}


@pytest.mark.parametrize(
    "name, message",
    [
        ("AdmW", "there is no setting or registered name 'AdmW'; did you mean 'AdamW'"),
        ("warmup", "name 'warmup'; did you mean 'WarmupCosine.warmup' or 'Constant.warmup' or 'WSD.warmup'?"),
        ("warmpu", "name 'warmpu'; did you mean 'Constant.warmup' or 'WarmupCosine.warmup' or 'WSD.warmup'?"),
        ("zzzzzz", "there is no setting or registered name 'zzzzzz'; `jaxscale settings` lists all names"),
        ("AdmW.b1", "there is no registered name 'AdmW'; did you mean 'AdamW'"),
        ("learning_rate", "did you mean 'train.lr'?"),
        ("train.lrr", "train has no setting 'lrr'; did you mean 'lr'?"),
        ("AdamW.beta1", "AdamW has no setting 'beta1'; did you mean 'b1'?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(name, message):
    register_all()
    with pytest.raises(ConfigError) as error:
        look_up(name)
    assert message in str(error.value)


def test_the_command_prints_a_list_a_name_and_a_setting(capsys):
    assert main(["settings"]) == 0
    out = capsys.readouterr().out
    assert "Optimizers" in out and "AdamW8bit" in out
    assert main(["settings", "@AdamW()"]) == 0
    out = capsys.readouterr().out
    assert "AdamW.b1 = 0.9" in out and "(float)" in out
    assert main(["settings", "my_scope/train.lr"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("train.lr = 0.003") and "batch_size" not in out


def test_the_command_prints_json(capsys):
    assert main(["settings", "--json"]) == 0
    assert {"name", "family", "summary"} == set(json.loads(capsys.readouterr().out)[0])
    assert main(["settings", "train.lr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["default"] == "0.003"


def test_a_setting_lists_the_registered_objects_that_it_accepts(capsys):
    register_all()

    def of(name):
        return set(look_up(name)[1].choices)

    assert {"Constant", "WSD", "WarmupCosine"} <= of("train.schedule")
    assert not {"AdamW", "Transformer"} & of("train.schedule")  # they have a method of that name too
    assert {"AdamW", "Muon", "OnHost"} <= of("train.optimizer") and "OnHost" not in of("OnHost.optimizer")
    assert {"MaskedToken", "NextToken"} <= of("train.objective")
    assert {"flash_attention", "RingAttention"} <= of("Transformer.attention")
    assert {"Transformer", "llama3_8b"} <= of("train.model")  # a function that returns one
    assert "Never" in of("Grid.stopper") and "Random" not in of("Grid.stopper")
    assert of("train.lr") == of("train.layout") == set()
    assert main(["settings", "train.schedule"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "one of: " in out and "WarmupCosine" in out.partition("one of: ")[2]


def test_a_whole_number_of_numpy_is_answered_with_the_number_to_write():
    with pytest.raises(ConfigError, match=r"A\.b = np\.int64\(8\): must be a whole number of at least 1; write 8$"):
        check_whole("A.b", np.int64(8))
    with pytest.raises(ConfigError, match=r"must be a whole number of at least 1$"):
        check_whole("A.b", np.int64(0))
