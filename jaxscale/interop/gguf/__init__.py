"""GGUF files, the format of llama.cpp: read as a Hugging Face folder, and written from our parameters."""

from jaxscale.interop.gguf.opening import is_gguf, open_gguf, write_companions
from jaxscale.interop.gguf.types import TYPES
from jaxscale.interop.gguf.writing import check_gguf, write_gguf

__all__ = ["TYPES", "check_gguf", "is_gguf", "open_gguf", "write_companions", "write_gguf"]
