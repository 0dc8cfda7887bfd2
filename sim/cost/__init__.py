"""Seconds and bytes: compute, network, collectives, memory, energy and money."""
