"""What is trained how: a recipe, and how a model falls on the ranks of a layout."""
