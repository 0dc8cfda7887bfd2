"""One file per published planner, the simplest first."""
