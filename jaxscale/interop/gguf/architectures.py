"""llama.cpp's architectures: names of tensors and metadata, as ours of Hugging Face.

Sources: `convert_hf_to_gguf.py` and `src/llama-model.cpp` of https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxscale.errors import CheckpointError, near
from jaxscale.interop.fields import short
from jaxscale.interop.gguf.file import GGUFFile
from jaxscale.nn import LinearScaling, Llama3Scaling, Rotary, YarnScaling

Config = dict[str, Any]
"""Fields of a config.json."""

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {f"attn_{a}": f"self_attn.{b}_proj" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {f"ffn_{a}": f"mlp.{a}_proj" for a in ("gate", "up", "down")}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GEMMA = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
ROPE_FREQS = "rope_freqs.weight"
"""Tensor with what the angles of Llama 3's scaling are divided by."""
_LLAMA3 = (1.0, 4.0, 8192)
"""Low and high factor and the length before scaling of all Llama 3 models; files have only the resulting divisors."""


def _no_more(config: Config) -> None:
    """Add no fields."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Args:
      name: `general.architecture`.
      family: the `model_type` of Hugging Face.
      layer: names of tensors within a block -> their names within a layer; "{x}" numbers experts, which llama.cpp has
        in one tensor.
      fields: keys of the metadata, without the name in front -> fields of config.json.
      experts: whether it is chosen for files with experts.
      interleaved: whether the rows of queries and keys are reordered: ours pairs dimension i with i + n/2, theirs 2i
        with 2i + 1.
      unit_offset: whether scales of norms are stored plus one.
      extra: adds fields of config.json that the metadata does not have.
    """

    name: str
    family: str
    layer: Mapping[str, str]
    fields: Mapping[str, str]
    experts: bool = False
    interleaved: bool = False
    unit_offset: bool = False
    extra: Callable[[Config], None] = _no_more

    def theirs(self, name: str) -> tuple[str, int | None] | None:
        """Return a tensor's name in GGUF, and the number of the expert in it; `None` for unknown tensors.

        Args:
          name: its name in a Hugging Face folder.
        """
        module, _, kind = name.rpartition(".")
        for a, b in _ENDS.items():
            if module == b:
                return f"{a}.{kind}", None
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        for a, b in self.layer.items() if match else ():
            assert match
            inner = re.fullmatch(re.escape(b).replace(r"\{x\}", r"(\d+)"), match[2])
            if inner:
                return f"blk.{match[1]}.{a}.{kind}", int(inner[1]) if inner.lastindex else None
        return None

    def ours(self, name: str, experts: int) -> list[str]:
        """Return the names in a Hugging Face folder of a GGUF tensor: one, or one per expert; none if unknown.

        Args:
          name: its name in GGUF.
          experts: the number of experts.
        """
        module, _, kind = name.rpartition(".")
        if module in _ENDS:
            return [f"{_ENDS[module]}.{kind}"]
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
        inner = self.layer.get(match[2]) if match else None
        if match is None or inner is None:
            return []
        full = f"model.layers.{match[1]}.{inner}.{kind}"
        return [full.replace("{x}", str(x)) for x in range(experts)] if "{x}" in full else [full]

    def heads(self, name: str, config: Config) -> int | None:
        """Return the number of heads whose rows are reordered in a tensor, `None` if they are not.

        Args:
          name: the tensor's name in GGUF.
          config: fields of config.json.
        """
        if not self.interleaved:
            return None
        kinds = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        parts = name.split(".")
        return config[kinds[parts[-2]]] if len(parts) > 2 and parts[-2] in kinds else None

    def offset(self, name: str) -> bool:
        """Whether a tensor, by its name in GGUF, is the scale of a norm that is stored plus one."""
        return self.unit_offset and name.endswith("norm.weight")

    def config(self, file: GGUFFile) -> Config:
        """Return the fields of config.json that a file's metadata and tensors stand for.

        Args:
          file: the file.

        Raises:
          CheckpointError: a key is missing, or positions are scaled in an unknown way.
        """
        values = {k.removeprefix(f"{self.name}."): v for k, v in file.metadata.items() if k.startswith(f"{self.name}.")}
        config: Config = {"model_type": self.family}
        for key, field in {**_COMMON, **self.fields}.items():
            if key in values:
                config[field] = _shortest(values[key])
        for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
            if field not in config:
                key = next(k for k, f in _COMMON.items() if f == field)
                raise CheckpointError(f"{file.path} has no {self.name}.{key}")
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        if "rope.dimension_count" in values:
            config.setdefault("head_dim", values["rope.dimension_count"])
            if values["rope.dimension_count"] != config["head_dim"]:
                raise CheckpointError(f"{file.path} rotates a part of each head, which is not supported in GGUF files")
        embedding = file.tensors.get("token_embd.weight")
        config["vocab_size"] = embedding.shape[0] if embedding else values.get("vocab_size")
        config["tie_word_embeddings"] = "output.weight" not in file.tensors
        config["rope_theta"] = _shortest(values.get("rope.freq_base", 10000.0))
        scaling = _read_scaling(values, file)
        if scaling:
            config["rope_scaling"] = scaling
        for which in ("bos", "eos"):
            if f"tokenizer.ggml.{which}_token_id" in file.metadata:
                config[f"{which}_token_id"] = file.metadata[f"tokenizer.ggml.{which}_token_id"]
        self.extra(config)
        return config

    def metadata(self, config: Config, positions: Rotary) -> dict[str, Any]:
        """Return the metadata of a config; what it cannot express shows when it is read again.

        Args:
          config: fields of config.json, as our families write them.
          positions: the model's positions.
        """
        fields = {key: config[f] for key, f in {**_COMMON, **self.fields}.items() if config.get(f) is not None}
        fields |= {"attention.value_length": config["head_dim"], "rope.dimension_count": config["head_dim"]}
        fields |= {"rope.freq_base": float(positions.theta), "vocab_size": config["vocab_size"]}
        scaling = positions.scaling
        if isinstance(scaling, YarnScaling):
            fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(scaling.factor)}
            fields |= {"rope.scaling.original_context_length": scaling.original_length}
        elif isinstance(scaling, LinearScaling):
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
        return {"general.architecture": self.name, **{f"{self.name}.{k}": v for k, v in fields.items()}}


def _shortest(value: Any) -> Any:
    """Return a float32 number of the file as the float of its shortest decimal form: 1e-5, not 9.99999974e-6."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_scaling(values: Mapping[str, Any], file: GGUFFile) -> Config | None:
    if ROPE_FREQS in file.tensors:
        divisors = file.read(ROPE_FREQS).astype(np.float32)
        low, high, length = _LLAMA3
        factor = _shortest(float(divisors.max()))
        theta = values.get("rope.freq_base", 10000.0)
        scaling = Llama3Scaling(factor, low, high, length)
        if not np.allclose(rope_divisors(scaling, theta, 2 * len(divisors)), divisors, rtol=1e-4):
            raise CheckpointError(f"{file.path} has {ROPE_FREQS} other than Llama 3's, which are not supported")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return {"rope_type": "llama3", **dict(zip(names, (factor, low, high, length), strict=True))}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{file.path} has rope.scaling.type = {short(kind)}{near(str(kind), ['linear', 'yarn'])}")
    entry: Config = {"rope_type": kind, "factor": _shortest(values.get("rope.scaling.factor", 1.0))}
    if kind == "yarn" and "rope.scaling.original_context_length" in values:
        entry["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
    return entry


def rope_divisors(scaling: Llama3Scaling, theta: float, head_dim: int) -> np.ndarray:
    """Return what Llama 3's scaling divides each rotary frequency by, float32 (head_dim / 2).

    Args:
      scaling: the scaling.
      theta: the base.
      head_dim: width of a head.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return (frequencies / scaling(frequencies, theta)[0]).astype(np.float32)


def _llama(config: Config) -> None:
    config["hidden_act"] = "silu"


def _gemma(period: int, largest: int) -> Callable[[Config], None]:
    """Fields that llama.cpp has in its code; the largest model divides scores by another width."""

    def extra(config: Config) -> None:
        config["hidden_activation"] = "gelu_pytorch_tanh"
        wide = config["num_hidden_layers"] == largest
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if wide else config.get("head_dim", per_head)
        for cap in _CAPS:
            config.setdefault(cap, None)
        sliding = ["sliding_attention", "full_attention"]
        config["layer_types"] = [sliding[(i + 1) % period == 0] for i in range(config["num_hidden_layers"])]

    return extra


def _moe(config: Config) -> None:
    config |= {"hidden_act": "silu", "norm_topk_prob": True}
    config["num_experts"] = config.pop("num_local_experts", None)


_DENSE = {**_ATTENTION, **_MLP}
_MIXTRAL = {
    f"ffn_{a}_exps": f"block_sparse_moe.experts.{{x}}.{b}" for a, b in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_QWEN_MOE = {f"ffn_{a}_exps": f"mlp.experts.{{x}}.{a}_proj" for a in ("gate", "up", "down")}

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "llama", {**_DENSE, **_NORMS}, {}, interleaved=True, extra=_llama),
    Architecture(
        "llama",
        "mixtral",
        {**_ATTENTION, **_NORMS, **_MIXTRAL, "ffn_gate_inp": "block_sparse_moe.gate"},
        _EXPERTS,
        experts=True,
        interleaved=True,
        extra=_llama,
    ),
    Architecture("qwen2", "qwen2", {**_DENSE, **_NORMS}, {}, extra=_llama),
    Architecture("qwen3", "qwen3", {**_DENSE, **_NORMS, **_QK_NORM}, {}, extra=_llama),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        {**_ATTENTION, **_NORMS, **_QK_NORM, **_QWEN_MOE, "ffn_gate_inp": "mlp.gate"},
        {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        experts=True,
        extra=_moe,
    ),
    Architecture(
        "gemma2", "gemma2", {**_DENSE, **_GEMMA_NORMS}, {**_GEMMA, **_CAPS}, unit_offset=True, extra=_gemma(2, 46)
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        {**_DENSE, **_GEMMA_NORMS, **_QK_NORM},
        {**_GEMMA, "final_logit_softcapping": "final_logit_softcapping"},
        unit_offset=True,
        extra=_gemma(6, 62),
    ),
)
"""All architectures that are read and written."""


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file.

    Args:
      file: the file.

    Raises:
      CheckpointError: it is unknown.
    """
    name = file.metadata.get("general.architecture")
    experts = bool(file.metadata.get(f"{name}.expert_count"))
    match = next((a for a in ARCHITECTURES if a.name == name and a.experts == experts), None)
    if match is None:
        known = {a.name for a in ARCHITECTURES}
        more = " with experts" if experts and name in known else ""
        raise CheckpointError(
            f"{file.path} has the architecture {short(name)}{more}{near(str(name), known)}; use its Hugging Face folder"
        )
    return match
