"""One file per planner, the simplest (`random`) first as the worked example; importing one enters it in the registry."""

from partition.planners import amp, exhaustive, flashflex, holmes, megatron, metis, motley, pipette, random, sailor, varuna

__all__ = ["amp", "exhaustive", "flashflex", "holmes", "megatron", "metis", "motley", "pipette", "random", "sailor", "varuna"]
