"""Widgets for single labs, each beside its picture, and the design cases for the planner's panel."""
