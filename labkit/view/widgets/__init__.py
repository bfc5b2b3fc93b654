"""Floor 5: widgets. They hold controls and show pictures; the arithmetic lives below."""
