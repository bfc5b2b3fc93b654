"""Plans as the configurations and commands of other tools: one file a tool, and a row in targets.py."""
