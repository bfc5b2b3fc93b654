"""How ranks, parameters and matrices are cut: layouts, buckets, parameter groups, owners."""
