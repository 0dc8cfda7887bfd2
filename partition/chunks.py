"""Several ranges of layers in each stage, made of drafts that have one: interleaved 1F1B, and ZB-V.

A stage keeps its layers' number, its devices and its recomputation; a micro-batch visits it once for each range. So a pipeline
takes as long for a micro-batch, and fills and drains in a part of the time, at the price of as many times the messages. In a V,
where the head comes to the first stage, layers of that go to the last one, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partition.drafts import Draft, Settings, rescheduled
from partition.layers import even_split, ranges
from sim.spec.plan import LayerRange, Pipeline

CHUNKS = (2, 3, 4, 6, 8)
"""Ranges of layers that interleaved stages are tried with, as far as each has so many layers."""


def chunked(draft: Draft, settings: Settings) -> Iterator[tuple[Draft, Settings]]:
    """A draft of one range a stage with several, under the schedules that take them; none where all pipelines have one stage.

    ZB-V, whose stages hold two ranges in a V, comes first, with the draft's layers and with some for the head moved, then
    interleaved 1F1B with ever more ranges. Neither comes under ZeRO 2 and 3, which gather and scatter once more for every range.
    """
    draft, settings = rescheduled(draft, settings, "1f1b")  # whose stages say nothing of what they hold
    depth = max(len(pipeline.stages) for pipeline in draft)
    if depth == 1 or settings.zero_stage >= 2:
        return
    fewest = min(part.layer_count for pipeline in draft for part in pipeline.stages)
    if fewest >= 2:
        in_a_v = settings.under("zb-v")
        yield tuple(_laid(pipeline, 2, folded=True) for pipeline in draft), in_a_v
        turned = tuple(_head_first(pipeline) for pipeline in draft)
        if min(pipeline.stages[0].layer_count for pipeline in turned) >= 2:
            yield tuple(_laid(pipeline, 2, folded=True) for pipeline in turned), in_a_v
    yield from interleaved(draft, settings)


def interleaved(draft: Draft, settings: Settings) -> Iterator[tuple[Draft, Settings]]:
    """A draft of one range a stage with ever more ranges, under interleaved 1F1B."""
    fewest = min(part.layer_count for pipeline in draft for part in pipeline.stages)
    for count in CHUNKS:
        if count <= fewest:
            yield tuple(_laid(pipeline, count) for pipeline in draft), settings.under("interleaved")


def _head_first(pipeline: Pipeline) -> Pipeline:
    """The pipeline with fewer layers in the first stage, which in a V has the head, and so many more in the last.

    As many as the last stage had fewer for the head's sake, at least one.
    """
    first, last = pipeline.stages[0], pipeline.stages[-1]
    moved = max(1, first.layer_count - last.layer_count) if len(pipeline.stages) > 1 else 0
    counts = [part.layer_count for part in pipeline.stages]
    counts[0] -= moved
    counts[-1] += moved
    stages = [replace(part, layers=(held,)) for part, held in zip(pipeline.stages, ranges(counts), strict=True)]
    first, some = stages[0], stages[0].recompute_layers
    if some is not None:
        stages[0] = first.recomputing(first.recompute, max(0, min(some, counts[0])), first.recompute_rest)
    return replace(pipeline, stages=tuple(stages))


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
