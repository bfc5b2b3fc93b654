"""Floor 2: measuring."""
