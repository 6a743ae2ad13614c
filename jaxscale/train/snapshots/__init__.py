"""Snapshots in host memory: a lost process's state is recomputed from parities on other processes, without a disk.

Every few steps each process copies its shards to host memory (each shard on one replica only) and sends pieces of them
to other processes, which keep parities. Sources: REFT (arXiv:2310.12670) and Gemini (SOSP 2023).
"""

from jaxscale.train.snapshots.erasure import Code
from jaxscale.train.snapshots.keeper import Keeper
from jaxscale.train.snapshots.peers import JaxMeeting, Meeting, Peers
from jaxscale.train.snapshots.restore import load, newest
from jaxscale.train.snapshots.table import Table
from jaxscale.train.snapshots.taker import Taker, taker

__all__ = ["Code", "JaxMeeting", "Keeper", "Meeting", "Peers", "Table", "Taker", "load", "newest", "taker"]
