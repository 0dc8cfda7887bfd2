"""Who computes what: planners, and the search that runs them under a judge and a budget."""

import partition.planners  # noqa: F401 - enters the planners in the registry
from partition.search import PLANNERS, Result, Search, plan, register

__all__ = ["PLANNERS", "Result", "Search", "plan", "register"]
