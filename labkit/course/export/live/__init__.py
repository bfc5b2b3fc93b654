"""Pages that answer in the browser, by labkit's own planner, without a kernel."""
