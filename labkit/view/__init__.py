"""Floor 4: pictures. Pure functions from data to SVG."""
