"""Data pruning: a corpus of which only the hardest, the easiest or a random share of documents is trained on."""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from jaxscale.config import register
from jaxscale.data.batch import Source
from jaxscale.data.cache import cache_folder
from jaxscale.data.documents import TextCorpus
from jaxscale.data.ngrams import Embedder, NGrams
from jaxscale.data.packing import Documents, pack
from jaxscale.data.prepared import PreparedTokens
from jaxscale.data.split import SPLITS
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.errors import DataError, near

log = logging.getLogger("jaxscale")

ORDERS = ("hardest", "easiest", "random")
SAMPLE = 20_000
"""The most documents that clusters are computed from; all documents are compared with them."""


@register(name="pruned")
@dataclass(frozen=True)
class Pruned:
    """Another corpus with a share of its training documents (Sorscher et al. 2022, arXiv:2206.14486).

    The prototype metric of the paper: documents are embedded, k-means finds clusters of their directions, and a
    document is as hard as its cosine distance to the nearest cluster. Held-out documents all stay, so that losses with
    and without pruning are comparable. Scores are computed once, into the cache, from token ids alone.

    For example, the harder half of a folder, by `pruned.corpus = @text_files()`:

        train.data = @pruned()
        pruned.keep = 0.5

    The paper's result is that the hardest documents are best with much data, and the easiest with little.

    Args:
      corpus: a corpus of texts, or a `token_file`.
      keep: the share of training documents that stays.
      order: which documents stay: the "hardest", the "easiest", or for comparison a "random" share.
      clusters: number of clusters.
      embed: makes a vector of a document, such as `NGrams()`.
      seed: of the clusters' first values and the random order.

    Raises:
      DataError: a setting out of its range, or a corpus that cannot be pruned.
    """

    corpus: Any
    keep: float = 0.5
    order: str = "hardest"
    clusters: int = 64
    embed: Embedder = NGrams()
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, (TextCorpus, PreparedTokens)):
            name = getattr(self.corpus, "name", repr(self.corpus))
            raise DataError(
                f"pruned.corpus = {name}: only corpora of texts and token files can be pruned; of a mixture, prune the "
                "parts"
            )
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise DataError(f"pruned.keep = {self.keep!r}: must be above 0 and at most 1.")
        if self.order not in ORDERS:
            raise DataError(f"pruned.order = {self.order!r} does not exist{near(str(self.order), ORDERS)}")
        if not callable(self.embed) or " at 0x" in repr(self.embed):
            raise DataError(
                f"pruned.embed = {self.embed!r}: must be a frozen dataclass with __call__, like NGrams(), since "
                "scores are cached by its settings"
            )
        if type(self.clusters) is not int or self.clusters < 1:
            raise DataError(f"pruned.clusters = {self.clusters!r}: must be a whole number of at least 1.")
        if type(self.seed) is not int or self.seed < 0:
            raise DataError(f"pruned.seed = {self.seed!r}: must be a whole number of at least 0.")

    @property
    def name(self) -> str:
        """Name of the corpus, with the share."""
        return f"{self.corpus.name}, the {self.order} {self.keep:g}"

    def documents(self, tokenizer: Tokenizer | None, split: str, cache: str | Path | None = None) -> Documents:
        """Return the documents of a split.

        Args:
          tokenizer: turns texts into token ids.
          split: "train" or "heldout".
          cache: the cache of token files and scores.

        Raises:
          DataError: see the corpus; there are fewer documents than clusters; or the scores cannot be written.
        """
        whole = self.corpus.prepared(tokenizer, cache).documents(split, self.corpus.heldout, self.corpus.name)
        if split != SPLITS[0]:
            return whole
        number = max(1, round(self.keep * len(whole.lengths)))
        ranking = np.lexsort([np.arange(len(whole.lengths)), self.ranks(whole, cache)])
        return some_of(whole, np.sort(ranking[:number]), self.name)

    def source(
        self,
        tokenizer: Tokenizer | None,
        *,
        seq_len: int,
        split: str,
        packing: str = "stream",
        cache: str | Path | None = None,
    ) -> Source:
        """Return packed rows of one split: of the training documents those that stay, of the held-out ones all.

        Raises:
          DataError: see `documents`, and `pack`.
        """
        return pack(self.documents(tokenizer, split, cache), packing, seq_len)

    def token_ids(self, tokenizer: Tokenizer | None) -> int | None:
        """Return the size of the corpus's vocabulary.

        Args:
          tokenizer: the tokenizer.
        """
        return self.corpus.token_ids(tokenizer)

    def ranks(self, documents: Documents, cache: str | Path | None = None) -> Float32[np.ndarray, " n"]:
        """Return a number for each document; those with the lowest numbers stay.

        Args:
          documents: the training documents.
          cache: the cache of scores.

        Raises:
          DataError: there are fewer documents than clusters, or the scores cannot be written.
        """
        if self.order == "random":
            return np.random.default_rng(self.seed).random(len(documents.lengths), np.float32)
        scores = self.scores(documents, cache)
        return -scores if self.order == "hardest" else scores

    def scores(self, documents: Documents, cache: str | Path | None = None) -> Float32[np.ndarray, " n"]:
        """Return the cosine distance of each document to the nearest cluster, from the cache if it is there.

        Args:
          documents: the training documents.
          cache: the cache of scores.

        Raises:
          DataError: there are fewer documents than clusters, or the scores cannot be written.
        """
        count = len(documents.lengths)
        if count < self.clusters:
            raise DataError(
                f"pruned.clusters = {self.clusters} is more than the {count} training documents; use fewer."
            )
        facts = f"{documents.fingerprint} {self.clusters} {self.embed!r} {self.seed} 1"
        file = cache_folder(cache).with_name("scores") / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npy"
        try:
            scores = np.load(file)
            if scores.shape == (count,) and scores.dtype == np.float32:
                return scores
            log.warning("%s does not hold the scores of %d documents; they are computed again", file, count)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s cannot be read (%s); its scores are computed again", file, error)
        vectors = np.asarray(self.embed(documents), np.float32)
        if vectors.ndim != 2 or len(vectors) != count:
            raise DataError(
                f"pruned.embed returns an array {vectors.shape} for {count} documents; return a row for each"
            )
        scores = distances(vectors, self.clusters, self.seed)
        _write(file, scores)
        return scores


def distances(vectors: Float32[np.ndarray, "n d"], clusters: int, seed: int = 0) -> Float32[np.ndarray, " n"]:
    """Return the cosine distance of each vector to the nearest of the clusters that k-means finds.

    Args:
      vectors: one for each document; only their directions count.
      clusters: number of clusters.
      seed: of the choice of the first centers and, of very many vectors, of a sample.

    Raises:
      DataError: the vectors are not finite.
    """
    from scipy.cluster.vq import kmeans2

    if not np.isfinite(vectors).all():
        raise DataError("an embedding of a document is not finite; check pruned.embed")
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    draw = np.random.default_rng(seed)
    sample = vectors if len(vectors) <= SAMPLE else vectors[np.sort(draw.choice(len(vectors), SAMPLE, replace=False))]
    first = sample[np.sort(draw.choice(len(sample), clusters, replace=False))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One of the clusters is empty")  # it keeps its center
        centers, _ = kmeans2(sample.astype(np.float64), first.astype(np.float64), iter=25, minit="matrix")
    centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-12)
    nearest = [np.max(part @ centers.T, axis=1) for part in np.array_split(vectors, len(vectors) // 8192 + 1)]
    return (1 - np.concatenate(nearest)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class _Some(Documents):
    """Some documents of a split; a pickle has the whole split's, and which stay."""

    pickled: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pickled


def some_of(whole: Documents, chosen: Int64[np.ndarray, " k"], name: str) -> Documents:
    """Return some documents.

    Args:
      whole: documents.
      chosen: their indices, ascending.
      name: name of the smaller corpus.
    """
    digest = hashlib.sha256(f"{whole.fingerprint} ".encode() + np.ascontiguousarray(chosen, "<i8").tobytes())
    fields = {f: getattr(whole, f) for f in Documents.__dataclass_fields__}
    smaller = _Some(**fields, pickled=(some_of, (whole, chosen, name)))
    starts, lengths = whole.starts[chosen], whole.lengths[chosen]
    return replace(smaller, name=name, fingerprint=digest.hexdigest(), starts=starts, lengths=lengths)


def _write(file: Path, scores: Float32[np.ndarray, " n"]) -> None:
    """Write scores under a temporary name first, so that other processes never see part of them."""
    partial = file.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            np.save(out, scores)
        os.replace(partial, file)
    except OSError as error:
        raise DataError(
            f"cannot write the scores {file} ({error.strerror or error}); set JAXSCALE_CACHE to a folder that can be "
            "written and has space."
        ) from error
