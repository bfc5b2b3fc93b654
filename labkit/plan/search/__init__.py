"""Which plan is the best, why, and how far to trust it."""
