"""`python -m jaxscale` is the command `jaxscale`."""

from __future__ import annotations

import sys

from jaxscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
