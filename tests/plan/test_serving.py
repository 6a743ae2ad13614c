"""Plans of serving: bytes are those of the arrays on each device, times those of the data sheet."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from flax import nnx

from jaxscale.cli import main
from jaxscale.hardware import chip
from jaxscale.infer.cache import Contiguous, Paged, generating, init_cache
from jaxscale.layout import Layout, shardings_of
from jaxscale.models import TransformerConfig
from jaxscale.nn.formats import Stored
from jaxscale.plan import serving
from jaxscale.step import TrainConfig
from jaxscale.step.state import describe_model

MODEL = TransformerConfig(depth=2, vocab=64, width=32, heads=4, kv_heads=2, hidden=64)
INT4 = Stored("int4", group=16)


@pytest.mark.parametrize(
    "cache", [Contiguous(), Paged(page=4, numbers="int8"), Paged(page=2, ring=2)], ids=["float", "int8", "ring"]
)
def test_planned_bytes_are_those_of_a_devices_arrays(cache):
    layout = Layout("data=2,tensor=2")
    model = dataclasses.replace(MODEL, windows=(2, None))
    planned = serving(TrainConfig(model=model, layout=layout), "v5e:2x2", cache, weights=INT4, rows=3, length=16)
    graphdef, infos = describe_model(model)
    stored = INT4.infos(infos)
    with generating(layout):
        states = init_cache(nnx.merge(graphdef, infos), cache, 2, 3, 16)
        weights = jax.tree.map(
            lambda i, s: jax.device_put(jax.numpy.zeros(i.shape, i.dtype), s), stored, shardings_of(stored, layout)
        )
    on_first = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    assert (planned.parameters, planned.cache) == (on_first(weights), on_first(states))
    assert planned.sequences == 6 and planned.parameters < planned.plain / 2


def test_times_are_bounds_of_the_data_sheet_and_rows_fill_the_memory():
    config = TrainConfig(model=MODEL, layout=None, seq_len=32)
    one = serving(config, "v5e:1x1", Contiguous(), rows=4)
    v5e, width = chip("v5e"), MODEL.width
    kernels = 2 * (width * (32 + 2 * 16) + 32 * width + 3 * width * 64)  # of two layers
    read = 4 * (kernels + 64 * width + 5 * width) + 4 * 32 * 2 * 2 * 16 * 4  # head and norms; keys and values
    assert one.read == read and one.step == read / v5e.bandwidth and one.tokens_per_second == 4 / one.step
    full = serving(config, "v5e:1x1", Contiguous(), rows=one.most_rows)
    over = serving(config, "v5e:1x1", Contiguous(), rows=one.most_rows + 1)
    assert full.fits and not over.fits and over.to_json()["fits"] is False
    tied = dataclasses.replace(config, model=dataclasses.replace(MODEL, tied=True))
    assert serving(tied, "v5e:1x1", Contiguous(), rows=4).read == read


def test_the_command_prints_the_table_and_refuses_options_of_training(tmp_path, capsys):
    file = tmp_path / "a.gin"
    file.write_text("train.model = @Transformer()\nTransformer.depth = 2\ntrain.layout = @Layout()\n")
    where = ["plan", str(file), "--topology", "v5e:1x1", "--mesh", "data=1"]
    assert main([*where, "--serve", "--weights", "int8", "--kv-cache", "int8"]) == 0
    out = capsys.readouterr().out
    assert "parameters, int8, one scale for all inputs of an output" in out and "fits" in out
    for options, message in (
        (["--weights", "int8"], "--weights is for plans of serving; add --serve"),
        (["--serve", "--tokens", "1T"], "--serve plans generation; leave out --tokens"),
        (["--serve", "--rows", "0"], "rows = 0: must be at least 1"),
        (["--serve", "--kv-cache", "int3"], "PagedCache.numbers = 'int3'"),
    ):
        assert main([*where, *options]) == 2
        assert message in capsys.readouterr().err
