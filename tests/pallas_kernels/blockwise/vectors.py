"""What bitsandbytes made on a CPU (blocks of 256), by the rules it is compared by: see `test_quantized`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VECTORS = dict(np.load(Path(__file__).parent / "blockwise8bit.npz"))
"""Maps, tensors with their codes, and five steps of an 8-bit AdamW."""
