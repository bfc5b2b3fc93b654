"""Laws of single labs, which nothing else of the planner needs."""
