"""Single changes of drafts against what they keep: layers, sequences, GPUs, and that memory suffices where the draft's did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.drafts import Draft, Settings, make_plan, stage
from partition.room import Room
from partition.variants import Variants
from sim.cost.feasibility import infeasible
from sim.spec.plan import Pipeline
from tests.partition.small_worlds import SMALL, cluster, job, node

WORLD = cluster(node("a", "A100-40GB-SXM", 4, "nvlink"), node("b", "RTX4090", 4))
JOB = job(SMALL, batch=24)
VARIANTS = Variants(WORLD, JOB, Room(WORLD, JOB), charged=False)


def draft_of(cuts: tuple[int, int], sizes: tuple[int, int]) -> Draft:
    """Two pipelines of two stages, one on each node, of 12 sequences each."""
    return tuple(
        Pipeline(size, 12 // size, (stage((f"{name}/0", f"{name}/1"), (0, cut), size), stage((f"{name}/2",), (cut, 12), size)))
        for name, cut, size in zip("ab", cuts, sizes, strict=True)
    )


drafts = st.builds(
    draft_of, st.tuples(st.integers(1, 11), st.integers(1, 11)), st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 3)))
)


@settings(deadline=None, max_examples=30)
@given(drafts, st.integers(0, 1000))
def test_a_variant_is_another_draft_of_the_same_layers_sequences_and_gpus(draft: Draft, seed: int) -> None:
    assert infeasible(make_plan(WORLD, JOB, draft, Settings()), WORLD) is None
    found = list(VARIANTS.of(draft, Settings(), np.random.default_rng(seed)))
    assert found == list(VARIANTS.of(draft, Settings(), np.random.default_rng(seed)))
    for changed in found:
        assert changed != draft
        assert sum(pipeline.micro_batch * pipeline.micro_batches for pipeline in changed) == JOB.global_batch
        for pipeline, before in zip(changed, draft, strict=True):
            assert [part.devices for part in pipeline.stages] == [part.devices for part in before.stages]
            (first, middle), (other_middle, last) = (part.layers[0] for part in pipeline.stages)
            assert first == 0 and middle == other_middle and last == SMALL.layers and 0 < middle < last
        assert infeasible(make_plan(WORLD, JOB, changed, Settings()), WORLD) is None


@pytest.mark.parametrize("seed", range(3))
def test_every_sort_of_change_is_there(seed: int) -> None:
    draft = draft_of((6, 6), (2, 2))
    found = list(VARIANTS.of(draft, Settings("split-1f1b"), np.random.default_rng(seed)))
    cuts = {tuple(pipeline.stages[0].layer_count for pipeline in changed) for changed in found}
    assert cuts == {(6, 6), (5, 6), (7, 6), (6, 5), (6, 7)}
    batches = {tuple(pipeline.micro_batches for pipeline in changed) for changed in found}
    assert {(5, 7), (7, 5)} <= batches
    sizes = {pipeline.micro_batch for changed in found for pipeline in changed}
    assert sizes == {1, 2, 3, 4, 6, 12}
    recomputed = {sum(part.recompute_layers or 0 for part in changed[0].stages) for changed in found}
    assert len(recomputed) > 1
