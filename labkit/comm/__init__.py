"""Floor 1: the wire. The only folder that imports torch.distributed."""
