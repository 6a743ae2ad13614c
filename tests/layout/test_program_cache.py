"""A program whose collectives lose their order in JAX's cache is compiled again; others come from the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.layout import Layout
from jaxscale.layout.program_cache import compile_reordered_anew, loses_order
from tests.truth.programs import drop_programs, memory_maps


def looped(x):
    y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c - 0.1 * c.sum(0)), None), x, None, length=3)
    return y.sum(0)


def plain(x):
    return jnp.sin(x) - x.sum(0)


@pytest.mark.parametrize("function, mesh, cached", [(looped, "data=2", 0), (plain, "data=2", 1), (looped, "data=1", 1)])
def test_only_programs_that_keep_the_order_of_their_collectives_are_cached(function, mesh, cached, tmp_path):
    layout = Layout(mesh)
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: jax.config.values[name] for name in names}
    where = layout.sharding(("batch", None), kind="activations")
    argument = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=where)
    try:
        for name, value in zip(names, (True, str(tmp_path)), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compiled = jax.jit(function).lower(argument).compile()
        assert loses_order(compiled.as_text()) is not bool(cached)
        assert len(list(tmp_path.glob("*-cache"))) == cached
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize("in_loop, lost", [(True, True), (False, False)])
def test_a_program_of_an_older_cache_is_read_only_when_it_is_sound(in_loop, lost, monkeypatch):
    from jax._src import compilation_cache as cache

    inside = "all-to-all" if in_loop else "negate"
    text = f"%body (p: f32[2]) -> f32[2] {{\n  ROOT %r = f32[2] {inside}(%p)\n}}\n"
    text += "ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %r = f32[2] all-reduce-start(%p)\n}\n"

    class Executable:
        def hlo_modules(self):
            return [type("Module", (), {"to_string": lambda _: text})()]

        def local_devices(self):
            return jax.devices()[:2]

    one = Executable()
    monkeypatch.setattr(cache, "get_executable_and_time", lambda *_: (one, 3))
    monkeypatch.setattr(cache, "put_executable_and_time", cache.put_executable_and_time)
    assert compile_reordered_anew.__wrapped__()
    assert cache.get_executable_and_time("key", None, None, None) == ((None, None) if lost else (one, 3))


@pytest.mark.long
@pytest.mark.skipif(not memory_maps(), reason="needs /proc/self/maps")
def test_dropped_programs_give_their_memory_maps_back():
    """If they did not, a worker would crash in the midst of a cold run."""
    drop_programs(0)
    before = memory_maps()
    functions = [jax.jit(lambda x, n=n: (x * n).sum()) for n in range(30)]
    for f in functions:
        f(1.0)
    drop_programs(2**20)
    with_them = memory_maps()
    assert with_them > before + 60
    drop_programs(with_them // 2)
    assert memory_maps() < before + 30
