"""Derivations on a whiteboard: formulas that people type, read without eval and held against the planner's own laws."""
