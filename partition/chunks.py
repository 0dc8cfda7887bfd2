"""Several ranges of layers in each stage, made of drafts that have one: interleaved 1F1B, and ZB-V.

A stage keeps its layers' number, its devices and its recomputation; a micro-batch visits it once for each range. So a pipeline
takes as long for a micro-batch, and fills and drains in a part of the time, at the price of as many times the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partition.drafts import Draft, Settings
from partition.layers import even_split
from sim.spec.plan import LayerRange, Pipeline

CHUNKS = (2, 3, 4, 6, 8)
"""Ranges of layers that interleaved stages are tried with, as far as each has so many layers."""


def chunked(draft: Draft, settings: Settings) -> Iterator[tuple[Draft, Settings]]:
    """A draft of one range a stage with several, under the schedules that take them; none where all pipelines have one stage.

    ZB-V, whose stages hold two ranges in a V, comes first, then interleaved 1F1B with ever more of them. Neither comes under
    ZeRO 2 and 3, which gather and scatter once more for every range.
    """
    depth = max(len(pipeline.stages) for pipeline in draft)
    if depth == 1 or settings.zero_stage >= 2:
        return
    fewest = min(part.layer_count for pipeline in draft for part in pipeline.stages)
    if fewest >= 2:
        yield tuple(_laid(pipeline, 2, folded=True) for pipeline in draft), replace(settings, schedule="zb-v")
    for count in CHUNKS:
        if count <= fewest:
            yield tuple(_laid(pipeline, count) for pipeline in draft), replace(settings, schedule="interleaved")


def _laid(pipeline: Pipeline, count: int, folded: bool = False) -> Pipeline:
    """The pipeline with each stage's layers in so many ranges, as equal as may be, in the order of visits.

    Folded, the second ranges are visited from the last stage to the first.
    """
    held: list[list[LayerRange]] = [[] for _ in pipeline.stages]
    sizes = [even_split(part.layer_count, count) for part in pipeline.stages]
    at = 0
    for chunk in range(count):
        order = pipeline.visiting_order
        for s in reversed(order) if folded and chunk == 1 else order:
            held[s].append((at, at + sizes[s][chunk]))
            at += sizes[s][chunk]
    return replace(pipeline, stages=tuple([replace(part, layers=tuple(held[s])) for s, part in enumerate(pipeline.stages)]))
