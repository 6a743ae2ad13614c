"""Withdrawn kernels: dispatch skips the case of an entry of `withdrawn.json`, and no other case."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, withdrawn
from pallas_kernels.dispatch import Implementation, KernelError

FOUND = {"commit": "0123456789ab", "jax": "0.11.2", "date": "2026-11-30"}
ENTRY = {
    "op": "toy", "implementation": "mosaic_gpu", "device": "NVIDIA H",
    "case": {"direction": "backward", "settings.deterministic": False, "shape": [2, 3]},
    "why": "dq is off by 0.3", "found": FOUND,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Settings:
    deterministic: bool


CASE = {"direction": "backward", "settings": _Settings(False), "shape": (2, 3), "dtype": "bfloat16"}
_anything = lambda target, **case: None  # noqa: E731
WAYS = (
    Implementation("mosaic_gpu", ("cuda",), _anything, lambda target, x, **case: x * 5),
    Implementation("xla", (), _anything, lambda target, x, **case: x * 2),
)


@pytest.fixture(autouse=True)
def one_entry(tmp_path, monkeypatch):
    monkeypatch.setattr(withdrawn, "FILE", tmp_path / "withdrawn.json")
    withdrawn.FILE.write_text(json.dumps([ENTRY]))
    dispatch.forget()


def _chosen(case, kind="NVIDIA H200", op="toy", named=None):
    """Return the choice for a device that need not exist."""
    with dispatch.on_device(kind), dispatch.choosing() as choices:
        x = jax.ShapeDtypeStruct((4,), jnp.float32)
        jax.eval_shape(lambda x: dispatch.dispatch(op, WAYS, (x,), case, named), x)
    (choice,) = choices.values()
    return choice


def test_a_withdrawn_kernel_is_not_chosen_and_the_record_has_the_sentence():
    choice = _chosen(CASE)
    assert choice.implementation == "xla"
    assert "not mosaic_gpu: it is withdrawn on NVIDIA H200: dq is off by 0.3 (found 2026-11-30 at 0123" in str(choice)


@pytest.mark.parametrize(
    "other", [{"direction": "forward"}, {"settings": _Settings(True)}, {"shape": (2, 4)}], ids=lambda o: next(iter(o))
)
def test_other_cases_stay(other):
    assert _chosen(CASE | other).implementation == "mosaic_gpu"


def test_arguments_that_an_entry_does_not_name_do_not_matter():
    assert _chosen(CASE | {"dtype": "float16"}).implementation == "xla"


def test_other_devices_and_ops_stay():
    assert _chosen(CASE, kind="NVIDIA GH200 480GB").implementation == "mosaic_gpu"
    assert _chosen(CASE, kind="NVIDIA H100 80GB HBM3").implementation == "xla"
    assert _chosen(CASE, op="another").implementation == "mosaic_gpu"


def test_a_named_one_raises_the_sentence():
    with pytest.raises(KernelError, match="'mosaic_gpu' is not supported here: it is withdrawn.*dq is off by 0.3"):
        _chosen(CASE, named="mosaic_gpu")


def test_withdrawn_ones_run_where_they_are_allowed_and_nowhere_after():
    run = jax.jit(lambda x: dispatch.dispatch("toy", WAYS, (x,), CASE, "mosaic_gpu"))
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with dispatch.on_device("NVIDIA H200"):
        with withdrawn.allowed():
            jax.eval_shape(run, x)
        with pytest.raises(KernelError, match="withdrawn"):  # the trace from within is not used again
            jax.eval_shape(run, x)
    assert _chosen(CASE).implementation == "xla"


def test_interpreted_ones_run():
    if dispatch.JAX_VERSION < (0, 11):
        pytest.skip("no interpreter of GPU kernels")
    with dispatch.interpreted():
        got = dispatch.dispatch("toy", WAYS, (jnp.ones(4),), CASE, "mosaic_gpu")
    np.testing.assert_array_equal(got, 5.0)


def test_the_last_implementation_cannot_be_withdrawn():
    withdrawn.write([ENTRY | {"implementation": "xla", "case": {}}])
    assert _chosen(CASE).implementation == "xla"


@pytest.mark.parametrize(
    "case, message",
    [
        ({"directoin": "backward"}, "cases of toy have no 'directoin'.*did you mean 'direction'"),
        ({"settings.exact": True}, "_Settings has no 'exact'"),
    ],
)
def test_an_entry_that_could_never_match_is_an_error(case, message):
    withdrawn.FILE.write_text(json.dumps([ENTRY | {"case": case}]))
    with pytest.raises(KernelError, match=message):
        _chosen(CASE)


def test_an_entry_with_other_fields_is_an_error():
    withdrawn.FILE.write_text(json.dumps([{"op": "toy"}]))
    with pytest.raises(KernelError, match="an entry has the fields"):
        _chosen(CASE)


def test_writing_adds_new_entries():
    other = ENTRY | {"case": {"dtype": "float16"}}
    assert withdrawn.write([ENTRY | {"why": "again"}, other]) == [other]
    assert list(withdrawn.entries()) == json.loads(withdrawn.FILE.read_text()) == [ENTRY, other]
    assert withdrawn.write([other]) == []


def test_the_wheel_has_the_file():
    root = Path(withdrawn.__file__).parents[1]
    # everything in the package that git does not ignore goes into a wheel, as it does with tiles.json
    ignored = subprocess.run(["git", "check-ignore", "-q", "pallas_kernels/withdrawn.json"], cwd=root)
    assert (root / "pallas_kernels" / "withdrawn.json").exists() and ignored.returncode != 0
    wheel = pytest.importorskip("hatchling.builders.wheel")
    files = {one.distribution_path for one in wheel.WheelBuilder(str(root)).recurse_included_files()}
    assert "pallas_kernels/withdrawn.json" in files
