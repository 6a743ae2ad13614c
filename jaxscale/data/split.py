"""Train or held-out: decided document by document, by a hash of the document's name.

Because the decision looks at nothing but the name, adding a file to a corpus never moves another one
across, and a document is never on both sides.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Bool, UInt64

from jaxscale.errors import DataError, near

SPLITS = ("train", "heldout")


def name_hash(name: str) -> int:
    """64 bits of a document's relative name, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def heldout_mask(hashes: UInt64[np.ndarray, " n"], heldout: float) -> Bool[np.ndarray, " n"]:
    """Which documents are held out: those whose hash is in the lowest `heldout` of its range.

    With two documents or more neither side is empty: when the rule would leave one empty, the document
    with the lowest hash is held out (or the one with the highest kept). Only then, in a tiny corpus,
    can a new file move another.
    """
    if not 0 <= heldout < 1:
        raise DataError(f"heldout={heldout} is not a fraction of the documents; use one in [0, 1), such as 0.05.")
    mask = hashes < np.uint64(int(heldout * 2**64))
    if heldout > 0 and len(hashes) >= 2:
        if not mask.any():
            mask[np.argmin(hashes)] = True
        elif mask.all():
            mask[np.argmax(hashes)] = False
    return mask


def select(hashes: UInt64[np.ndarray, " n"], split: str, heldout: float, corpus: str) -> Bool[np.ndarray, " n"]:
    """Which documents belong to `split`; raises DataError for an unknown or an empty one."""
    if split not in SPLITS:
        raise DataError(f"split '{split}' does not exist{near(split, SPLITS)}")
    mask = heldout_mask(hashes, heldout)
    mask = mask if split == "heldout" else ~mask
    if not mask.any():
        without = ", or set train.eval_batches = 0 to train without evaluating" if split == "heldout" else ""
        raise DataError(
            f"the {split} split of '{corpus}' is empty ({len(hashes)} document(s), heldout={heldout}): documents are "
            f"split whole, so give at least two and a heldout fraction above 0{without}."
        )
    return mask
