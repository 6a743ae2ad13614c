"""The decoder in float64 NumPy, one query at a time, from the papers: slow, plain, and sharing no code with the model.

Where a paper is ambiguous, its released code decides. Parameters are used by name only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxscale.models import Learned, TransformerConfig
from jaxscale.nn import (
    GELU,
    GeGLU,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MixtureOfExperts,
    MultiHeadLatent,
    NTKScaling,
    ProportionalScaling,
    QKNorm,
    RMSNorm,
    SwiGLU,
    UnitOffsetRMSNorm,
    YarnScaling,
)
from tests.truth import numpy_experts

Tree = Any


def logits(
    config: TransformerConfig,
    params: Tree,
    tokens: np.ndarray,
    *,
    positions: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Return logits (B, S, V), float64.

    Args:
      config: config of the decoder.
      params: the model's parameters, a nested dict of arrays.
      tokens: ids (B, S).
      positions: (B, S), of packed rows; by default a row is one document.
      segment_ids: (B, S), likewise.
    """
    p = _float64(params)
    place = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1)) if positions is None else positions
    documents = np.ones_like(tokens) if segment_ids is None else segment_ids
    rows = zip(tokens, place, documents, strict=True)
    return np.stack([_row(config, p, *row) for row in rows])


def mean_loss(
    config: TransformerConfig,
    params: Tree,
    batch: dict[str, np.ndarray],
    *,
    z_loss: float = 0.0,
) -> float:
    """Return the cross-entropy in nats per weighted token, plus `z_loss` times the mean squared log-partition."""
    z = logits(config, params, batch["tokens"], positions=batch.get("positions"), segment_ids=batch.get("segment_ids"))
    losses, squares = token_losses(z, batch["targets"])
    weights = batch["weights"].astype(np.float64)
    return float(np.sum((losses + z_loss * squares) * weights) / np.sum(weights))


def token_losses(z: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cross-entropies and squared log-partitions, (B, S), of logits (B, S, V) and ids (B, S)."""
    z = np.asarray(z, np.float64)
    peak = z.max(-1)
    partition = peak + np.log(np.exp(z - peak[..., None]).sum(-1))
    return partition - np.take_along_axis(z, targets[..., None], -1)[..., 0], partition**2


def layers_of(config: TransformerConfig, params: Tree) -> list[Tree]:
    """Return every layer's parameters, in order, from the stacked runs of repeating groups."""
    layers = []
    for run in (params["runs"][i] for i in range(len(params["runs"]))):
        group = [run["blocks"][j] for j in range(len(run["blocks"]))]
        repeats = len(_first_leaf(group[0]))
        layers += [_at(block, i) for i in range(repeats) for block in group]
    assert len(layers) == config.depth
    return layers


def _row(c: TransformerConfig, p: Tree, tokens: np.ndarray, place: np.ndarray, document: np.ndarray) -> np.ndarray:
    x = p["embed"]["weight"][tokens]
    if c.embed_scale is not None:
        x = x * c.embed_scale
    if isinstance(c.positions, Learned):
        x = x + p["positions"]["weight"][place]
    for number, layer in enumerate(layers_of(c, p)):
        windows = [b.window for b in c.blocks] or c.windows
        window = windows[number % len(windows)]
        x = _layer(c, layer, x, place, document, window)
    x = _norm(c, p["norm"], x) * c.logit_scale
    z = x @ (p["embed"] if c.tied else p["head"])["weight"].T
    return _cap(z, c.logit_softcap)


def _layer(c, p, x, place, document, window):  # type: ignore[no-untyped-def]
    post = (lambda name, y: _norm(c, p[name], y)) if c.post_norm else (lambda name, y: y)
    pre = (lambda name, y: _norm(c, p[name], y)) if c.pre_norm else (lambda name, y: y)
    attend = _latent_attention if isinstance(c.attention_layer, MultiHeadLatent) else _attention
    h = pre("attn_norm", x)
    attention = post("attn_post_norm", attend(c, p["attn"], h, place, document, window))
    if c.parallel:
        return x + c.residual_scale * (attention + post("mlp_post_norm", _feed_forward(c, p["mlp"], h, document != 0)))
    x = x + c.residual_scale * attention
    return x + c.residual_scale * post("mlp_post_norm", _feed_forward(c, p["mlp"], pre("mlp_norm", x), document != 0))


def _attention(c, p, h, place, document, window):  # type: ignore[no-untyped-def]
    q, k, v = (np.einsum("se,ehd->shd", h, p[n]["kernel"]) + p[n].get("bias", 0.0) for n in "qkv")
    if c.qk_norm:
        q, k = (_qk_norm(c, p[n]["scale"], a) for a, n in ((q, "q_norm"), (k, "k_norm")))
    q, k = _turned(c, window, place, q, k)
    mixed = attention(
        q, k, v, place=place, document=document, window=window, softcap=c.attention_softcap, scale=c.attention_scale
    )
    return np.einsum("shd,hde->se", mixed, p["out"]["kernel"]) + p["out"].get("bias", 0.0)


def _qk_norm(c: TransformerConfig, scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    config = c.qk_norm if isinstance(c.qk_norm, QKNorm) else QKNorm()
    scale = scale + 1 if config.norm is UnitOffsetRMSNorm else scale
    flat = x.reshape(len(x), -1) if config.across_heads else x
    return _rms_norm(flat, scale, c.norm_eps).reshape(x.shape)


def _turned(c, window, place, *xs):  # type: ignore[no-untyped-def]
    """Return queries and keys with rotary positions on the first dimensions, as the config says."""
    positions = c.local_positions if window is not None and c.local_positions is not None else c.positions
    if positions is None or isinstance(positions, Learned):
        return xs
    turned = int(xs[0].shape[-1] * positions.fraction)
    frequencies, factor = rotary_frequencies(turned, positions.theta, positions.scaling, int(place.max()) + 1)
    return [
        np.concatenate([rotate(x[..., :turned], place, frequencies) * factor, x[..., turned:]], axis=-1) for x in xs
    ]


def _latent_attention(c, p, h, place, document, window):  # type: ignore[no-untyped-def]
    """Equations 9 to 19 and 37 to 47 of DeepSeek-V2 (Liu et al. 2024); the score's factor is its released code's."""
    z, eps = c.attention_layer, c.attention_layer.norm_eps
    c_q = h if z.q_rank is None else _rms_norm(h @ p["q_down"]["kernel"], p["q_norm"]["scale"], eps)
    c_kv = _rms_norm(h @ p["kv_down"]["kernel"], p["kv_norm"]["scale"], eps)
    q, k, v = (np.einsum("sl,lhd->shd", x, p[n]["kernel"]) for x, n in ((c_q, "q"), (c_kv, "k"), (c_kv, "v")))
    q_r = np.einsum("sl,lhd->shd", c_q, p["q_rotary"]["kernel"])
    q_r, k_r = _turned(c, window, place, q_r, (h @ p["k_rotary"]["kernel"])[:, None])
    q = np.concatenate([q, q_r], -1)
    k = np.concatenate([k, np.repeat(k_r, k.shape[1], 1)], -1)
    scale = c.attention_scale
    if scale is None:
        scale = (z.plain_dim + z.rotary_dim) ** -0.5
        if isinstance(c.positions.scaling, YarnScaling):
            scale *= (1 + 0.1 * c.positions.scaling.mscale_all_dim * math.log(c.positions.scaling.factor)) ** 2
    mixed = attention(q, k, v, place=place, document=document, window=window, softcap=c.attention_softcap, scale=scale)
    return np.einsum("shd,hde->se", mixed, p["out"]["kernel"])


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    place: np.ndarray | None = None,
    document: np.ndarray | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """Return attention of one row: q (S, H, D), k and v (S, K, D); each group of H / K query heads shares a key head.

    `place` is each token's position in its document and `document` is the document's number. A query attends to its own
    document only, to nothing after itself, and to the latest `window` positions, its own included.
    """
    s, heads, d = q.shape
    place = np.arange(s) if place is None else place
    document = np.ones(s, int) if document is None else document
    out = np.zeros((s, heads, v.shape[-1]))
    for head in range(heads):
        shared = head // (heads // k.shape[1])
        for i in range(s):
            seen = [j for j in range(s) if _sees(place[i] - place[j], document[i] == document[j], causal, window)]
            scores = _cap(k[seen, shared] @ q[i, head] * (d**-0.5 if scale is None else scale), softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[seen, shared]
    return out


def _sees(behind: int, same_document: bool, causal: bool, window: int | None) -> bool:
    if not same_document or (causal and behind < 0):
        return False
    return window is None or abs(behind) < window


def rotate(x: np.ndarray, place: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotate x (S, H, D): dimensions i and i + D/2 are a complex number, multiplied by exp(1j * position * f_i)."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * place[:, None] * frequencies)[:, None, :]
    return np.concatenate([z.real, z.imag], -1)


def rotary_frequencies(head_dim: int, theta: float, scaling: Any, length: int = 0) -> tuple[np.ndarray, float]:
    """Return radians per position of each pair of dimensions, and the factor on rotated queries and keys.

    `length` is the sequence length, by which LongRoPE chooses its factors.
    """
    pairs = range(head_dim // 2)
    if isinstance(scaling, NTKScaling):
        # "NTK-aware": base b * s^(D / (D - 2)) (Peng et al. 2023, section 3.1)
        theta = theta * scaling.factor ** (head_dim / (head_dim - 2))
    plain = [theta ** (-2 * i / head_dim) for i in pairs]
    if scaling is None or isinstance(scaling, NTKScaling):
        return np.array(plain), 1.0
    if isinstance(scaling, LinearScaling):
        return np.array([f / scaling.factor for f in plain]), 1.0
    if isinstance(scaling, ProportionalScaling):
        # the first `fraction` of the pairs turn at the frequencies of the whole head, the others not at all
        turned = int(scaling.fraction * head_dim / 2)
        return np.array([f / scaling.factor if i < turned else 0.0 for i, f in enumerate(plain)]), 1.0
    if isinstance(scaling, Llama3Scaling):
        return np.array([_llama3(f, scaling) for f in plain]), 1.0
    if isinstance(scaling, YarnScaling):
        turned = np.array([_yarn(i, head_dim, theta, f, scaling) for i, f in enumerate(plain)])
        log = math.log(max(scaling.factor, 1.0))
        return turned, (1.0 + 0.1 * scaling.mscale * log) / (1.0 + 0.1 * scaling.mscale_all_dim * log)
    if isinstance(scaling, LongRopeScaling):
        factors = scaling.long if (scaling.length or length) > scaling.original_length else scaling.short
        attention = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))
        return np.array(plain) / np.array(factors), attention
    raise NotImplementedError(scaling)


def _llama3(frequency: float, s: Llama3Scaling) -> float:
    """Meta's `apply_scaling`, by wavelength."""
    wavelength = 2 * math.pi / frequency
    shortest_stretched = s.original_length / s.low_freq_factor
    longest_kept = s.original_length / s.high_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_stretched:
        return frequency / s.factor
    smooth = (s.original_length / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * frequency / s.factor + smooth * frequency


def _yarn(i: int, head_dim: int, theta: float, frequency: float, s: YarnScaling) -> float:
    """NTK-by-parts of the paper's released code: a ramp over the dimension's number, between two numbers of turns."""

    def dimension(turns: float) -> float:  # that makes so many turns over the original length
        return head_dim * math.log(s.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(s.beta_fast)), 0)
    high = min(math.ceil(dimension(s.beta_slow)), head_dim - 1)
    high = high + 0.001 if low == high else high
    interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
    return frequency / s.factor * interpolated + frequency * (1 - interpolated)


def _feed_forward(c: TransformerConfig, p: Tree, h: np.ndarray, real: np.ndarray) -> np.ndarray:
    if "router" in p:
        assert isinstance(c.mlp, MixtureOfExperts)
        return numpy_experts.layer(c.mlp, p, h[None], real[None])[0][0]
    if isinstance(c.mlp, MixtureOfExperts):
        c = dataclasses.replace(c, mlp=c.dense_mlp)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[name]["kernel"] + p[name].get("bias", 0.0)

    if c.mlp is SwiGLU:
        gate = linear("gate", h)
        hidden = gate / (1 + np.exp(-gate)) * linear("up", h)
    elif c.mlp is GeGLU:
        hidden = _gelu(linear("gate", h)) * linear("up", h)
    elif c.mlp is GELU:
        hidden = _gelu(linear("up", h))
    else:
        raise NotImplementedError(c.mlp)
    return linear("down", hidden)


def _gelu(x: np.ndarray) -> np.ndarray:
    """Its tanh approximation (Hendrycks & Gimpel 2016), as GPT-2 and Gemma use it."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _norm(c: TransformerConfig, p: Tree, x: np.ndarray) -> np.ndarray:
    if c.norm is UnitOffsetRMSNorm:
        return _rms_norm(x, 1 + p["scale"], c.norm_eps)
    if c.norm is RMSNorm:
        return _rms_norm(x, p["scale"], c.norm_eps)
    assert c.norm is LayerNorm
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps) * p["scale"] + p["bias"]


def _rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _float64(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {k: _float64(v) for k, v in tree.items()}
    return np.asarray(tree, np.float64)


def _at(tree: Tree, i: int) -> Tree:
    return {k: _at(v, i) for k, v in tree.items()} if isinstance(tree, dict) else tree[i]


def _first_leaf(tree: Tree) -> np.ndarray:
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return tree
