"""Collectives of training steps compiled for four TPU chips, against formulas for what they have to send."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import pytest

from jaxscale.layout import Layout, Pipeline
from jaxscale.models import TransformerConfig
from jaxscale.plan import compile_step
from jaxscale.plan.collectives import collectives
from jaxscale.step import TrainConfig

# Numbers in two layers of attention (4 x 256 x 256) and feed-forward (3 x 256 x 512), two tables of 1024, and norms.
MATRICES, TABLES, NORMS = 2 * (4 * 256 * 256 + 3 * 256 * 512), 2 * 1024 * 256, 5 * 256
ALL = MATRICES + TABLES + NORMS
# The residual stream of 16 x 128 tokens, in bfloat16; a float32 number for each token.
STREAM, TOKENS = 16 * 128 * 256 * 2, 16 * 128 * 4
MODEL = TransformerConfig(
    depth=2, width=256, heads=4, kv_heads=4, head_dim=64, hidden=512, vocab=1024, dtype="bfloat16", memory="full"
)

# Weights are gathered in the arithmetic's two bytes, gradients summed and parameters gathered in the parameters' four.
# With memory="full" a layer runs forward, forward again and backward; the tables are used once each way.
USED = 2 * (2 * MATRICES + TABLES)
SCALARS = 1100
"""Norms of gradients, the loss and the number of tokens, with their padding."""

# (gathered, summed): bytes of the wholes, by the mesh axes they travel along
CASES = {
    # ZeRO: gradients once, parameters once after the update: as many bytes as plain data parallelism's all-reduce
    Layout("data=4", "zero2"): ({("data",): 4 * ALL}, {("data",): 4 * ALL}),
    # stage 3: parameters forward and backward, half as many bytes again in one type
    Layout("fsdp=4"): ({("fsdp",): USED}, {("fsdp",): 4 * ALL}),
    # hybrid: within fsdp as stage 3; of the gradients, their pieces across data
    Layout("data=2,fsdp=2"): (
        {("fsdp",): USED},
        {("fsdp",): 4 * (MATRICES + TABLES), ("data",): 4 * (MATRICES + TABLES) // 2, ("data", "fsdp"): 4 * NORMS},
    ),
    # hierarchical: the update's pieces across data, gradients straight into pieces over both
    Layout("data=2,fsdp=2", "hierarchical"): (
        {("fsdp",): USED, ("data",): 4 * (MATRICES + TABLES) // 2, ("data", "fsdp"): 4 * NORMS},
        {("data", "fsdp"): 4 * ALL},
    ),
    # Megatron: a layer sums its stream twice forward, once when it runs again, twice backward; the lookup and the
    # head's cotangent once each; and the loss its maxima, its sums and the target's logit
    Layout("tensor=4"): ({}, {("tensor",): (2 * 5 + 2) * STREAM + 3 * TOKENS}),
    # the same sums as reduce-scatters; gathered before every pair of products, forward, again and backward, before the
    # head, and in the lookup's backward pass; gradients of norms are summed
    Layout("tensor=4", sequence_sharded=True): (
        {("tensor",): (2 * 6 + 2) * STREAM},
        {("tensor",): (2 * 5 + 2) * STREAM + 3 * TOKENS + 4 * NORMS},
    ),
}


ELSEWHERE_TOO = [Layout("data=4", "zero2"), Layout("fsdp=4"), Layout("tensor=4", sequence_sharded=True)]
"""Layouts that are compiled with the second version of Python."""


@functools.cache
def _sent(layout):
    config = TrainConfig(model=MODEL, layout=layout, batch_size=16, seq_len=128, prompt=None, clip_norm=None)
    return collectives(compile_step(config, "v5p:2x2x1"), layout.sizes)


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if x in ELSEWHERE_TOO else pytest.mark.once, id=str(x)) for x in CASES],
)
def test_a_step_sends_what_it_must_and_nothing_else(layout):
    sent = _sent(layout)
    gathered, summed = Counter(), Counter()
    for c in sent:
        assert c.kind in ("all-gather", "reduce-scatter", "all-reduce"), c
        assert c.certain, c
        (gathered if c.kind == "all-gather" else summed)[c.axes] += c.payload * c.times
    want_gathered, want_summed = CASES[layout]
    # the last norm's scale may come with the scalars' sum
    missing = {axes: n - gathered.get(axes, 0) for axes, n in want_gathered.items()}
    assert set(gathered) == set(want_gathered) and all(0 <= n <= 4 * 256 for n in missing.values()), missing
    extra = {axes: n - want_summed.get(axes, 0) for axes, n in summed.items()}
    assert all(0 <= n <= SCALARS for n in extra.values()), extra
    assert set(want_summed) <= set(summed)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("layout", [Layout("data=4", "zero2"), Layout("fsdp=4")], ids=str)
def test_gradients_are_reduce_scattered(layout):
    scattered = sum(c.payload * c.times for c in _sent(layout) if c.kind == "reduce-scatter")
    # the compiler joins one matrix of a layer with the norms' gradients in an all-reduce
    assert scattered >= 4 * (MATRICES + TABLES - 2 * 256 * 256)


@pytest.mark.tpu_aot
def test_a_pipeline_sends_streams_to_its_neighbours_and_sums_at_its_ends():
    # GPipe's four micro-batches on four stages take 2 x (4 + 4 - 1) ticks. Each sends a stream on and a cotangent back.
    # Where a tick begins or ends a micro-batch, all stages look its rows up, get the last stage's output, and give
    # back both ends' cotangents (float32, the second with the last norm's gradient twice), and merge a pair of
    # numbers for each token from each.
    layout, model = Layout("pipeline=4", pipeline="gpipe:4"), dataclasses.replace(MODEL, depth=4)
    config = TrainConfig(model=model, layout=layout, batch_size=16, seq_len=128, prompt=None, clip_norm=None)
    sent = [c for c in collectives(compile_step(config, "v5p:2x2x1"), layout.sizes) if c.payload > SCALARS]
    ticks, stream, tokens = 14, STREAM // 4, 4 * 128
    assert {c.times for c in sent} == {ticks} and {c.axes for c in sent} == {("pipeline",)}
    payloads = Counter((c.kind, c.payload) for c in sent)
    assert payloads == {
        ("collective-permute", stream): 2,
        ("all-reduce", 2 * stream): 3,
        ("all-reduce", 2 * stream + 2 * 4 * 256): 1,
        ("all-gather", 4 * 2 * 4 * tokens): 1,
    }
    # what goes to a neighbour stands outside of any branch
    assert all(c.certain for c in sent if c.kind == "collective-permute")


@pytest.mark.tpu_aot
def test_stages_with_whole_tables_send_streams_to_their_neighbours_alone():
    layout = Layout("pipeline=4", pipeline=Pipeline("gpipe", 4, vocabulary="whole"))
    model = dataclasses.replace(MODEL, depth=4)
    config = TrainConfig(model=model, layout=layout, batch_size=16, seq_len=128, prompt=None, clip_norm=None)
    sent = [c for c in collectives(compile_step(config, "v5p:2x2x1"), layout.sizes) if c.payload > SCALARS]
    ticks, stream = 14, STREAM // 4
    assert Counter((c.kind, c.payload) for c in sent if c.times == ticks) == {("collective-permute", stream): 2}
    once = [c for c in sent if c.times == 1]  # tables are gathered, and their gradients summed
    assert len(once) == len(sent) - 2 and sum(c.payload for c in once) <= 2 * 4 * (TABLES + 256) + SCALARS


# One of two layers' matrices and norms, a stage's half of the tables, and the last norm; `tensor` halves what is wide.
OF_STAGES = {
    Layout("pipeline=2,data=2", "zero2", pipeline="gpipe:4"): ("v5p:2x2x1", 3_673_088),
    Layout("pipeline=2,data=2,tensor=2", pipeline="gpipe:4"): ("v5p:2x2x2", 1_838_080),
    Layout("pipeline=2,fsdp=2", pipeline=Pipeline("gpipe", 4, gather="step")): ("v5p:2x2x1", 3_673_088),
}


@pytest.mark.tpu_aot
@pytest.mark.parametrize("layout", [x for x in OF_STAGES if x.schedule.gather == "layer"], ids=str)
def test_replicas_of_a_pipeline_sum_their_gradients_once_a_step(layout):
    topology, want = OF_STAGES[layout]
    assert want == 4 * ((MATRICES + TABLES) // 2 // layout.sizes["tensor"] + 3 * 256)
    config = TrainConfig(model=MODEL, layout=layout, batch_size=16, seq_len=128, prompt=None, clip_norm=None)
    sent = [c for c in collectives(compile_step(config, topology), layout.sizes) if {"data", "fsdp"} & set(c.axes)]
    # not in the loop over ticks, in which a micro-batch's would be
    assert all(c.times == 1 and c.certain for c in sent), sent
    assert 0 <= sum(c.payload for c in sent if c.kind != "all-gather") - want <= SCALARS
    scattered = sum(c.payload for c in sent if c.kind == "reduce-scatter")
    if layout.sizes["tensor"] > 1:
        assert scattered == 0
        return
    assert scattered in (4 * MATRICES // 2, 4 * (MATRICES + TABLES) // 2)  # jax 0.10's compiler sums the tables whole


@pytest.mark.tpu_aot
def test_overlapped_products_run_while_pieces_travel():
    layout = Layout("tensor=4", sequence_sharded=True)
    model = dataclasses.replace(MODEL, overlap=("attention", "mlp"))
    config = TrainConfig(model=model, layout=layout, batch_size=16, seq_len=128, prompt=None, clip_norm=None)
    compiled = compile_step(config, "v5p:2x2x1")
    travelling: dict[str, bool] = {}
    overlapped = []
    for line in compiled.as_text().splitlines():
        if started := re.search(r"%(collective-permute-start[\w.]*) = ", line):
            travelling[started[1]] = False
        elif "dot_general" in line and re.search(r" (fusion|convolution)\(", line):
            travelling = dict.fromkeys(travelling, True)
        if done := re.search(r" collective-permute-done\(%(collective-permute-start[\w.]*)", line):
            overlapped.append(travelling.pop(done[1]))
    # a layer's rings of three: x forward, y, and again, dy twice, x again twice, dx twice; nothing blocks for a stream
    assert len(overlapped) >= 24 and sum(overlapped) / len(overlapped) > 2 / 3
    sent = collectives(compiled, layout.sizes)
    blocking = [c for c in sent if c.kind in ("all-gather", "reduce-scatter") and c.times > 1]
    assert not blocking, blocking
