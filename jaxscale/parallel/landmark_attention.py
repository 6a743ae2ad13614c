"""Attention by a Gaussian kernel through a few landmarks, along a sequence that can be sharded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxscale.parallel.sharded import cut_over, sharded_op


def landmark_attention(
    q: Float[Array, "b s h d"],
    v: Float[Array, "b s h dv"],
    landmarks: Int[Array, "#b s"],
    documents: Int[Array, "#b s"],
    *,
    count: int,
    iterations: int,
) -> Float[Array, "b s h dv"]:
    """Compute `C A^+ C^T v` within each document (Lu et al. 2021): linear in the sequence's length.

    `C` is the Gaussian kernel `exp(-|x - y|^2 / (2 sqrt(d)))` of queries and landmarks, the means of some neighbouring
    queries, and `A` that of landmarks. `A^+` is `newton_inverse` of `A`, document by document. If the layout shards the
    sequence, devices sum landmarks and `C^T v`. Computed in float32.

    Args:
      q: queries, which are keys, too.
      v: values.
      landmarks: the landmark whose mean each token is part of, from 0; at least `count` is none.
      documents: a number for the document of each token of a row; 0 is padding.
      count: number of landmarks of a row.
      iterations: of Newton's method.

    Returns:
      (B, S, H, Dv) in float32; zero for padding.

    Raises:
      LayoutError: a dimension that the layout does not divide.
    """
    over = cut_over("seq")
    landmarks, documents = (jnp.broadcast_to(x, q.shape[:2]) for x in (landmarks, documents))
    scale = q.shape[-1] ** -0.5

    def total(x: Array) -> Array:
        return lax.psum(x, over) if over else x

    def local(q: Array, v: Array, landmarks: Array, documents: Array) -> Array:
        q, v = q.astype(jnp.float32), v.astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            member = jax.nn.one_hot(landmarks, count, dtype=jnp.float32) * (documents != 0)[..., None]  # (b, s, m)
            tokens = total(jnp.sum(member, axis=1))
            share = 1 / jnp.maximum(tokens, 1)
            points = total(jnp.einsum("bsm,bshd->bmhd", member, q)) * share[..., None, None]
            of = total(jnp.einsum("bsm,bs->bm", member, documents.astype(jnp.float32))) * share  # 0: no landmark
            document = jnp.round(of).astype(jnp.int32)
            near = (documents[..., None] == document[:, None]) & (document != 0)[:, None]
            to_points = jnp.where(near[:, None], gaussian(q, points, scale), 0)
            same = (document[..., None] == document[:, None]) & (document != 0)[:, None]
            # a place without a landmark is a document of its own
            between = jnp.where(same[:, None], gaussian(points, points, scale), jnp.eye(count))
            norms = jnp.max(jnp.where(same[:, None], jnp.sum(between, -1)[..., None, :], 1), axis=-1)
            values = total(jnp.einsum("bhsm,bshd->bhmd", to_points, v))
            values = newton_inverse(between, norms, iterations) @ values
            return jnp.einsum("bhsm,bhmd->bshd", to_points, values)

    of_heads = ("batch", "seq", "heads", None)
    return sharded_op(
        local,
        q,
        v,
        landmarks,
        documents,
        axes=(of_heads, of_heads, of_heads[:2], of_heads[:2]),
        out_axes=of_heads,
        name="an operand of attention to landmarks",
    )


def gaussian(x: Float[Array, "b s h d"], y: Float[Array, "b m h d"], scale: float) -> Float[Array, "b h s m"]:
    """Return `exp(-|x - y|^2 * scale / 2)`.

    Args:
      x: points.
      y: points.
      scale: factor on squared distances.
    """
    squares = [jnp.moveaxis(jnp.sum(a * a, -1), 2, 1) for a in (x, y)]
    distance = squares[0][..., None] + squares[1][..., None, :] - 2 * jnp.einsum("bshd,bmhd->bhsm", x, y)
    return jnp.exp(-scale / 2 * jnp.maximum(distance, 0))


def newton_inverse(
    a: Float[Array, "... m m"], norms: Float[Array, "... m"], iterations: int
) -> Float[Array, "... m m"]:
    """Approach the pseudo-inverse of symmetric positive semi-definite matrices by `X <- 2 X - X A X`.

    It starts from `A / |A|^2`, from which the method converges (the paper's `2 / |A|^2` is the bound of convergence).
    Small eigenvalues, which n iterations leave below about `2^-n |A|`, count as zero.

    Args:
      a: the matrices.
      norms: for each row, the largest sum of a row of its diagonal block, `|A|`.
      iterations: number of iterations.
    """
    start = a / jnp.square(norms)[..., None]

    def step(x: Array, _: None) -> tuple[Array, None]:
        return 2 * x - functools.reduce(jnp.matmul, (x, a, x)), None

    return lax.scan(step, start, None, length=iterations)[0]
