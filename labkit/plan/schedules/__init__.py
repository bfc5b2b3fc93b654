"""Programs of a pipeline: made, published, as text; validated and simulated."""
