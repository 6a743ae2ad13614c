"""The 1,797 handwritten digits that come with scikit-learn (8 x 8 pixels, 10 classes): a data source and an objective.

Nothing here knows the model, and nothing in jaxscale knows this file.
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
    """Images and labels by row number, as `Corpus.source` promises them."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray):
        self.name, self.images, self.labels = name, images, labels
        self.fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": self.images[ids], "label": self.labels[ids]}


@register
@dataclasses.dataclass(frozen=True)
class Digits:
    """Images (8, 8) float32 from 0 to 1 and labels int32.

    Args:
      heldout: the share of them that is evaluated on and not trained on.
    """

    heldout: float = 0.2
    name = "digits"

    def source(self, tokenizer: Any, *, split: str, **_: Any) -> Rows:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))
        cut = int(len(order) * self.heldout)
        ids = order[:cut] if split == "heldout" else order[cut:]
        return Rows(self.name, (found.images[ids] / 16).astype(np.float32), found.target[ids].astype(np.int32))


@register
@dataclasses.dataclass(frozen=True)
class Classify(Objective):
    """Cross-entropy of the right class, a mean over images; reports the share that is told right as `accuracy`."""

    evaluated = ("loss", "accuracy")

    def inputs(self, config: Any) -> dict[str, Input]:
        return {
            "image": Input((8, 8), "float32", (None, None)),
            "label": Input((), "int32", ()),
            "weights": Input((), "float32", ()),
        }

    def weights(self, batch: Any, parts: int) -> dict[str, jax.Array]:
        return {"images": jnp.sum(batch["weights"])}

    def terms(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> dict[str, jax.Array]:
        logits = model(batch["image"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=-1)[:, 0]
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        return {"nats": -jnp.sum(chosen * batch["weights"]), "right": jnp.sum(right * batch["weights"])}

    def value(self, totals: Any) -> jax.Array:
        return totals["nats"] / totals["images"]

    def metrics(self, totals: Any) -> dict[str, jax.Array]:
        return {"loss": self.value(totals), "accuracy": totals["right"] / totals["images"]}
