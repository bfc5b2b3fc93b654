"""The proofs, by topic: each file has a function `cNN` for every claim on its topic."""
