"""Snapshots in memory: what a lost process held is made again from what the others keep, and no disk is touched.

Every few steps each process copies its part of the state to host memory (replicas deal it among themselves), and sends
pieces of it to others, which keep parities of them. Sources: REFT (arXiv:2310.12670) and Gemini (SOSP 2023).
"""

from jaxscale.train.snapshots.erasure import Code
from jaxscale.train.snapshots.keeper import Keeper
from jaxscale.train.snapshots.peers import JaxMeeting, Meeting, Peers
from jaxscale.train.snapshots.restore import load, newest
from jaxscale.train.snapshots.table import Table
from jaxscale.train.snapshots.taker import Taker, taker

__all__ = ["Code", "JaxMeeting", "Keeper", "Meeting", "Peers", "Table", "Taker", "load", "newest", "taker"]
