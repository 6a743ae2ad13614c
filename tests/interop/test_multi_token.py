"""Modules of multi-token prediction, exported: transformers' `MtpModel` reads them and computes what ours do."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.interop import open_pretrained
from jaxscale.interop.write import plain_tensors, write_tensors
from jaxscale.step.state import describe_model
from jaxscale.testing import random_params
from tests.truth import foreign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, foreign.VOCAB, (1, 24))


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_exported_modules_and_has_the_same_logits(name, tmp_path):
    plain = open_pretrained(foreign.save(name, tmp_path / "theirs"))
    assert plain.config.multi_token == 0  # their config.json says 1, and their files have none
    config = dataclasses.replace(plain.config, multi_token=2)
    graphdef, infos = describe_model(config)
    params = random_params(infos)
    arrays = {i.path: np.asarray(x) for i, x in zip(jax.tree.leaves(infos), jax.tree.leaves(params), strict=True)}
    out = tmp_path / "ours"
    out.mkdir()
    read = lambda name, region: arrays[name][tuple(slice(*s) for s in region)]  # noqa: E731
    write_tensors(plain_tensors(plain.family.bind(config), read), out, 10**9)
    (out / "config.json").write_text(json.dumps(plain.family.json(config, plain.length)))
    again = open_pretrained(out)
    assert again.config == config
    for path, x in arrays.items():
        whole = tuple((0, n) for n in x.shape)
        np.testing.assert_array_equal(again.arrays.read(f"params/{path}", [whole])[whole], x)

    def ours(p, tokens):
        model = nnx.merge(graphdef, p)
        states, _ = model.hidden_ahead(model.hidden(tokens[:, :-2]), [tokens[:, 1:-1], tokens[:, 2:]])
        return [h @ p["head"]["weight"].T for h in states]

    main = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    # the numbers of these layers are written down there for the published sizes alone
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.depth + k}\..*" for k in range(2)]
    theirs = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        hidden = main.model(tokens[:, :-2]).last_hidden_state
        for k, got in enumerate(jax.jit(ours)(params, TOKENS)):
            ids = tokens[:, 1 + k : -1 + k or None]
            place = torch.arange(1 + k, 1 + k + ids.shape[1])[None]
            hidden = theirs.forward_layer(k, hidden, place, None, input_ids=ids)
            np.testing.assert_allclose(got, theirs.shared_head(hidden).numpy(), atol=1e-4, rtol=1e-4)
