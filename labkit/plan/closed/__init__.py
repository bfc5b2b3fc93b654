"""Closed forms of what a rank holds: tables of what layers save, and sums of a few terms at named moments."""
