"""Models larger than the device's memory: layers are loaded one by one, each while the one before computes."""

from jaxscale.infer.streaming.experts import Eviction, ExpertLayers, Hits, LeastRecent, RecentScores
from jaxscale.infer.streaming.layers import Layers, OnHost, Resident, Source
from jaxscale.infer.streaming.start import FROM, stream_model
from jaxscale.infer.streaming.steps import Streamed

__all__ = [
    "FROM",
    "Eviction",
    "ExpertLayers",
    "Hits",
    "Layers",
    "LeastRecent",
    "OnHost",
    "RecentScores",
    "Resident",
    "Source",
    "Streamed",
    "stream_model",
]
