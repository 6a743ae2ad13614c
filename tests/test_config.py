"""jaxscale.config: what it loads and refuses, its error messages, and that written text rebuilds equal values."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import gin
import pytest

from jaxscale import config
from jaxscale.errors import ConfigError, RunError

if TYPE_CHECKING:
    from nowhere import Missing


class Positions(Protocol):
    def __call__(self, x): ...


def softmax(x, scale: float = 1.0):
    return x * scale


def local(x, window: int = 4):
    return x


@dataclass(frozen=True)
class Rotary:
    theta: float = 1e4


@dataclass(frozen=True)
class Block:
    heads: int = 2
    attention: Callable = softmax


@dataclass(frozen=True)
class Decoder:
    depth: int = 2
    positions: Positions | None = None
    blocks: tuple[Block, ...] = ()
    kind: Literal["pre", "post"] = "pre"
    name: str | None = None
    extra: Missing | None = None


@dataclass
class Sgd:
    lr: float = 0.1


def fit(
    model: Decoder = gin.REQUIRED,
    optimizer: Sgd | None = None,
    lr: float = 1e-3,
    steps: int = 10,
    mesh: str = "data=1",
    betas: tuple[float, float] = (0.9, 0.95),
    loss: Callable = softmax,
    fail: bool = False,
    out: Path = Path("runs"),
    table: dict | None = None,
):
    if fail:
        raise RunError("the run 'x' cannot go on")
    return {k: v for k, v in locals().items() if k != "fail"}


def constant(value: float):
    return value


NAMES = {
    "t_Rotary": Rotary,
    "t_Block": Block,
    "t_Decoder": Decoder,
    "t_Sgd": Sgd,
    "t_fit": fit,
    "t_softmax": softmax,
    "t_local": local,
    "constant": constant,
}
for _name, _object in NAMES.items():
    if config.registered().get(_name) is not _object:
        assert config.register(_object, name=_name) is _object

MODEL = "t_fit.model = @t_Decoder()"


def refused(*bindings: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(bindings=bindings, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def round_trip(**values):
    text = config.dumps("t_fit", values)
    config.load(bindings=[text], allow_imports=False)
    assert config.lost(text) == []
    got = config.call("t_fit")
    assert {k: got[k] for k in values} == values
    assert config.unused() == []
    assert config.dumps("t_fit", {k: got[k] for k in values}) == text
    return text


# --- registering and calling


def test_registering_leaves_plain_calls_and_pickles_alone():
    config.load(bindings=["t_Rotary.theta = 5.0"])
    assert Rotary() == Rotary(1e4)
    assert pickle.loads(pickle.dumps(Rotary(3.0))) == Rotary(3.0)


def test_a_name_belongs_to_one_object():
    with pytest.raises(ConfigError, match="two objects are registered as 't_Rotary'"):
        config.register(Block, name="t_Rotary")


def test_a_cell_run_twice_replaces_its_object():
    def cell():
        @config.register(name="t_cell")
        def again(x: int = 1):
            return x

        return again

    cell()
    second = cell()
    assert config.registered()["t_cell"] is second
    config.load(bindings=["t_cell.x = 3"])
    assert config.call("t_cell") == 3


def test_a_name_of_gins_own_can_be_ours():
    config.load(bindings=["constant.value = 2.0", MODEL, "t_fit.lr = @constant()"])
    assert config.call("t_fit")["lr"] == 2.0


def test_files_then_bindings_then_arguments_win(tmp_path):
    (tmp_path / "base.gin").write_text(f"{MODEL}\nt_fit.lr = 1.0\nt_fit.steps = 1\nt_fit.mesh = 'a'\n")
    (tmp_path / "top.gin").write_text("include 'base.gin'\nt_fit.steps = 2\nt_fit.mesh = 'b'\n")
    config.load([tmp_path / "top.gin"], ["t_fit.mesh = 'c'"])
    got = config.call("t_fit", lr=4.0)
    assert (got["lr"], got["steps"], got["mesh"]) == (4.0, 2, "c")


def test_a_snapshot_restores_the_config(tmp_path):
    block = "t_fit:\n  model = @big/t_Decoder()\n  steps = %width\n  loss = @t_local\n"
    (tmp_path / "a.gin").write_text(f"width = 3\n{block}big/t_Decoder.depth = %width\n")
    snapshot = config.load([tmp_path / "a.gin"])
    first = config.call("t_fit")
    assert config.load(bindings=[snapshot]) == snapshot
    assert config.call("t_fit") == first
    assert first["model"].depth == first["steps"] == 3 and first["loss"] is local


def test_a_reference_is_the_function_itself_or_compares_by_value():
    config.load(bindings=[MODEL, "t_fit.loss = @w/t_local", "w/t_local.window = 8"])
    one, two = config.call("t_fit")["loss"], config.call("t_fit")["loss"]
    assert one == two == functools.partial(local, window=8) and hash(one) == hash(two)
    assert one != functools.partial(local, window=9)
    assert pickle.loads(pickle.dumps(one)) == one


def test_gins_own_wrapper_is_taken_off():
    assert config.unwrap(gin.get_configurable(softmax)) is softmax
    assert config.unwrap(gin.get_configurable(Rotary)) is Rotary
    assert config.unwrap(softmax) is softmax and config.unwrap(3) == 3
    config.load(bindings=["t_softmax.scale = 2.0"])
    wrapped = gin.get_configurable(softmax)
    assert config.unwrap(wrapped) is wrapped
    assert config.dumps("t_fit", {"loss": wrapped}) == "t_fit.loss = @loss/t_softmax\nloss/t_softmax.scale = 2.0\n"


def test_gins_singletons_are_made_once():
    lines = ["t_fit.optimizer = @one/singleton()", "one/singleton.constructor = @t_Sgd", "t_Sgd.lr = 0.5", MODEL]
    config.load(bindings=lines)
    first = config.call("t_fit")["optimizer"]
    assert first == Sgd(0.5) and config.call("t_fit")["optimizer"] is first


def test_what_a_call_raises_arrives_unchanged():
    config.load(bindings=[MODEL, "t_fit.fail = True"])
    with pytest.raises(RunError) as caught:
        config.call("t_fit")
    assert type(caught.value) is RunError and str(caught.value) == "the run 'x' cannot go on"


@pytest.mark.parametrize("binding", ["t_fit.steps = 1", "t_fit.model = %gin.REQUIRED"])
def test_a_required_argument_is_asked_for(binding):
    config.load(bindings=[binding])
    with pytest.raises(ConfigError, match="'t_fit' needs 'model', which nothing binds"):
        config.call("t_fit")
    assert config.call("t_fit", model=Decoder())["model"] == Decoder()


def test_calling_an_unknown_name_suggests_one():
    with pytest.raises(ConfigError, match="did you mean 't_fit'"):
        config.call("t_fitt")


def test_a_config_that_never_ends_is_refused():
    config.load(bindings=[MODEL, "t_Decoder.positions = @t_Decoder()"])
    with pytest.raises(ConfigError, match="the config of 't_fit' refers to itself without end"):
        config.call("t_fit")


def test_bindings_that_nothing_reads_are_listed():
    lines = [MODEL, "t_Rotary.theta = 2.0", "big/t_Decoder.depth = 3", "t_fit.lr = 1.0", "t_fit.steps = 1", "w = 4"]
    config.load(bindings=lines)
    config.call("t_fit", lr=2.0)
    assert config.unused() == ["big/t_Decoder.depth", "t_Rotary.theta", "t_fit.lr", "w"]


# --- refused bindings, in one sentence each


@pytest.mark.parametrize(
    "line, message",
    [
        ("t_fitt.lr = 1", "nothing is registered as 't_fitt'; did you mean 't_fit'"),
        ("t_fit.lrr = 1", "'t_fit' has no parameter 'lrr'; did you mean 'lr'"),
        ("t_fit.model = @t_Decodr()", "nothing is registered as '@t_Decodr'; did you mean 't_Decoder'"),
        ("t_fit.lr = %rate", "the macro '%rate' is not defined"),
        ("t_fit.lr = 'fast'", "t_fit.lr must be float, not 'fast'"),
        ("t_fit.steps = 1.5", "t_fit.steps must be int, not 1.5"),
        ("t_fit.steps = True", "t_fit.steps must be int, not True"),
        ("t_fit.fail = 'true'", "t_fit.fail must be bool, not 'true'; write True"),
        ("t_fit.betas = (1, 2, 3)", "t_fit.betas must be tuple[float, float], not (1, 2, 3)"),
        ("t_fit.betas = [1, 2]", "not [1, 2]; write it with round brackets"),
        ("t_fit.loss = 'softmax'", "t_fit.loss must be Callable, not 'softmax'"),
        ("t_fit.loss = @t_Rotary()", "t_fit.loss must be Callable, not @t_Rotary()"),
        ("t_fit.model = @t_Decoder", "t_fit.model must be Decoder, not @t_Decoder; write @t_Decoder() for an instance"),
        ("t_fit.model = @s/t_Rotary()", "t_fit.model must be Decoder, not @s/t_Rotary()"),
        ("t_fit.lr = @t_Sgd()", "t_fit.lr must be float"),
        ("t_Decoder.kind = 'pree'", "must be Literal['pre', 'post'], not 'pree'; did you mean 'pre'"),
        ("t_Decoder.blocks = (3,)", "t_Decoder.blocks must be tuple["),
        ("t_fit.model = 't_Decoder'", "t_fit.model must be Decoder, not 't_Decoder'; write @t_Decoder()"),
        ("t_fit.loss = 't_softmax'", "t_fit.loss must be Callable, not 't_softmax'; write @t_softmax"),
        ("t_fit.model = t_Decoder", "'t_Decoder' is not a value; write @t_Decoder() for"),
        ("t_fit.model = t_Decoder()  # it", "'t_Decoder' is not a value; write @t_Decoder() for"),
        ("t_fit.lr = ", "nable to parse value"),
        ("t_fit.lr = (1, ", "binding 't_fit.lr = (1,': "),
        ("t_fit.mesh = 'a", "binding 't_fit.mesh = 'a': "),
        ("t_fit lr 3", "binding 't_fit lr 3': "),
        ("t_fit.table = {[1]: 2}", "unhashable"),
        ("import no_such_module", "cannot import 'no_such_module'"),
        ("from __gin__ import dynamic_registration", "is refused; register objects in Python instead"),
    ],
)
def test_a_bad_line_is_one_sentence(line, message):
    assert message in refused(line)


@pytest.mark.parametrize(
    "line",
    [
        "t_fit.lr = 1",
        "t_fit.betas = (1, 0.5)",
        "t_fit.loss = @t_softmax",
        "t_fit.loss = @t_local()",
        "t_fit.optimizer = None",
        "t_fit.table = {'a': %gin.REQUIRED}",
        "t_fit.optimizer = @t_Sgd()",
        "t_fit.out = 'elsewhere'",
        "t_Decoder.positions = @t_Rotary()",
        "t_Decoder.positions = 3",
        "t_Decoder.extra = 3",
        "t_Decoder.blocks = (@t_Block(), @t_Block())",
        "t_fit.lr = -1e-3",
    ],
)
def test_a_fitting_value_is_accepted(line):
    config.load(bindings=[line])


def test_none_is_advised_only_where_it_is_a_value():
    assert refused("t_fit.steps = 'none'").endswith("t_fit.steps must be int, not 'none'")
    assert refused("t_fit.optimizer = 'none'").endswith("; write None")


def test_a_macro_is_checked_against_what_reads_it():
    assert "t_fit.steps must be int, not %rate" in refused("rate = 0.5", "t_fit.steps = %rate")
    assert refused("a = %b", "b = %a", "t_fit.lr = %a") == "a macro of the config refers to itself without end"


def test_an_error_names_file_and_line(tmp_path):
    path = tmp_path / "a.gin"
    wrong = (("t_fit.lrr = 1", "no parameter"), ("t_fit.lr = )", "parse"), ("t_fit.lr = 'x'", "must be float"))
    for line, message in wrong:
        path.write_text(f"# a comment\n\n{line}\n")
        with pytest.raises(ConfigError) as caught:
            config.load([path])
        assert str(caught.value).startswith(f"{path}:3: ") and message in str(caught.value)


def test_a_missing_file_suggests_its_neighbours(tmp_path):
    (tmp_path / "demo.gin").write_text("")
    with pytest.raises(ConfigError, match="there is no config file .*dmo.gin'; did you mean .*demo.gin"):
        config.load([tmp_path / "dmo.gin"])
    with pytest.raises(ConfigError, match="there is no config file"):
        config.load([tmp_path])
    with pytest.raises(ConfigError, match="the name of a setting's value: .* a line such as train.model = @t_Decoder"):
        config.load([Path("t_Decoder")])


def test_a_file_may_not_include_itself(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("include 'a.gin'\n")
    with pytest.raises(ConfigError, match="includes itself"):
        config.load([tmp_path / "a.gin"])


def test_imports_and_includes_can_be_refused(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("import this_would_run\n")
    with pytest.raises(ConfigError, match=r"a.gin:1: include 'b.gin' is refused, .* copy the lines of that file"):
        config.load([tmp_path / "a.gin"], allow_imports=False)
    with pytest.raises(ConfigError, match=r"b.gin:1: 'import this_would_run' is refused"):
        config.load([tmp_path / "b.gin"], allow_imports=False)
    assert "import colorsys" in config.load(bindings=["import colorsys"])


def test_a_refused_config_leaves_none_behind():
    refused("t_fit.steps = 3", "t_fit.lrr = 1")
    assert config.unused() == [] and gin.config_str() == ""


# --- the command line


def test_overrides_are_split_from_the_rest():
    argv = ["demo.gin", "--gin.t_fit.lr=3e-4", "--devices", "8", "--gin.t_fit.steps", "5", "--", "--gin.x=1"]
    assert config.split_overrides(argv) == (
        ["t_fit.lr = 3e-4", "t_fit.steps = 5"],
        ["demo.gin", "--devices", "8", "--", "--gin.x=1"],
    )


@pytest.mark.parametrize(
    "value, binding",
    [
        ("data=2,tensor=4", "'data=2,tensor=4'"),
        ("data", "'data'"),
        ("'data'", "'data'"),
        ("-1", "-1"),
        ("None", "None"),
        ("@t_Sgd()", "@t_Sgd()"),
        ("%width", "%width"),
        ("(1, 2)", "(1, 2)"),
        ("v5p:8x8x8", "'v5p:8x8x8'"),
        ("runs/demo.bin", "'runs/demo.bin'"),
        ("it's", '"it\'s"'),
        ("", "''"),
        ("3 4", "'3 4'"),
    ],
)
def test_a_bare_word_becomes_a_string(value, binding):
    assert config.split_overrides([f"--gin.t_fit.mesh={value}"]) == ([f"t_fit.mesh = {binding}"], [])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--gin.t_fit.betas=(1, 2"], "the value of --gin.t_fit.betas=(1, 2 cannot be parsed"),
        (["--gin.t_fit.lr"], "--gin.t_fit.lr needs a value"),
        (["--gin.t_fit.lr", "--devices"], "--gin.t_fit.lr needs a value"),
        (["--gin.t fit=1"], "the name of --gin.t fit=1 cannot be parsed"),
        (
            ["--gin.t_fit.betas=@int4(group=32)"],
            "the value of --gin.t_fit.betas=@int4(group=32) cannot be parsed; set arguments apart: @int4() and "
            "--gin.int4.group=...",
        ),
        (["--gin.=1"], "the name of --gin.=1 cannot be parsed"),
    ],
)
def test_a_malformed_override_is_refused(argv, message):
    with pytest.raises(ConfigError) as caught:
        config.split_overrides(argv)
    assert str(caught.value).startswith(message)


# --- writing


def test_nested_dataclasses_come_back_equal():
    blocks = (Block(4, local), Block(8), Block(2, functools.partial(local, window=16)))
    text = round_trip(model=Decoder(depth=4, positions=Rotary(1e-7), blocks=blocks), optimizer=Sgd(0.5), lr=0.1 + 0.2)
    assert "t_fit.model = @model/t_Decoder()\n" in text
    assert "model/t_Decoder.positions = @model_positions/t_Rotary()\n" in text
    assert "model_positions/t_Rotary.theta = 1e-07\n" in text
    assert "t_fit.lr = 0.30000000000000004\n" in text


def test_literals_come_back_equal():
    table = {"a": [1, (2,), ()], 3: {"b": None}, "c'\n": b"x", "d": (Rotary(1.0), {"e": Rotary(2.0)})}
    round_trip(model=Decoder(), lr=-math.inf, betas=(1e-300, 1e22), mesh="data=2,tensor=4 # \\ é", table=table)


def test_a_scope_that_nothing_binds_is_refused():
    with pytest.raises(ConfigError, match="scope 'bg', so @bg/t_Decoder.. would be @t_Decoder..; did you mean 'big'"):
        config.load(bindings=["t_fit.model = @bg/t_Decoder()", "big/t_Decoder.depth = 3"])
    axes = "t_fit.table = {'big/t_Decoder.depth, t_fit.lr': [(1, 2.0)]}"  # an axis of a sweep binds it
    config.load(bindings=["t_fit.model = @big/t_Decoder()", axes])
    config.load(bindings=["t_Decoder.blocks = (@a/t_Block(), @t_Block())", "a/t_Block.heads = 1"])
    config.load(bindings=["t_fit.model = @big/t_Decoder()", "big/deep/t_Rotary.theta = 3.0"])


def test_a_scope_that_an_outer_one_stands_for_and_the_name_of_a_macro():
    with pytest.raises(ConfigError, match="scope 'big/deep', so @big/deep/t_Decoder.. would be @big/t_Decoder..;"):
        config.load(bindings=["t_fit.model = @big/deep/t_Decoder()", "big/t_Decoder.depth = 3"])
    with pytest.raises(ConfigError, match="no binding has the scope 'big'"):
        config.load(bindings=["t_fit.model = @big/t_Decoder()", "big = 3", "t_Decoder.depth = %big"])


def test_text_without_values_from_python_loads_if_it_may_be_partial():
    text = config.dumps("t_fit", {"loss": functools.partial(softmax, scale=object())})
    assert "@loss/t_softmax" in text and config.lost(text) == ["t_fit.loss.scale"]
    config.load(bindings=[text], partial=True)
    with pytest.raises(ConfigError, match="scope 'loss'"):
        config.load(bindings=[text])


def test_scopes_never_meet():
    table = {"a_b": 1, "x": Block(1), "y": (Block(2),), "z": Decoder(blocks=(Block(4),))}
    text = round_trip(table=table, model=Decoder(positions=Rotary(7.0), blocks=(Block(3), Block(5))))
    scopes = [line.split("/")[0] for line in text.splitlines() if "heads" in line]
    assert len(scopes) == len(set(scopes)) == 5


def test_paths_and_dtypes_become_strings():
    numpy = pytest.importorskip("numpy")
    jnp = pytest.importorskip("jax.numpy")
    assert config.dumps("t_fit", {"mesh": jnp.bfloat16}) == config.dumps("t_fit", {"mesh": numpy.dtype(jnp.bfloat16)})
    assert config.dumps("t_fit", {"mesh": jnp.bfloat16}) == "t_fit.mesh = 'bfloat16'\n"
    text = config.dumps("t_fit", {"out": Path("a/b"), "mesh": numpy.float32, "lr": numpy.float64(0.1)})
    assert text == "t_fit.lr = 0.1\nt_fit.mesh = 'float32'\nt_fit.out = 'a/b'\n"


def test_a_value_that_gin_cannot_express_is_a_comment_and_listed():
    model = Decoder(depth=3, blocks=(Block(1), Block(2, attention=lambda x: x)))
    text = config.dumps("t_fit", {"model": model, "lr": math.nan, "loss": print, "table": {"a": (Block(5), object())}})
    assert config.lost(text) == ["t_fit.loss", "t_fit.lr", "t_fit.table", "t_fit.model.blocks.1.attention"]
    assert "heads = 5" not in text
    config.load(bindings=[text])
    assert config.call("t_fit")["model"].blocks == (Block(1), Block(2))
    assert config.unused() == []
