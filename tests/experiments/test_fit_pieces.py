"""The fit of efficiency records: it finds the constants that made up the times it is given, and keeps what it holds out apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.constants import without_factor
from experiments.fit_pieces import (
    Measurement,
    PiecesSearch,
    _held_out,
    family_of,
    fit_pieces,
    leave_out_models,
    read_measurements,
)
from sim.cost.pieces import MatmulWork, layer_work, matmul_work
from sim.spec.counts import Matmul
from sim.spec.gpu import catalogue, efficiencies, gpu_kind
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

DATA = Path(__file__).parents[2] / "experiments" / "data"


def test_the_fit_finds_the_constants_that_matmuls_were_made_with() -> None:
    # (FLOP / 312e12 + 25 us) / 0.6 + 0.4 x bytes / 2.039e12, and 2 us for the launch.
    kind, made = gpu_kind("A100-80GB-SXM"), []
    for m in (512, 2048, 8192):
        for n, k in ((1024, 4096), (4096, 1024), (8192, 8192), (256, 16384)):
            work = matmul_work([Matmul("made", m, n, k)], 2)
            num_bytes = 2 * (m * k + k * n + m * n)
            seconds = (2 * m * n * k / 312e12 + 25e-6) / 0.6 + 0.4 * num_bytes / 2.039e12 + 2e-6
            made.append(Measurement("matmul", "made", kind, "bf16", "", f"{m} {n} {k}", work, seconds))
    found = PiecesSearch(made * 60).fit()["ampere-datacenter"]  # so many that the prior says little
    assert found["matmul_fraction"] == pytest.approx(0.6, rel=0.02)
    assert found["matmul_half_s"] == pytest.approx(25e-6, rel=0.05)
    assert found["matmul_traffic"] == pytest.approx(0.4, rel=0.1)


def test_one_wild_measurement_among_many_moves_little() -> None:
    kind, work = gpu_kind("A100-80GB-SXM"), MatmulWork(1, 10**14, 0)
    made = [Measurement("matmul", "made", kind, "bf16", "", str(i), work, 10**14 / 312e12 / 0.6) for i in range(20)]
    wild = replace(made[0], seconds=10 * made[0].seconds)
    calm, shaken = (PiecesSearch([*made, *more]).fit()["ampere-datacenter"]["matmul_fraction"] for more in ([], [wild]))
    assert shaken == pytest.approx(calm, rel=0.02)


def test_what_no_measurement_tells_is_not_searched() -> None:
    kind, tiny = gpu_kind("V100-16GB-SXM"), Transformer("tiny", layers=1, hidden=64, ffn=128, heads=1, vocab=8)

    def names(precision: str, length: int) -> set[str]:
        work = layer_work(tiny, 1, length, 1, False, 2, True, 1, 1)
        layer = Measurement("layer forward", "made", kind, precision, "", "one", work, 1e-3, stack="zorse-autocast")
        return {constant.name for owner, constant in PiecesSearch([layer]).constants if owner == "volta"}

    assert names("fp32", 4096) == {"fp32_fraction", "matmul_half_s", "memory_fraction", "attention_fraction"}
    mostly_matmuls = layer_work(
        replace(tiny, hidden=8192, ffn=8192, heads=1, kv_heads=1, head_dim=8), 1, 64, 1, False, 2, True, 1, 1
    )
    layer = Measurement("layer forward", "made", kind, "fp16", "", "one", mostly_matmuls, 1e-3, stack="zorse-autocast")
    assert "attention_fraction" not in {constant.name for _, constant in PiecesSearch([layer]).constants}


def test_every_kind_with_a_shared_record_has_a_family() -> None:
    assert {family_of(kind) for kind in catalogue().values()} <= set(efficiencies())
    own = replace(gpu_kind("T4"), efficiency=replace(gpu_kind("T4").efficiency, source="of its own"))
    with pytest.raises(InputError, match="T4 shares no record"):
        family_of(own)


def test_groups_are_held_out_whole_and_in_every_stratum() -> None:
    measurements = read_measurements(DATA)
    held = _held_out(measurements, 1, 0.5)
    assert held == _held_out(measurements, 1, 0.5) != _held_out(measurements, 2, 0.5)
    strata: dict[str, set[str]] = {}
    for m in measurements:
        strata.setdefault(m.stratum, set()).add(m.group)
    for groups in strata.values():
        assert len(groups & held) == min(round(len(groups) / 2), len(groups) - 1)


def test_the_layers_of_the_data_are_all_read() -> None:
    layers = [m for m in read_measurements(DATA) if m.source == "zorse"]
    assert len(layers) == 2 * 1790
    assert len({m.kind.name for m in layers}) == 11
    first = next(m for m in layers if m.model == "llama_7b" and m.kind.name == "H100-NVL" and m.precision == "fp16")
    assert (first.what, first.seconds, first.stack) == ("layer forward", 5.6777e-3, "zorse-autocast")


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_leaves_nothing_to_fit_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="holdout is a share of the groups from 0 to below 1"):
        fit_pieces(DATA, 0, share)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"transformer_layer_times\.csv: cannot be read"):
        fit_pieces(tmp_path)


@pytest.mark.slow
def test_layers_that_the_fit_has_not_seen_are_foretold_within_a_ninth() -> None:
    found = fit_pieces(DATA, 0, 0.5)
    layers = found.errors[(found.errors.source == "zorse") & (found.errors.part == "held out")]
    assert (layers.mean_error * layers["count"]).sum() / layers["count"].sum() <= 1 / 9
    assert set(layers.gpu) == {m.kind.name for m in read_measurements(DATA) if m.source == "zorse"}
    # The shipped records are this fit's, to the last digit that they have, before the factor that runs gave to nominal rates.
    for name, record in found.efficiencies.items():
        assert record.matmul_fraction == pytest.approx(without_factor(efficiencies()[name]).matmul_fraction, rel=0.01)


@pytest.mark.slow
def test_models_that_the_fit_has_not_seen_are_foretold_within_a_sixth() -> None:
    errors = leave_out_models(DATA)
    assert set(errors.model) == {"llama", "llamav2", "mistral", "gpt", "bert", "vit"}
    layers = errors[errors.source == "zorse"]
    assert (layers.mean_error * layers["count"]).sum() / layers["count"].sum() <= 1 / 6


def test_a_row_that_cannot_be_used_is_told_with_its_line(tmp_path: Path) -> None:
    for name in ("transformer_layer_times.csv", "layer_profiles.csv", "microbench.csv"):
        (tmp_path / name).write_text((DATA / name).read_text(encoding="utf-8"), encoding="utf-8")
    layers = tmp_path / "transformer_layer_times.csv"
    layers.write_text(layers.read_text(encoding="utf-8").replace("bert_base", "bort_base", 1), encoding="utf-8")
    with pytest.raises(InputError, match=r"transformer_layer_times\.csv, line 2: 'bort_base' is missing or unknown"):
        read_measurements(tmp_path)
