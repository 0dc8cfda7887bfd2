"""Which devices sum which numbers together."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from runtime.gradients import lane_sections, section_parameters, section_slices
from runtime.parameters import model_parameters, rows_of
from runtime.settings import check_runnable
from runtime.world import lane_ranks
from sim.spec.plan import Plan
from sim.spec.program import ReduceGradients
from tests.runtime.test_equality import LLAMA, PLANS, pipeline, plan_of, runnable_plans, settings_of


def test_degrees_4_2_and_1_meet_in_four_slices_and_one_of_what_is_whole() -> None:
    plan = plan_of(LLAMA, *(pipeline(1, 1, ((0, 4), devices)) for devices in ((0, 1, 2, 3), (4, 5), (6,))))
    program = check_runnable(plan, settings_of(plan, None))  # type: ignore[arg-type]
    slices, shared = section_slices(plan, program, lane_ranks(plan, program), program.lanes[0], (0, 4))
    assert shared
    # Two key-value heads: of degree 4 each is held by two ranks, so that keys and values make two slices of their own.
    queries = {(0, 4, 6), (1, 4, 6), (2, 5, 6), (3, 5, 6)}
    assert {s.ranks for s in slices} == queries | {(0, 1, 4, 6), (2, 3, 5, 6), (0, 1, 2, 3, 4, 5, 6)}
    norms = next(s for s in slices if len(s.ranks) == 7)
    assert {piece.parameter.name.split(".")[2] for piece in norms.pieces} == {"attention_norm", "mlp_norm"}
    assert all(piece.contributors == {0, 4, 6} for piece in norms.pieces)  # once for each lane
    keys = next(s for s in slices if s.ranks == (0, 1, 4, 6))
    assert all(piece.contributors == {0, 1, 4, 6} for piece in keys.pieces)  # each rank has its query heads' part only


@given(plan=runnable_plans())
def test_every_number_that_a_device_holds_is_in_one_slice_of_it(plan: Plan) -> None:
    program = check_runnable(plan, settings_of(plan, None))  # type: ignore[arg-type]
    ranks = lane_ranks(plan, program)
    for lane in program.lanes:
        for layers in lane_sections(plan.transformer, lane):
            slices, shared = section_slices(plan, program, ranks, lane, layers)
            assert shared == any(isinstance(i, ReduceGradients) and i.layers == layers for i in lane.instructions)
            places = ((context, *place) for context, group in enumerate(ranks[lane.name]) for place in enumerate(group))
            for context, index, rank in places:
                rows: Counter[tuple[str, int]] = Counter()
                for s in slices:
                    for piece in s.pieces if rank in s.ranks else ():
                        assert piece.holders == s.ranks
                        rows.update((piece.parameter.name, row) for row in range(piece.start, piece.stop))
                held = Counter(
                    (parameter.name, row)
                    for parameter in section_parameters(plan, lane, layers, context, index)
                    for row in range(*rows_of(parameter, index, lane.tensor_parallel))
                )
                assert rows == held


@pytest.mark.parametrize("name", PLANS)
def test_the_lanes_of_a_plan_hold_the_whole_model_in_every_pipeline(name: str) -> None:
    plan = PLANS[name]
    program = check_runnable(plan, settings_of(plan, None))  # type: ignore[arg-type]
    whole = {parameter.name for parameter in model_parameters(plan.transformer)}
    held = [
        {
            parameter.name
            for lane in program.lanes
            if lane.pipeline == p
            for layers in lane_sections(plan.transformer, lane)
            for context in range(plan.context_parallel)
            for index in range(lane.tensor_parallel)
            for parameter in section_parameters(plan, lane, layers, context, index)
        }
        for p in range(len(plan.pipelines))
    ]
    assert set.union(*held) == whole
    assert plan.expert_parallel > 1 or all(names == whole for names in held)  # of divided experts a pipeline may have some
