"""`labkit train`: a whole training run on real ranks, and its report."""
