"""Floor 0: pure Python. No torch, no processes, no clock."""
