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
from jaxscale.interop.fields import LARGEST, short
from jaxscale.interop.gguf.file import GGUFFile
from jaxscale.interop.gguf.keys import Keys
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
_EPSILON = "attention.layer_norm_rms_epsilon"
_NEEDED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", _EPSILON)
_FLOATS = (_EPSILON, *_CAPS, "rope.freq_base_swa")
"""Keys that are no whole numbers."""
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "rope.scaling.attn_factor": (1, 0),
    "rope.scaling.yarn_attn_factor": (1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.freq_base_swa": (0,),
    **dict.fromkeys(_CAPS, (0,)),
}
"""Values with which keys that change what a model computes have no effect."""
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
        keys = Keys(file.metadata, f"{self.name}.", str(file.path))
        fields = {**_COMMON, **self.fields}
        config: Config = {"model_type": self.family}
        for key, field in fields.items():
            if key not in keys and key not in _NEEDED:
                continue
            most = len(file.tensors) if key == "block_count" else LARGEST  # each block has tensors
            config[field] = _shortest(keys.number(key)) if key in _FLOATS else keys.whole(key, 1, most)
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        rotated = keys.whole("rope.dimension_count", 1, default=None)
        if rotated is not None and config.setdefault("head_dim", rotated) != rotated:
            raise CheckpointError(f"{file.path} rotates a part of each head, which is not supported in GGUF files")
        self._check(keys, config)
        embedding = file.tensors.get("token_embd.weight")
        config["vocab_size"] = embedding.shape[0] if embedding else keys.whole("vocab_size", 1)
        config["tie_word_embeddings"] = "output.weight" not in file.tensors
        config["rope_theta"] = _shortest(keys.number("rope.freq_base", 1.0, 10000.0))
        scaling = _read_scaling(keys, file, config)
        if scaling:
            config["rope_scaling"] = scaling
        ids = Keys(file.metadata, "tokenizer.ggml.", str(file.path))
        for which in ("bos_token_id", "eos_token_id"):
            if which in ids:
                config[which] = ids.whole(which, most=2**32 - 1)
        self.extra(config)
        return config

    def _check(self, keys: Keys, config: Config) -> None:
        """Check that no key that changes what the model computes would be ignored."""
        for key, known in _FIXED.items():
            if key not in self.fields:
                keys.only(key, *known, why="only its default is supported")
        if "attention.sliding_window" not in self.fields:
            window = keys.whole("attention.sliding_window", default=0)
            if 0 < window < config.get("max_position_embeddings", LARGEST):
                keys.only("attention.sliding_window", 0, why="only whole attention is supported for it")
        per_head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        keys.only("attention.value_length", per_head, why=f"keys have {per_head}")

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


def _read_scaling(keys: Keys, file: GGUFFile, config: Config) -> Config | None:
    """Return the `rope_scaling` of config.json; without a type it is linear, by a factor that may have its old name."""
    kind = keys.text("rope.scaling.type", None)
    factor = keys.number("rope.scaling.factor", default=keys.number("rope.scale_linear", default=0.0)) or 1.0
    if kind not in (None, "none", "linear", "yarn"):
        raise CheckpointError(f"{file.path} has rope.scaling.type = {short(kind)}{near(kind, ['linear', 'yarn'])}")
    mixed = 1 if kind == "yarn" else 0  # what llama.cpp takes for -1
    keys.only("rope.scaling.yarn_ext_factor", -1, mixed, why="only its default is supported")
    if ROPE_FREQS in file.tensors:
        if kind != "none" and factor != 1:
            raise CheckpointError(f"{file.path} has {ROPE_FREQS} and a rope.scaling.factor; supported is one of them")
        return _read_divisors(file, config)
    if kind == "none" or (kind is None and factor == 1):
        return None
    entry: Config = {"rope_type": kind or "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        length = keys.whole("rope.scaling.original_context_length", 1, default=None)
        entry |= {} if length is None else {"original_max_position_embeddings": length}
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                entry[name] = _shortest(keys.number(f"rope.scaling.yarn_{name}"))
    return entry


def _read_divisors(file: GGUFFile, config: Config) -> Config:
    divisors = file.read(ROPE_FREQS).astype(np.float32)
    low, high, length = _LLAMA3
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    largest = _shortest(float(divisors.max(initial=0)))
    valid = divisors.ndim == 1 and 2 * len(divisors) == head_dim and 0 < largest < np.inf
    theta = config["rope_theta"]
    if not valid or not np.allclose(
        rope_divisors(Llama3Scaling(largest, low, high, length), theta, head_dim), divisors, rtol=1e-4
    ):
        raise CheckpointError(f"{file.path} has {ROPE_FREQS} other than Llama 3's, which are not supported")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_type": "llama3", **dict(zip(names, (largest, low, high, length), strict=True))}


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


def _gemma(period: int, largest: int, *caps: float | None) -> Callable[[Config], None]:
    """Fields that llama.cpp has in its code, and its caps where keys are missing; the largest divides otherwise."""

    def extra(config: Config) -> None:
        config["hidden_activation"] = "gelu_pytorch_tanh"
        wide = config["num_hidden_layers"] == largest
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if wide else config.get("head_dim", per_head)
        for name, cap in zip(_CAPS, caps, strict=True):
            config[name] = config.get(name, cap) or None  # 0 is none
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
        "gemma2",
        "gemma2",
        {**_DENSE, **_GEMMA_NORMS},
        {**_GEMMA, **_CAPS},
        unit_offset=True,
        extra=_gemma(2, 46, 50.0, 30.0),
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        {**_DENSE, **_GEMMA_NORMS, **_QK_NORM},
        {
            **_GEMMA,
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        unit_offset=True,
        extra=_gemma(6, 62, None, None),
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
