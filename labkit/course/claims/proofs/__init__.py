"""The proofs, by topic: in each file a function `cNN` for every claim of its topic."""
