"""Serving a model over HTTP, as OpenAI's clients ask for it.

A request goes down these files: `http` (bytes, within bounds; `guard`, `inlet`) → `api` → `asked`, `fields` (JSON to
texts) → `worker` (the one thread that has the engine) → `pieces` (tokens to text) → `formats` (text to JSON). `server`
holds them together.
"""

from jaxscale.infer.serve.asked import Served
from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.server import Server
from jaxscale.infer.serve.start import engine_of, served_by

__all__ = ["Limits", "Served", "Server", "engine_of", "served_by"]
