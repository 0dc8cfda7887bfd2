"""One file per planner, the simplest (`random`) first as the worked example; importing one enters it in the registry."""

from partition.planners import flashflex, megatron, random

__all__ = ["flashflex", "megatron", "random"]
