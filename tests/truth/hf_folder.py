"""A Hugging Face folder of a Llama with random weights, written with the `safetensors` package only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def tensors() -> dict[str, np.ndarray]:
    """Return its tensors, float32."""
    shapes = {"model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,), "lm_head.weight": (96, 32)}
    for i in range(3):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (32, 32) for n in "qkvo"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (48, 32) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (32, 48)
    random = np.random.default_rng(0)
    return {name: 0.2 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, made: dict[str, np.ndarray] | None = None) -> Path:
    """Write the folder, with these tensors or those of `tensors`."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    save_file(tensors() if made is None else made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
