"""Floor 5: teaching. Showing source, looking at the machine, running a lab without a browser."""
