"""Algorithms with explicit collectives: everything that runs under `shard_map`."""

from jaxscale.parallel.anywhere import anywhere
from jaxscale.parallel.arithmetic import Arithmetic, Cast, Numbers
from jaxscale.parallel.chunks import chunk_bytes, chunks_of, from_chunks
from jaxscale.parallel.collective_matmul import gather_matmul, matmul_scatter, why_no_overlap
from jaxscale.parallel.copies import average_copies, each_copy, mean_copy, why_no_copies, why_no_gathers
from jaxscale.parallel.cross_entropy import sharded_cross_entropy
from jaxscale.parallel.dispatch import Capacity, Choices, Slots, wire_rows
from jaxscale.parallel.embedding import sharded_lookup
from jaxscale.parallel.ends import logsumexp_over, share_over, sum_over
from jaxscale.parallel.expert_products import Biases, Weights
from jaxscale.parallel.experts import expert_mlp
from jaxscale.parallel.linear_attention import linear_attention
from jaxscale.parallel.linear_scan import linear_scan
from jaxscale.parallel.partial_sums import ChunkedSum, StarSum, chosen_sums, summed_matmul
from jaxscale.parallel.reductions import sharded_logsumexp
from jaxscale.parallel.sharded import cut_already, sharded_op
from jaxscale.parallel.short_convolution import short_convolution
from jaxscale.parallel.vocabulary import (
    Logits,
    logprobs_at,
    token_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
    top_logprobs,
    vocabulary_sum,
)
from jaxscale.parallel.weight import Dense, Weight, as_weight
from jaxscale.parallel.wires import (
    Float32Wire,
    IntegerWire,
    SignWire,
    Wire,
    host_arrays,
)

__all__ = [
    "Arithmetic",
    "Biases",
    "Capacity",
    "Cast",
    "Choices",
    "ChunkedSum",
    "Dense",
    "Float32Wire",
    "IntegerWire",
    "Logits",
    "Numbers",
    "SignWire",
    "Slots",
    "StarSum",
    "Weight",
    "Weights",
    "Wire",
    "anywhere",
    "as_weight",
    "average_copies",
    "chosen_sums",
    "chunk_bytes",
    "chunks_of",
    "expert_mlp",
    "cut_already",
    "each_copy",
    "from_chunks",
    "gather_matmul",
    "host_arrays",
    "linear_attention",
    "linear_scan",
    "logprobs_at",
    "logsumexp_over",
    "matmul_scatter",
    "mean_copy",
    "share_over",
    "sharded_cross_entropy",
    "sharded_logsumexp",
    "sharded_lookup",
    "sharded_op",
    "short_convolution",
    "sum_over",
    "summed_matmul",
    "token_entropy",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "top_logprobs",
    "vocabulary_sum",
    "why_no_copies",
    "why_no_gathers",
    "why_no_overlap",
    "wire_rows",
]
