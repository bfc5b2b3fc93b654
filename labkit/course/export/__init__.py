"""The labs as a static site."""
