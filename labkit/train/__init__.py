"""Floor 2: the parts of a training step that need one rank only."""
