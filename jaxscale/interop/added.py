"""Read a Hugging Face checkpoint with PEFT adapters merged into its matrices as they are read."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import Fields, plain_pattern, read_json, short
from jaxscale.interop.links import check_links
from jaxscale.interop.peft import ADAPTER_CONFIG, ADAPTER_TENSORS, PREFIX, WEIGHT
from jaxscale.interop.safetensors import Stored, Tensors, dtype_of, is_real, read_header

_KEY = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])" + re.escape(WEIGHT))
_BASE_UNCHANGED = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that do not change the base model's matrices; the others do."""


class Added(Tensors):
    """The tensors of a model; those with adapters as float32 W + scale · B · A (W + scale · (B · A)ᵀ for GPT-2).

    Args:
      tensors: the model's tensors.
      adapters: a PEFT folder with LoRA adapters (Hu et al. 2021).
      prefix: prefix that the model's tensor names may lack.

    Raises:
      CheckpointError: the folder has no adapters, pickled ones, other than LoRA, or some that do not fit the model.
    """

    def __init__(self, tensors: Tensors, adapters: str | Path, prefix: str = ""):
        self._tensors, self.folder = tensors, tensors.folder
        self.adapters = Path(adapters)
        check_links(self.adapters)
        if not (self.adapters / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"{self.adapters} holds no adapters (no {ADAPTER_CONFIG})")
        about = Fields(read_json(self.adapters / ADAPTER_CONFIG), str(self.adapters / ADAPTER_CONFIG))
        self._about = about
        about.only("peft_type", "LORA")
        about.only("use_dora", False)
        about.only("use_qalora", False)
        about.only("layer_replication", None)
        about.only("init_lora_weights", *_BASE_UNCHANGED)
        self._turned = about.only("fan_in_fan_out", False, True)
        self._pairs: dict[str, dict[str, Float[np.ndarray, "x y"]]] = {}
        modules: dict[str, str] = {}
        for key, tensor in _header(self.adapters).items():
            match = _KEY.fullmatch(key)
            name = "" if match is None else self._name(match["module"] + WEIGHT, prefix)
            if match is None or name not in self:
                raise CheckpointError(
                    f"{self.adapters / ADAPTER_TENSORS} has {key}, but {self.folder} has no matrix for it"
                    f"{near(key, [f'{PREFIX}{k}' for k in self])}"
                )
            self._pairs.setdefault(name, {})[match["side"]] = _read(tensor, key)
            modules[name] = match["module"]
        if not modules:
            raise CheckpointError(f"{self.adapters / ADAPTER_TENSORS} holds no tensor")
        self._scales = {name: self._scale(name, module) for name, module in modules.items()}

    def __getitem__(self, name: str) -> Stored:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _name(self, name: str, prefix: str) -> str:
        return name if name in self else name.removeprefix(prefix)

    def _scale(self, name: str, module: str) -> float:
        """Check the shapes of a module's adapters and return their scale."""
        pair, shape = self._pairs[name], self[name].shape
        if set(pair) != {"A", "B"}:
            raise CheckpointError(f"{self.adapters / ADAPTER_TENSORS} has only one of two matrices for {name}")
        a, b = pair["A"], pair["B"]
        product = (b.shape[0], a.shape[-1]) if a.ndim == b.ndim == 2 and 0 < len(a) == b.shape[1] else None
        if product is None or shape not in (product, product[::-1] if self._turned else product):
            raise CheckpointError(
                f"{self.adapters / ADAPTER_TENSORS} has matrices of {list(a.shape)} and {list(b.shape)} for {name}, "
                f"whose shape is {list(shape)}"
            )
        if not is_real(dtype_of(self[name], name)):
            raise CheckpointError(
                f"the tensor {name} has dtype {self[name].dtype}, but adapters need a floating-point one"
            )
        rank, alpha = len(a), self._alpha(module)
        return alpha / (math.sqrt(rank) if self._about.only("use_rslora", False, True) else rank)

    def _alpha(self, module: str) -> float:
        own: Any = self._about.get("alpha_pattern", {})
        if not isinstance(own, Mapping):
            raise CheckpointError(f"{self._about.what} has alpha_pattern = {short(own)}, which is not an object")
        for pattern in own:
            plain_pattern(pattern, f"alpha_pattern of {self._about.what}")
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return Fields(dict(own), f"alpha_pattern of {self._about.what}").number(pattern)
        return self._about.number("lora_alpha")

    @contextmanager
    def reading(self, name: str) -> Iterator[np.ndarray]:
        """See `Tensors.reading`."""
        with self._tensors.reading(name) as tensor:
            pair = self._pairs.get(name)
            yield tensor if pair is None else self._sum(name, tensor, **pair)

    def _sum(self, name: str, tensor: np.ndarray, A: np.ndarray, B: np.ndarray) -> np.ndarray:  # noqa: N803
        more = np.float32(self._scales[name]) * (B @ A)
        turned = self._turned if len(more) == more.shape[1] else more.shape != tensor.shape
        return tensor.astype(np.float32) + (more.T if turned else more)

    def fingerprint(self) -> list[list[Any]]:
        """See `Tensors.fingerprint`; includes the adapters."""
        files = [self.adapters / n for n in (ADAPTER_CONFIG, ADAPTER_TENSORS)]
        return [*self._tensors.fingerprint(), *([f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files)]


def is_adapters(folder: Path) -> bool:
    """Whether a folder has PEFT adapters and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def _header(folder: Path) -> dict[str, Stored]:
    file = folder / ADAPTER_TENSORS
    if not file.is_file() and (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder} has pickled adapters only, and unpickling can run any code; convert them to safetensors: "
            "PeftModel.from_pretrained(...).save_pretrained(DIR)"
        )
    return read_header(file)


def _read(tensor: Stored, key: str) -> Float[np.ndarray, "x y"]:
    """Read a small tensor as float32."""
    dtype = dtype_of(tensor, key)
    count = math.prod(tensor.shape)
    return np.fromfile(tensor.file, dtype, count, offset=tensor.start).reshape(tensor.shape).astype(np.float32)
