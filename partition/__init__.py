"""Who computes what: planners, and the search that runs them under a judge and a budget."""
