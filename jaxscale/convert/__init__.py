"""Import and export checkpoints of other programs, and merge adapters into their model."""
