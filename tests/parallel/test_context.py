"""Context-parallel attention against float64, and that masked chunks are neither computed nor sent."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxscale as js
from jaxscale.layout import Layout
from jaxscale.models import Transformer
from jaxscale.nn import GatherAttention, RingAttention, TokenRingAttention, UlyssesAttention
from jaxscale.parallel.context import Chunks, Part, local, merge, merge_over, products, visits, zigzag
from jaxscale.plan import compile_for, compile_step, topology_devices
from jaxscale.plan.collectives import collectives
from pallas_kernels.flash_attention import SKIP, Mask, Tokens, flash_attention, tile_table
from tests.pallas_kernels.flash_attention.cases import assert_as_exact_as, covering, name_of, plain, truth
from tests.truth.compare import assert_leaves_agree
from tests.truth.layouts import QUICKLY
from tests.truth.long import short

FORMS = {
    "ring": RingAttention(),
    "plain ring": RingAttention(zigzag=False),
    "TokenRing": TokenRingAttention(),
    "gather": GatherAttention(),
    "Ulysses": UlyssesAttention(),
    "ring of Ulysses": UlyssesAttention(ring=2),
}
FEATURES = {
    "form": tuple(FORMS),
    "mesh": ("context=2", "context=4", "data=2,context=2,tensor=2"),
    "causal": (True, False),
    "heads": ((8, 4), (4, 4)),
    "segments": (False, True),
    "positions": (False, True),
    "window": (None, 3, 11),
    "softcap": (None, 2.0),
}
B, S, D = 2, 32, 8


def _case(case):
    """Arrays (q, k, v, cotangent), and the options in natural order."""
    random = np.random.default_rng(0)
    h, kv = case["heads"]
    arrays = [jnp.asarray(random.normal(size=(B, S, n, D)), jnp.float32) for n in (h, kv, kv, h)]
    token_arrays = {}
    if case["segments"]:
        token_arrays["segment_ids"] = np.sort(random.integers(0, 4, (B, S)), 1).astype(np.int32)
    if case["positions"]:  # without segments in any order; with segments increasing, with gaps
        ordered = np.cumsum(random.integers(1, 3, (B, S)), 1)
        token_arrays["positions"] = (ordered if case["segments"] else random.integers(0, 20, (B, S))).astype(np.int32)
    return arrays, token_arrays


@pytest.mark.parametrize("case", short(5, covering(FEATURES)), ids=name_of)
def test_every_form_gives_the_output_and_gradients_of_float64(case):
    (q, k, v, dout), token_arrays = _case(case)
    options = {n: case[n] for n in ("causal", "window", "softcap")}
    pairs = {n: (x, x) for n, x in token_arrays.items()}
    out, _, grads = truth((q, k, v, None), {**options, **pairs}, dout, np.zeros(q.shape[:3]))
    attend = FORMS[case["form"]]
    with Layout(case["mesh"]):
        order = attend.order(S)
        order = np.arange(S) if order is None else order
        token_arrays = {n: jnp.asarray(x[:, order]) for n, x in token_arrays.items()}
        got = _both(functools.partial(attend, **options, **token_arrays), [x[:, order] for x in (q, k, v, dout)])
    got = [np.asarray(x)[:, np.argsort(order)] for x in got]
    assert_leaves_agree(got, [out, *grads[:3]], what=case["form"])


@pytest.mark.parametrize("form", short(1, ["ring", "TokenRing", "gather"]))
def test_in_bfloat16_it_is_as_exact_as_plain_attention(form):
    arrays, theirs, exact = _bfloat16()
    order = zigzag(S, 4)
    with Layout("context=4"):
        got = _both(FORMS[form], [x[:, order] for x in arrays])
    for name, a, b, want in zip("output q k v".split(), got, theirs, exact, strict=True):
        assert_as_exact_as(a[:, np.argsort(order)], b, want, f"{form}, {name}")


@functools.cache
def _bfloat16():
    """Arrays, and the results of plain attention and of float64."""
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=(B, S, n, D)), jnp.bfloat16) for n in (4, 2, 2, 4)]
    q, k, v, dout = arrays
    seen = np.tril(np.ones((1, S, S), bool))
    theirs = _both(lambda q, k, v: plain(q, k, v, None, seen=seen, options={})[0], arrays)
    out, _, grads = truth((q, k, v, None), {"causal": True}, dout, np.zeros(q.shape[:3]))
    return arrays, theirs, [out, *grads[:3]]


def _both(attend, arrays):
    """The output, and the cotangents of q, k and v."""

    def both(q, k, v, dout):
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dout)

    return jax.jit(both).lower(*arrays).compile(QUICKLY)(*arrays)


def test_a_ring_of_eight_is_a_loop_and_gives_the_same_numbers():
    (q, k, v, dout), _ = _case({"heads": (4, 2), "segments": False, "positions": False})
    out, _, grads = truth((q, k, v, None), {"causal": True}, dout, np.zeros(q.shape[:3]))
    order = zigzag(S, 8)
    with Layout("context=8"):

        def both(q, k, v, dout):
            y, pull = jax.vjp(FORMS["ring"], q, k, v)
            return y, *pull(dout)

        arrays = [x[:, order] for x in (q, k, v, dout)]
        jaxpr = jax.make_jaxpr(both)(*arrays).jaxpr
        assert any(eqn.params["length"] == 6 for eqn, _ in _walk(jaxpr) if eqn.primitive.name == "scan")
        assert sum(times for eqn, times in _walk(jaxpr) if eqn.primitive.name == "ppermute") == (2 + 4) * 7
        got = jax.jit(both).lower(*arrays).compile(QUICKLY)(*arrays)
    got = [np.asarray(x)[:, np.argsort(order)] for x in got]
    assert_leaves_agree(got, [out, *grads[:3]])


def _walk(jaxpr, times=1):
    """Every equation, and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        more = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _walk(sub, times * more)


def test_parts_of_the_keys_merge_to_all_of_them():
    (q, k, v, _), _ = _case({"heads": (4, 2), "segments": False, "positions": False})
    parts = [Part(*flash_attention(q, k[:, i::3], v[:, i::3], return_lse=True)) for i in range(3)]
    nothing = Part(jnp.zeros_like(q), jnp.full(q.shape[:3], -jnp.inf))
    whole = Part(*flash_attention(q, k, v, return_lse=True))
    assert_leaves_agree(merge(merge(nothing, parts[0]), merge(parts[1], parts[2])), whole)
    assert_leaves_agree(merge(whole, nothing), whole)
    np.testing.assert_array_equal(merge(nothing, nothing).lse, nothing.lse)


def test_a_part_that_is_no_number_is_not_merged_to_nothing_seen():
    parts = Part(jnp.full((1, 1, 2, 4), jnp.nan), jnp.asarray([[[jnp.nan, -jnp.inf]]]))
    nothing = Part(jnp.zeros((1, 1, 2, 4)), jnp.full((1, 1, 2), -jnp.inf))
    over = jax.vmap(lambda *part: merge_over(Part(*part), ("parts",)), axis_name="parts")
    both = over(*(jnp.stack(pair) for pair in zip(nothing, parts, strict=True)))
    for lse in (merge(nothing, parts).lse, merge(parts, nothing).lse, *both.lse):
        np.testing.assert_array_equal(lse, parts.lse)


# ---- computed chunks


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_a_causal_zigzag_gives_every_device_the_same_work_and_a_plain_ring_does_not(ring):
    causal = dict(causal=True, window=None, in_order=True)
    zig, plain = Chunks(ring, 2, 8), Chunks(ring, 1, 16)
    assert [products(visits(zig, **causal), i, zig) for i in range(ring)] == [2 * ring + 1] * ring
    assert [products(visits(plain, **causal), i, plain) for i in range(ring)] == list(range(1, ring + 1))


@pytest.mark.parametrize(
    ("ring", "each", "causal", "window"),
    [*itertools.product((2, 4), (1, 2), (True, False), (1, 2, 4, 5, 9)), (3, 2, True, 6), (5, 2, True, None)],
)
def test_the_chunks_visited_are_those_in_which_a_token_sees_one(ring, each, causal, window):
    chunks = Chunks(ring, each, 4)
    place = np.arange(ring * each * 4)
    behind = place[:, None] - place
    seen = (behind >= 0) | (not causal)
    if window is not None:
        seen &= behind < window if causal else abs(behind) < window
    seen = seen.reshape(ring * each, 4, ring * each, 4)
    met = []
    for visit in visits(chunks, causal=causal, window=window, in_order=True):
        for slot, device in itertools.product(visit.slots, range(ring)):
            mine, theirs = chunks.numbers[device], chunks.numbers[(device - visit.offset) % ring]
            pairs = itertools.product(mine, theirs) if slot.whole else [(mine[slot.q[device]], theirs[slot.k[device]])]
            for q, k in pairs if slot.on[device] else ():
                if not (slot.whole and slot.mask == "diagonal" and k > q):  # the kernel skips those
                    met.append((int(q), int(k)))
                    assert slot.mask != "full" or seen[q, :, k].all()
    assert sorted(met) == [tuple(x) for x in np.argwhere(seen.any((1, 3))).tolist()]


@pytest.mark.parametrize("form", ["ring", "TokenRing"])
def test_the_kernel_is_called_on_the_visited_chunks_alone(monkeypatch, form):
    counts = []

    def count(q, k, v, **options):
        """Chunks that one call computes."""
        mask = Mask(options.get("causal", False), options.get("window"))
        table = tile_table(mask, Tokens(), s=q.shape[1], t=k.shape[1], q_tile=S // 8, k_tile=S // 8)
        counts.append(int((table != SKIP).sum()))
        return flash_attention(q, k, v, **options)

    monkeypatch.setattr(local, "flash_attention", count)
    q = jax.ShapeDtypeStruct((B, S, 2, D), jnp.float32)
    with Layout("context=4"):
        jax.eval_shape(FORMS[form], q, q, q)
    assert sum(counts) == 2 * 4 + 1


@pytest.mark.parametrize(("zigzag", "window", "steps"), [(True, None, 3), (True, 4, 2), (False, 8, 1), (False, 1, 0)])
def test_keys_that_a_window_hides_from_everybody_are_not_sent(zigzag, window, steps):
    q = jnp.ones((B, S, 2, D))
    with Layout("context=4"):
        attend = RingAttention(zigzag=zigzag)
        jaxpr = jax.make_jaxpr(lambda q: attend(q, q, q, window=window))(q).jaxpr
    assert sum(times for eqn, times in _walk(jaxpr) if eqn.primitive.name == "ppermute") == 2 * steps


# ---- collectives, in programs compiled for v5p

# 4 devices of 64 tokens each, 8 heads and 4 key heads of 128, bfloat16
Q, K, ROWS = 64 * 8 * 128 * 2, 64 * 4 * 128 * 2, 64 * 8 * 4
ON, BACK = tuple((i, (i + 1) % 4) for i in range(4)), tuple((i, (i - 1) % 4) for i in range(4))
ACROSS = tuple((i, (i + 2) % 4) for i in range(4))
send = lambda nbytes, to: ("collective-permute", nbytes, to)  # noqa: E731
SENT = {
    # keys and values, both passes; and their float32 gradients
    "ring": {send(K, ON): 2 * 3 * 2, send(2 * K, ON): 2 * 3},
    # queries, then queries, cotangents and two numbers a row; outputs with one and the queries' gradients return
    "TokenRing": {
        send(Q, BACK): 3 + 2 * 3 + 2, send(Q, ACROSS): 2, send(Q, ON): 2,
        send(ROWS, BACK): 2 * 3 + 1, send(ROWS, ACROSS): 1, send(ROWS, ON): 1,
    },
    "Ulysses": {("all-to-all", Q, ()): 2 * 2, ("all-to-all", K, ()): 2 * 2},
}  # fmt: skip


NEEDS_TPU = pytest.mark.tpu_aot


@NEEDS_TPU
@pytest.mark.parametrize("form", SENT)
def test_a_tpu_sends_what_the_form_says_and_nothing_else(form):
    attend = dataclasses.replace(FORMS[form], implementation="xla")  # compiles faster
    assert _sent(attend, 256) == SENT[form]


@NEEDS_TPU
def test_a_tpu_gathers_keys_twice_and_scatters_their_gradients_and_nothing_else():
    # for smaller arrays, or gradients of XLA's attention, the compiler makes one all-reduce in bfloat16
    want = {("all-gather", 16 * 4 * K, ()): 2 * 2, ("reduce-scatter", 16 * 4 * 2 * K, ()): 2}
    assert _sent(FORMS["gather"], 16 * 256) == want


def _sent(attend, tokens):
    """Collectives of a forward and a backward pass on four chips, and how many of each."""
    layout = Layout("context=4").on(topology_devices("v5p:2x2x1"))
    where = NamedSharding(layout.device_mesh, layout.spec(("batch", "seq"), kind="activations"))
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, 128), jnp.bfloat16, sharding=where) for n in (8, 4))

    def both(q, k, v, dout):
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dout)

    return _counted(compile_for(both, "v5p:2x2x1", q, k, k, q, layout=layout), layout)


def _counted(compiled, layout):
    """Counts by (kind, bytes sent, or of the whole array that is gathered or scattered, pairs of devices)."""
    counts = collections.Counter()
    for c in collectives(compiled, layout.sizes):
        assert c.certain and c.axes == ("context",)
        counts[c.kind, c.payload, c.pairs] += c.times
    return counts


@NEEDS_TPU
def test_a_training_step_on_tpus_sends_keys_round_in_every_layer_and_gathers_token_ids_alone():
    config = js.TrainConfig(
        model=Transformer.Config(
            depth=2, width=256, heads=4, kv_heads=2, head_dim=64, hidden=512, vocab=512, dropout=0.1,
            attention=RingAttention(implementation="xla"),
        ),
        layout=Layout("context=4"), batch_size=2, seq_len=1024, prompt=None,
    )  # fmt: skip
    counts = _counted(compile_step(config, "v5p:2x2x1"), Layout("context=4"))
    k, ids = 2 * 256 * 2 * 64 * 2, 2 * 256 * 4
    assert {c: n for c, n in counts.items() if c[0] != "all-reduce"} == {
        # in both layers
        send(k, ON): 2 * 2 * 3 * 2,
        send(2 * k, ON): 2 * 2 * 3,
        # once: segment ids travel around the ring; tokens, targets, weights, positions and segment ids are reordered
        send(ids, ON): 3,
        ("all-gather", 4 * ids, ()): 5,
    }
    # of each layer's gradients, of the others', and of the weights' sum
    assert sum(n for c, n in counts.items() if c[0] == "all-reduce") == 2 + 1 + 1
