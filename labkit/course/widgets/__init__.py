"""What every widget is made of: its static twin, an explorer's frame, a button that runs ranks, links to cells."""
