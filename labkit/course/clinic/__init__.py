"""The clinic: broken programs, the probes that show what is wrong with them, and the game of finding it."""
