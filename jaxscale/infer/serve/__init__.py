"""Serving a model over HTTP with OpenAI's interface.

A request passes through these files: `http` (bytes, within limits; `guard`, `inlet`) → `api` → `requests`, `fields`
(JSON to sequences) → `worker` (the one thread that uses the engine) → `pieces` (tokens to text) → `formats` (text to
JSON). `server` holds them together.
"""

from jaxscale.infer.serve.limits import Limits
from jaxscale.infer.serve.requests import Served
from jaxscale.infer.serve.server import Server
from jaxscale.infer.serve.start import engine_of, served_by

__all__ = ["Limits", "Served", "Server", "engine_of", "served_by"]
