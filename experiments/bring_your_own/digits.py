"""A data source and an objective: scikit-learn's 1,797 handwritten digits (8 x 8 pixels, 10 classes).

Nothing here depends on the model, and nothing in jaxscale depends on this file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.config import register
from jaxscale.step import Input, Objective

CLASSES = 10


class Rows:
    """A source, as `Corpus.source` returns one: images and labels by row number."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray):
        self.name, self.images, self.labels = name, images, labels
        self.fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows with these numbers."""
        return {"image": self.images[ids], "label": self.labels[ids]}


@register
@dataclasses.dataclass(frozen=True)
class Digits:
    """Images (8, 8) float32 from 0 to 1 and labels int32.

    Args:
      heldout: share of the images that is used for evaluation instead of training.
    """

    heldout: float = 0.2
    name = "digits"

    def source(self, tokenizer: Any, *, split: str, **_: Any) -> Rows:
        """Return the rows of a split, "train" or "heldout"."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        cut = int(len(order) * self.heldout)
        ids = order[:cut] if split == "heldout" else order[cut:]
        return Rows(self.name, (digits.images[ids] / 16).astype(np.float32), digits.target[ids].astype(np.int32))


@register
@dataclasses.dataclass(frozen=True)
class Classify(Objective):
    """Mean cross-entropy of images; also reports `accuracy`, the share of images with the right class."""

    evaluated = ("loss", "accuracy")

    def inputs(self, config: Any) -> dict[str, Input]:
        """Return shape, dtype and axes of each array of a batch, without the batch dimension."""
        return {
            "image": Input((8, 8), "float32", (None, None)),
            "label": Input((), "int32", ()),
            "weights": Input((), "float32", ()),
        }

    def weights(self, batch: Any, parts: int) -> dict[str, jax.Array]:
        """Return the number of images."""
        return {"images": jnp.sum(batch["weights"])}

    def terms(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> dict[str, jax.Array]:
        """Return the summed loss in nats, and the number of images with the right class."""
        logits = model(batch["image"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=-1)[:, 0]
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        return {"nats": -jnp.sum(chosen * batch["weights"]), "right": jnp.sum(right * batch["weights"])}

    def value(self, totals: Any) -> jax.Array:
        """Return the loss."""
        return totals["nats"] / totals["images"]

    def metrics(self, totals: Any) -> dict[str, jax.Array]:
        """Return the loss and the accuracy."""
        return {"loss": self.value(totals), "accuracy": totals["right"] / totals["images"]}
