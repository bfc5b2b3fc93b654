"""Floor 4: pictures. Pure functions from data to SVG; the only place where bytes become KiB and seconds become ms."""
