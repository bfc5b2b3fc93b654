"""The parts of all widgets: the static twin, an explorer's frame, a button that runs ranks, links to cells."""
