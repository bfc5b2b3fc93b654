"""Widgets of single labs, each beside its picture, and the design cases that the planner's panel asks about."""
