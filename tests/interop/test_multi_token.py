"""Modules of multi-token prediction, imported and exported: they compute what those of `transformers` do, and draft."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
from jaxscale.infer.engine import Request
from jaxscale.infer.sampling import Sampling
from jaxscale.infer.serve import engine_of
from jaxscale.interop import open_pretrained
from jaxscale.interop.safetensors import SafeTensors
from jaxscale.interop.write import plain_tensors, write_tensors
from jaxscale.step.state import describe_model
from jaxscale.testing import random_params
from tests.truth import foreign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, foreign.VOCAB, (1, 24))
LENGTH = 32
MODULES = {"deepseek_v3": 2, "glm4_moe": 2, "qwen3_next": 1}


def _write(name, modules, folder):
    """A folder of the family's small model with random values and modules; its config, and our arrays by path."""
    plain = open_pretrained(foreign.save(name, folder / "theirs"))
    assert plain.config.multi_token == 0  # their config.json may say 1, and their files have none
    config = dataclasses.replace(plain.config, multi_token=modules)
    infos = jax.tree.leaves(describe_model(config)[1])
    params = jax.tree.leaves(random_params(describe_model(config)[1]))
    arrays = {i.path: np.asarray(x) for i, x in zip(infos, params, strict=True)}
    out = folder / "ours"
    out.mkdir()
    read = lambda name, region: arrays[name][tuple(slice(*s) for s in region)]  # noqa: E731
    write_tensors(plain_tensors(plain.family.bind(config), read), out, 10**9)
    (out / "config.json").write_text(json.dumps(plain.family.json(config, plain.length)))
    return out, config, arrays


def _their_modules(name, out, main, count):
    """The modules of `transformers`, with the tensors of a folder."""
    make = transformers.modeling_layers.MtpModel
    if name != "qwen3_next":
        # the numbers of these layers are written down there for the published sizes alone
        depth = main.config.num_hidden_layers
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth + k}\..*" for k in range(count)]
        return make.from_pretrained(main).eval()
    main.config.num_mtp_layers, main.config.mtp_layer_types = count, ["full_attention"]
    theirs = make(main, count).eval()  # it does not read these names
    names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm", "fc": "eh_proj"}
    values = {}
    files = SafeTensors(out)
    for key in files:
        if key.startswith("mtp."):
            own, rest = key.removeprefix("mtp."), key.removeprefix("mtp.layers.0.")
            first = own.partition(".")[0]
            to = f"layers.0.mtp_block.{rest}" if first == "layers" else f"layers.0.{names[first]}.weight"
            with files.reading(key) as tensor:
                values[to] = torch.tensor(np.array(tensor))
    experts = "layers.0.mtp_block.mlp.experts."
    by_expert = lambda part: [values.pop(f"{experts}{x}.{part}.weight") for x in range(main.config.num_experts)]  # noqa: E731
    gate, up = torch.stack(by_expert("gate_proj")), torch.stack(by_expert("up_proj"))
    values[f"{experts}gate_up_proj"] = torch.cat([gate, up], dim=1)
    values[f"{experts}down_proj"] = torch.stack(by_expert("down_proj"))
    missing, extra = theirs.load_state_dict(values, strict=False)
    assert not extra and all("embed_tokens" in m or "shared_head" in m for m in missing), (missing, extra)
    return theirs


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_transformers_reads_exported_modules_and_has_the_same_logits(name, tmp_path):
    out, config, arrays = _write(name, MODULES[name], tmp_path)
    graphdef, infos = describe_model(config)
    params = jax.tree.map(lambda i: arrays[i.path], infos)
    again = open_pretrained(out)
    assert again.config == config
    for path, x in arrays.items():
        whole = tuple((0, n) for n in x.shape)
        np.testing.assert_array_equal(again.arrays.read(f"params/{path}", [whole])[whole], x)

    def ours(p, tokens):
        model = nnx.merge(graphdef, p)
        further = [tokens[:, 1 + k : tokens.shape[1] - model.ahead + 1 + k] for k in range(model.ahead)]
        states, _ = model.hidden_ahead(model.hidden(tokens[:, : -model.ahead]), further)
        return [h @ p["head"]["weight"].T for h in states]

    main = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    theirs = _their_modules(name, out, main, config.multi_token)
    tokens = torch.tensor(TOKENS)
    n = tokens.shape[1] - config.multi_token
    with torch.no_grad():
        hidden = main.model(tokens[:, :n]).last_hidden_state
        for k, got in enumerate(jax.jit(ours)(params, TOKENS)):
            ids, place = tokens[:, 1 + k : 1 + k + n], torch.arange(1 + k, 1 + k + n)[None]
            hidden = theirs.forward_layer(k, hidden, place, None, input_ids=ids)
            np.testing.assert_allclose(got, theirs.shared_head(hidden).numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_an_import_has_the_modules_and_an_export_their_tensors(name, tmp_path):
    out, config, _ = _write(name, 1, tmp_path)
    messages = []
    run = import_checkpoint(out, tmp_path / "run", say=messages.append)
    assert run.config.model.multi_token == 1 and not messages
    written, source = SafeTensors(export_checkpoint(run, tmp_path / "again")), SafeTensors(out)
    assert set(written) == set(source) and "mtp.layers.0.self_attn.q_proj.weight" in set(written)
    for key in source:
        with written.reading(key) as ours, source.reading(key) as theirs:
            np.testing.assert_array_equal(ours, theirs)

    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 2}))
    assert open_pretrained(out, say=messages.append).config.multi_token == 0
    assert "leaving out" in messages[0] and "mtp." in messages[0] and "multi-token prediction" in messages[0]


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_imported_modules_draft_and_change_no_greedy_text(name, tmp_path):
    out, *_ = _write(name, MODULES[name], tmp_path)
    run = import_checkpoint(out, tmp_path / "run", say=lambda _: None)
    graphdef, _ = describe_model(run.config.model)
    likeliest = jax.jit(lambda p, ids: jnp.argmax(nnx.merge(graphdef, p)(ids), axis=-1))
    params, prompts, new = run.params(), [TOKENS[0, :9].tolist(), [7]], 16
    texts = []
    for prompt in prompts:
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + new):
            row[0, at] = likeliest(params, row)[0, at - 1]
        texts.append(row[0, len(prompt) : len(prompt) + new].tolist())

    engine = engine_of(run, types.SimpleNamespace(length=LENGTH), rows=2, draft="mtp", draft_tokens=2)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(tuple(prompt), Sampling(max_tokens=new, temperature=0, ignore_end=True), i))
    drafted = [[] for _ in prompts]
    while engine.busy:
        for event in engine.step():
            drafted[event.id].append(event.token)
    assert drafted == texts and engine.stats.proposed > 0
