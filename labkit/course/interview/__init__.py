"""The mock interview: its questions, its clock, how a typed answer is read, and the report."""
