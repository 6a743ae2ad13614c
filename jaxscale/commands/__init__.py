"""What `jaxscale` does, a file per command: `add` says what it takes, `run` does it and returns the exit code."""
