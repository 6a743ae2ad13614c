"""The train and held-out splits: a hash of a document's name decides.

Since only the name matters, adding a file to a corpus never moves another file to the other split, and no document is
in both.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Bool, UInt64

from jaxscale.errors import DataError, near

SPLITS = ("train", "heldout")


def name_hash(name: str) -> int:
    """Return a 64-bit hash of a document's relative name, the same on every machine and in every process.

    Args:
      name: the name.
    """
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def heldout_mask(hashes: UInt64[np.ndarray, " n"], heldout: float) -> Bool[np.ndarray, " n"]:
    """Return which documents are held out: those whose hash is in the lowest `heldout` of its range.

    If one split would be empty, the document with the lowest hash is held out (or that with the highest is trained on);
    with two documents or more neither split is empty. Only in such a tiny corpus can a new file move another one.

    Args:
      hashes: from `name_hash`, one per document.
      heldout: the fraction of documents held out, at least 0 and below 1.

    Raises:
      DataError: `heldout` is out of its range.
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
    """Return which documents are in a split.

    Args:
      hashes: from `name_hash`, one per document.
      split: "train" or "heldout".
      heldout: the fraction of documents held out.
      corpus: name of the corpus, for errors.

    Raises:
      DataError: the split does not exist, or is empty.
    """
    if split not in SPLITS:
        raise DataError(f"split '{split}' does not exist{near(split, SPLITS)}")
    mask = heldout_mask(hashes, heldout)
    mask = mask if split == "heldout" else ~mask
    if not mask.any():
        without = ", or set train.eval_batches = 0 to train without evaluating" if split == "heldout" else ""
        raise DataError(
            f"the {split} split of '{corpus}' is empty ({len(hashes)} document(s), heldout={heldout}): a document is "
            f"never divided, so give at least two, and a heldout fraction above 0{without}."
        )
    return mask


def numbered_hashes(name: str, count: int) -> UInt64[np.ndarray, " n"]:
    """Return hashes of a file's documents that have a number instead of a name, as `name_hash` for names.

    They are outputs of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") from
    the seed `name_hash(name)`.

    Args:
      name: name of the file.
      count: number of documents.
    """
    with np.errstate(over="ignore"):
        x = np.uint64(name_hash(name)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
