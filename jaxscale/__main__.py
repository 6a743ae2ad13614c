"""`python -m jaxscale` is the command `jaxscale`."""

from __future__ import annotations

import sys

from jaxscale.import_path import drop_current_folder

drop_current_folder()  # before anything that is installed is imported

from jaxscale.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
