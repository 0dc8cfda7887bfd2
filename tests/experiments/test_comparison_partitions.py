"""The rebuilt cost model of FlashFlex's program: it says of the published plans what the program said of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments import peers
from tests.experiments.conftest import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("partitions")


def claimed_s() -> dict[str, float]:
    """What the program claims for each plan, by the name of its file."""
    readme = Path(peers.__file__).with_name("data") / "peer_plans" / "README.md"
    rows = [[column.strip() for column in line.strip("|").split("|")] for line in readme.read_text().splitlines()]
    return {row[0]: float(row[2]) for row in rows if len(row) == 5 and row[0].endswith(".json")}


def test_published_plans_of_one_pipeline_have_the_price_that_is_claimed_for_them(bench: ModuleType) -> None:
    """Of one pipeline, because the program fixes the batch of each by the number of pipelines that it began with.

    It takes a GB/s for 2**30 bytes and a TFLOP/s for 2**40, so that its seconds are 7 to 10 % fewer.
    """
    found = 0
    for peer in peers.peers():
        plan = peer.plan
        if peer.program != "flashflex" or plan.schedule != "gpipe" or len(plan.pipelines) > 1:
            continue
        world = bench.World(peer.cluster, plan.job())
        number = {device.name: i for i, device in enumerate(peer.cluster.devices)}
        stages = tuple(tuple(number[name] for name in stage.devices) for stage in plan.pipelines[0].stages)
        layers = tuple(stage.layer_count for stage in plan.pipelines[0].stages)
        price_s = 1.8 * world.pipeline_s(stages, layers, plan.pipelines[0].micro_batches)
        claim_s = claimed_s()[f"flashflex.{peer.cluster.name}.{plan.model}.json"]
        assert 2**30 / 1e9 * 0.995 < price_s / claim_s < 2**40 / 1e12, peer
        found += 1
    assert found == 6


def test_layers_are_dealt_to_the_stages_of_all_published_plans_as_there(bench: ModuleType) -> None:
    found = 0
    for peer in peers.peers():
        if peer.program == "flashflex" and peer.plan.schedule == "gpipe":
            world = bench.World(peer.cluster, peer.plan.job())
            number = {device.name: i for i, device in enumerate(peer.cluster.devices)}
            for pipeline in peer.plan.pipelines:
                stages = tuple(tuple(number[name] for name in stage.devices) for stage in pipeline.stages)
                layers = world.layers(stages)
                assert layers is not None
                # Which of several stages of equal memory has a layer more is decided by an unstable sort.
                memories = [sum(world.memory[i] for i in devices) for devices in stages]
                theirs = [stage.layer_count for stage in pipeline.stages]
                assert sorted(zip(memories, layers, strict=True)) == sorted(zip(memories, theirs, strict=True)), peer
                found += 1
    assert found == 38


def test_the_graph_partition_spreads_nodes_and_is_the_same_each_time(bench: ModuleType) -> None:
    peer = next(p for p in peers.peers() if p.cluster.name == "mixed-a-4gbit" and p.plan.model == "llama-2-13b")
    world = bench.World(peer.cluster, peer.plan.job())
    cuts = [bench.partition(world, "graph", 2, np.random.default_rng(seed)) for seed in range(3)]
    assert cuts[0] == cuts[1] == cuts[2]
    for part in cuts[0]:
        assert {world.node[device] for device in part} == set(range(len(peer.cluster.nodes)))
    drawn = [bench.partition(world, "random", 2, np.random.default_rng(seed)) for seed in range(3)]
    assert drawn[0] != drawn[1]
