"""Processes that train apart and meet over TCP: membership, all-reduce with repeats, and state for newcomers.

It uses sockets of the standard library and NumPy, no JAX. A *coordinator* keeps the list of members; a *member* is one
process that trains. Arrays go from member to member, and only short messages to the coordinator.
"""

from jaxscale.peers.coordinator import Coordinator
from jaxscale.peers.member import Joined, Member, PeerRefused
from jaxscale.peers.messages import TOKEN, Channel, PeerLost, address_of, token_for
from jaxscale.peers.reduce import Errors, Packing, Reduced, all_reduce

__all__ = [
    "TOKEN",
    "Channel",
    "Coordinator",
    "Errors",
    "Joined",
    "Member",
    "Packing",
    "PeerLost",
    "PeerRefused",
    "Reduced",
    "address_of",
    "all_reduce",
    "token_for",
]
