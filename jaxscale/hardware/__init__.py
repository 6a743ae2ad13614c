"""Hardware as data: a file per chip, and topologies by name."""

from jaxscale.hardware.chip import Chip, Link, chip, chip_of, chips, read_chip
from jaxscale.hardware.topology import Topology, topology

__all__ = ["Chip", "Link", "Topology", "chip", "chip_of", "chips", "read_chip", "topology"]
