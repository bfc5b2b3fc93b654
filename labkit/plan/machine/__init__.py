"""What it runs on: devices, links, nodes, and what a collective costs on them."""
