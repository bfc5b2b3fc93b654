"""Derivations on a whiteboard: typed formulas, read without eval and compared with the planner's own laws."""
