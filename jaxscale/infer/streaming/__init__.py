"""Models that are larger than the device's memory: layers are brought one by one, the next while one computes."""

from jaxscale.infer.streaming.engine import StreamingEngine
from jaxscale.infer.streaming.layers import Layers, OnHost, Resident, Source
from jaxscale.infer.streaming.start import FROM, stream_model

__all__ = ["FROM", "Layers", "OnHost", "Resident", "Source", "StreamingEngine", "stream_model"]
