"""Convert byte-level BPE tokenizers between tokenizer.json and the metadata of GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.data import HFTokenizer
from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import short
from jaxscale.interop.gguf.keys import Keys

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}", "gpt-2": None}
"""How a text is split into words, by llama.cpp's name for it; `None` is GPT-2's way, which tokenizers has built in."""
_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5


def tokenizer_metadata(tokenizer: Any, vocab: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the metadata of a tokenizer; that of a model without one if GGUF cannot express it.

    Args:
      tokenizer: the run's tokenizer.
      vocab: the model's number of token ids; those that the tokenizer lacks become unused tokens.
      say: prints why there is no tokenizer.
    """
    content = json.loads(tokenizer.content) if isinstance(tokenizer, HFTokenizer) else {}
    pre = _pre(content)
    if content.get("model", {}).get("type") != "BPE" or pre is None:
        say("the GGUF file has no tokenizer: only byte-level BPE as of GPT-2, Llama 3 and Qwen 2 is supported")
        return {f"{_KEY}model": "no_vocab"}
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab)], [_UNUSED] * vocab
    for token, i in content["model"]["vocab"].items():
        if i < vocab:
            tokens[i], kinds[i] = token, _NORMAL
    for added in content.get("added_tokens", []):
        if added["id"] < vocab:
            tokens[added["id"]], kinds[added["id"]] = added["content"], _CONTROL if added["special"] else _USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    keys: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds}
    keys |= {"merges": merges} if merges else {}
    opening = tokenizer.opening
    keys |= {"eos_token_id": tokenizer.eos_id, "add_bos_token": bool(opening)}
    keys |= {"bos_token_id": opening[0]} if opening else {}
    return {f"{_KEY}{key}": value for key, value in keys.items()}


def _pre(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name for the way in which a tokenizer.json splits a text, `None` if it has none."""
    first = content.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space", True):
        return None
    if len(parts) == 1:
        return "gpt-2" if parts[0].get("use_regex", True) else None
    pattern = parts[0].get("pattern", {}).get("Regex") if len(parts) == 2 else None
    return next((name for name, known in _PATTERNS.items() if known is not None and known == pattern), None)


def tokenizer_files(
    metadata: Mapping[str, Any], say: Callable[[str], None], what: str = "the GGUF file"
) -> dict[str, Any]:
    """Return the content of tokenizer.json and tokenizer_config.json by name; nothing if it cannot be expressed.

    Args:
      metadata: the metadata of a GGUF file.
      say: prints why there is none.
      what: the file, for messages.

    Raises:
      CheckpointError: a key has a value of another type, or the lists of tokens, types and merges do not fit together.
    """
    keys = Keys(metadata, _KEY, what)
    model, pre, tokens = keys.text("model", None), keys.text("pre", None), keys.strings("tokens", None)
    if model != "gpt2" or pre not in _PATTERNS or tokens is None:
        say(
            f"no tokenizer is imported: that of the GGUF file is {short(model)} ({short(pre)}), and only "
            f"'gpt2' of {', '.join(_PATTERNS)} is supported; put a tokenizer.json beside the file"
        )
        return {}
    kinds = keys.wholes("token_type", [_NORMAL] * len(tokens))
    merges = [m.split(" ") for m in keys.strings("merges", [])]
    if len(kinds) != len(tokens) or any(len(m) != 2 for m in merges):
        raise CheckpointError(f"{what} has {len(tokens)} tokens, {len(kinds)} types, and merges that are not of two")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pattern = _PATTERNS[pre]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    words = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": tokens[i], **flags, "special": kind == _CONTROL}
        for i, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER)
    ]
    last = len(tokens) - 1
    first = keys.whole("bos_token_id", most=last, default=None) if keys.flag("add_bos_token", False) else None
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {**byte_level, "use_regex": True} if pattern is None else words,
        "post_processor": None if first is None else _opening(tokens[first], first),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED},
            "merges": merges,
            "ignore_merges": pre == "llama-bpe",
        },
    }
    ids = {k: keys.whole(f"{k}_id", most=2**32 - 1, default=None) for k in ("bos_token", "eos_token")}
    names = {k: tokens[i] for k, i in ids.items() if i is not None and i <= last}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        about["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": content, "tokenizer_config.json": about}


def _opening(token: str, number: int) -> dict[str, Any]:
    """Return a post-processor that puts a token before every text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1)))
    return {
        "type": "TemplateProcessing",
        "single": [special, one],
        "pair": [special, one, two],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
