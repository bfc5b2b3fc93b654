"""The mock interview: its questions, its clock, and the report."""
