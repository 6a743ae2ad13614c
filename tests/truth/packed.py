"""Quantised tensors as other programs store them, packed bit by bit from the descriptions of their layouts.

Each function takes a matrix (outputs, inputs) and returns the tensors by the ending of their names, and the values,
float64, that they stand for.
"""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np

Packed = tuple[dict[str, np.ndarray], np.ndarray]


def bits_to_words(codes: list[int], bits: int) -> list[int]:
    """Pack codes one after another, the lowest bit first, into words of 32 bits."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return [(number >> (32 * j)) & 0xFFFFFFFF for j in range(math.ceil(len(codes) * bits / 32))]


def words(rows: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row; int32 (rows, words)."""
    return np.array([bits_to_words([int(c) for c in row], bits) for row in rows], np.uint32).view(np.int32)


def fp8(matrix: np.ndarray, block: tuple[int, int]) -> Packed:
    """DeepSeek-V3: e4m3 and a scale per block; those at the edges are smaller."""
    rows, columns = matrix.shape
    scale = np.zeros((math.ceil(rows / block[0]), math.ceil(columns / block[1])), np.float32)
    codes, values = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn), np.zeros(matrix.shape)
    for i, j in np.ndindex(*scale.shape):
        at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scale[i, j] = abs(matrix[at]).max() / 448
        codes[at] = (matrix[at] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
        values[at] = codes[at].astype(np.float64) * scale[i, j]
    return {".weight": codes, ".weight_scale_inv": scale}, values


def integers(matrix: np.ndarray, bits: int, group: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return codes (o, i), zeros and float16 scales (o, groups) of asymmetric integers, and their values."""
    groups = int(group.max()) + 1
    zeros = np.zeros((len(matrix), groups), np.int64)
    scale = np.zeros(zeros.shape, np.float16)
    codes, values = np.zeros(matrix.shape, np.int64), np.zeros(matrix.shape)
    for g in range(groups):
        part = matrix[:, group == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale[:, g] = (high - low) / (2**bits - 1)
        step = scale[:, g].astype(np.float64)
        zeros[:, g] = np.clip(np.round(-low / step), 0, 2**bits - 1)
        code = np.clip(np.round(part / step[:, None]) + zeros[:, g : g + 1], 0, 2**bits - 1)
        codes[:, group == g] = code
        values[:, group == g] = (code - zeros[:, g : g + 1]) * step[:, None]
    return codes, zeros, scale, values


def gptq(matrix: np.ndarray, bits: int, group: np.ndarray, *, minus_one: bool = True, index: bool = True) -> Packed:
    """AutoGPTQ: codes packed along the inputs, zeros (minus one) along the outputs."""
    codes, zeros, scale, values = integers(matrix, bits, group)
    stored = (zeros - 1) % 2**bits if minus_one else zeros
    tensors = {".qweight": words(codes, bits).T.copy(), ".qzeros": words(stored.T, bits), ".scales": scale.T.copy()}
    return {**tensors, **({".g_idx": group.astype(np.int32)} if index else {})}, values


def awq(matrix: np.ndarray, size: int) -> Packed:
    """AutoAWQ: in a word, from the lowest four bits on, outputs 0, 2, 4, 6, 1, 3, 5 and 7."""
    codes, zeros, scale, values = integers(matrix, 4, np.arange(matrix.shape[1]) // size)

    def pack(rows: np.ndarray) -> np.ndarray:
        eights = rows.reshape(len(rows), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(eights.reshape(len(rows), -1), 4)

    return {".qweight": pack(codes.T), ".qzeros": pack(zeros.T), ".scales": scale.T.copy()}, values


def signed(matrix: np.ndarray, bits: int, size: int, *, symmetric: bool = True) -> Packed:
    """compressed-tensors, pack-quantized: signed codes plus half of the range; zeros packed along the outputs."""
    codes, zeros, scale, values = integers(matrix, bits, np.arange(matrix.shape[1]) // size)
    half = 2 ** (bits - 1)
    if symmetric:
        zeros = np.full_like(zeros, half)
        values = (codes - half) * np.repeat(scale.astype(np.float64), size, 1)[:, : matrix.shape[1]]
    tensors = {".weight_packed": words(codes, bits), ".weight_shape": np.array(matrix.shape, np.int64)}
    tensors |= {} if symmetric else {".weight_zero_point": words(zeros.T, bits).T.copy()}
    return {**tensors, ".weight_scale": scale}, values


_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _nibbles(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest e2m1 codes, and their values."""
    codes = np.abs(abs(values)[..., None] - np.array(_E2M1)).argmin(-1)
    nearest = np.array(_E2M1)[codes] * np.sign(values)
    return codes + 8 * (values < 0), nearest


def mxfp4(experts: np.ndarray) -> Packed:
    """GPT-OSS: (experts, outputs, inputs), 32 inputs a block; values (experts, inputs, outputs)."""
    blocks = experts.reshape(*experts.shape[:2], -1, 32).astype(np.float64)
    exponent = np.floor(np.log2(abs(blocks).max(-1) / 4))
    codes, nearest = _nibbles(blocks / 2 ** exponent[..., None])
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    values = (nearest * 2 ** exponent[..., None]).reshape(experts.shape).transpose(0, 2, 1)
    return {"_blocks": packed, "_scales": (exponent + 127).astype(np.uint8)}, values


def nvfp4(matrix: np.ndarray) -> Packed:
    """compressed-tensors, nvfp4-pack-quantized: 16 inputs share a scale in e4m3, which is divided by a global one."""
    blocks = matrix.reshape(len(matrix), -1, 16).astype(np.float64)
    whole = np.float32(448 * 6 / abs(blocks).max())
    scale = (abs(blocks).max(-1) / 6 * whole).astype(ml_dtypes.float8_e4m3fn)
    real = (scale.astype(np.float32) / whole).astype(np.float64)
    codes, nearest = _nibbles(blocks / real[..., None])
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8).reshape(len(matrix), -1)
    tensors = {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": whole.reshape(1)}
    return tensors, (nearest * real[..., None]).reshape(matrix.shape)


def bytes_with_scales(matrix: np.ndarray, codes: np.dtype, largest: float) -> Packed:
    """compressed-tensors, int- and float-quantized: one code in a byte, and a bfloat16 scale per output."""
    scale = (abs(matrix).max(1, keepdims=True) / largest).astype(ml_dtypes.bfloat16)
    ratio = matrix / scale.astype(np.float64)
    code = np.clip(np.round(ratio) if codes == np.int8 else ratio, -largest, largest).astype(codes)
    return {".weight": code, ".weight_scale": scale}, code.astype(np.float64) * scale.astype(np.float64)


NF4_LIKE = np.array([-1, -0.7, -0.52, -0.4, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1], "f4")
"""Sixteen values; a file brings its own."""


def four_bits(matrix: np.ndarray, size: int, table: np.ndarray = NF4_LIKE) -> Packed:
    """bitsandbytes: codes of a table, the first in the upper half of a byte; blocks of the flat matrix."""
    flat = matrix.reshape(-1)
    absmax = np.array([abs(flat[i : i + size]).max() for i in range(0, flat.size, size)], np.float32)
    each = np.repeat(absmax, size)[: flat.size].astype(np.float64)
    codes = np.abs((flat / each)[:, None] - table.astype(np.float64)).argmin(1)
    packed = (16 * codes[0::2] + codes[1::2]).astype(np.uint8).reshape(-1, 1)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": list(matrix.shape)}
    tensors = {".weight": packed, ".weight.absmax": absmax, ".weight.quant_map": table}
    tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (table[codes] * each).reshape(matrix.shape)


def eight_bits(matrix: np.ndarray) -> Packed:
    """bitsandbytes: int8 with the largest absolute value of each output."""
    scb = abs(matrix).max(1).astype(np.float32)
    codes = np.round(matrix / scb[:, None] * 127).astype(np.int8)
    tensors = {".weight": codes, ".SCB": scb, ".weight_format": np.zeros((), np.uint8)}
    return tensors, codes * (scb.astype(np.float64) / 127)[:, None]
