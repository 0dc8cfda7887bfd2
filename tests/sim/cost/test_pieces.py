"""Seconds of layers, embedding and head: sums by hand, published times, and the laws that they obey."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.pieces import PieceSeconds, embedding_seconds, head_seconds, layer_seconds, matmul_work, rates_of, slowest
from sim.spec.counts import Matmul
from sim.spec.gpu import Efficiency, GpuKind, catalogue, gpu_kind
from sim.spec.reading import InputError
from sim.spec.stack import Stack
from sim.spec.transformer import Moe, Transformer

NEVER = 1e30  # a rate so high that nothing takes time at it
STACK = Stack("ideal")
UNFUSED = Stack("unfused", flash_attention=False)
MEGATRON = replace(UNFUSED, megatron_softmax=True)

# Per layer: 4 x 8 x 8 + 3 x 8 x 16 = 640 weights in matmuls. A sequence of 4 tokens: 2 x 4 x 640 = 5120 FLOP of matmuls and
# 4 x 4 x 4 x 8 = 512 of attention, of which causality leaves half.
TINY = Transformer(name="tiny", layers=4, hidden=8, ffn=16, heads=2, vocab=10)
ATTENTION = 512 / 2

IDEAL = Efficiency(
    matmul_fraction=1.0,
    fp32_fraction=1.0,
    matmul_half_s=0.0,
    matmul_traffic=0.0,
    attention_fraction=1.0,
    attention_keys=0.0,
    attention_rows=0.0,
    attention_width=0.0,
    memory_fraction=1.0,
    launch_s=0.0,
)

LLAMA_7B = Transformer(name="llama-7b", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000)


def kind(peak: float = 1.0, bandwidth: float = NEVER, precision: str = "bf16", **changes: float) -> GpuKind:
    efficiency = replace(IDEAL, **changes)  # type: ignore[arg-type]
    return GpuKind("toy", 2**40, {precision: peak}, bandwidth, None, 0.0, 1.0, None, efficiency)


def kernels_of(piece: PieceSeconds) -> tuple[int, int, int, int]:
    """Launched forward, in the input half, in the weight half, and, of those forward, for attention."""
    return piece.forward_kernels, piece.backward_input_kernels, piece.backward_weight_kernels, piece.attention_kernels


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_a_layer_takes_its_flop_at_peak_where_nothing_else_takes_time() -> None:
    layer = layer_seconds(kind(2.0), STACK, TINY, 1, 4)
    assert layer.forward_s == pytest.approx((5120 + ATTENTION) / 2)
    assert (layer.attention_s, layer.attention_backward_s) == pytest.approx((ATTENTION / 2, 3 * ATTENTION / 2))
    assert (layer.backward_input_s, layer.backward_weight_s) == pytest.approx(((5120 + 3 * ATTENTION) / 2, 5120 / 2))


def test_each_kernel_is_launched_and_each_matmul_saturates() -> None:
    # 4 matmuls (query-key-value, output, gate-up, down), attention, 2 norms, 2 residuals, rotary, activation.
    overheads = kind(NEVER, NEVER, matmul_fraction=0.5, matmul_half_s=3.0, launch_s=100.0)
    layer = layer_seconds(overheads, STACK, TINY, 1, 4)
    assert layer.forward_s == pytest.approx(4 * 3.0 / 0.5 + 11 * 100)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s)
    assert layer.backward_weight_s == pytest.approx(4 * 3.0 / 0.5 + 4 * 100)


def test_a_part_of_a_matmuls_bytes_does_not_hide_behind_its_flop() -> None:
    # In: 3 x 5 and 5 x 7; out: 3 x 7; 71 elements of 2 bytes. FLOP: 2 x 3 x 5 x 7 = 210.
    rates = rates_of(kind(10.0, 4.0, matmul_traffic=0.25), "bf16")
    work = matmul_work([Matmul("m", 3, 7, 5, 2)], 2)
    assert rates.matmul_s(work, 10.0) == pytest.approx(2 * (210 / 10 + 0.25 * 71 * 2 / 4))


@pytest.mark.parametrize(
    ("n", "k", "element_bytes", "aligned"),
    [(16, 8, 2, True), (12, 8, 2, False), (8, 12, 2, False), (25, 8, 2, False), (25, 5, 4, True)],
)
def test_rows_of_16_bit_matrices_lie_as_tensor_cores_take_them_in_multiples_of_16_bytes(
    n: int, k: int, element_bytes: int, aligned: bool
) -> None:
    matmul, rates = Matmul("m", 3, n, k), rates_of(kind(10.0), "bf16")
    assert matmul.aligned(element_bytes) == aligned
    seconds = rates.matmul_s(matmul_work([matmul], element_bytes), 10.0, unaligned_scale=0.5)
    assert seconds == pytest.approx(6 * n * k / 10 * (1 if aligned else 2))


def test_a_vocabulary_that_is_not_padded_slows_the_output_matmul_alone() -> None:
    odd, slow = replace(TINY, vocab=50, padded_vocab=50), Stack("slow", unaligned_scale=0.25)
    padded = replace(odd, padded_vocab=56)
    for transformer, times in ((odd, 4), (padded, 1)):
        at_once, slowed = (head_seconds(kind(2.0), stack, transformer, 1, 4) for stack in (STACK, slow))
        assert slowed.forward_s == pytest.approx(times * at_once.forward_s)
        assert slowed.backward_s == pytest.approx(times * at_once.backward_s)
        assert layer_seconds(kind(2.0), slow, transformer, 1, 4) == layer_seconds(kind(2.0), STACK, transformer, 1, 4)
    # Each of two ranks has 25 columns, and 28 of the padded ones.
    assert head_seconds(kind(2.0), slow, padded, 1, 4, 2).forward_s == pytest.approx(
        4 * head_seconds(kind(2.0), STACK, padded, 1, 4, 2).forward_s
    )


def test_the_gradients_of_weights_take_as_many_flop_and_bytes_as_the_forward_matmuls() -> None:
    # Y = X W reads X and W and writes Y; the gradients of X and of W each read two of the three matrices and write the third.
    only_matmuls = kind(100.0, 10.0, matmul_traffic=1.0, matmul_half_s=1.0)
    layer = layer_seconds(only_matmuls, STACK, TINY, 1, 4)
    elements = 4 * (8 + 24) + 8 * 24 + 4 * (8 + 8) + 64 + 4 * (8 + 32) + 8 * 32 + 4 * (16 + 8) + 16 * 8
    assert layer.backward_weight_s == pytest.approx(5120 / 100 + 4 * 1.0 + elements * 2 / 10)


def test_in_fp32_the_fraction_is_its_own() -> None:
    slow = kind(1.0, precision="fp32", matmul_fraction=0.25, fp32_fraction=0.5)
    assert layer_seconds(slow, STACK, TINY, 1, 4, precision="fp32").backward_weight_s == pytest.approx(5120 / 0.5)
    fast = kind(1.0, precision="tf32", matmul_fraction=0.25, fp32_fraction=0.5)
    assert layer_seconds(fast, STACK, TINY, 1, 4, precision="tf32").backward_weight_s == pytest.approx(5120 / 0.25)


def test_attention_takes_the_seconds_of_some_more_rows() -> None:
    # 4 tokens of 2 heads are 8 rows; 2 more take a quarter longer, forward and, as long again, backward.
    layer = layer_seconds(kind(attention_rows=2.0), STACK, TINY, 1, 4)
    assert layer.attention_s == pytest.approx(ATTENTION * (1 + 2 / 8))
    assert layer.backward_input_s == pytest.approx(5120 + ATTENTION * (3 + 2 / 8))


def test_attention_takes_the_flop_of_some_more_keys() -> None:
    # Each of 4 tokens sees 2 of its 4 keys on average; 3 more make them 5.
    assert layer_seconds(kind(attention_keys=3.0), STACK, TINY, 1, 4).attention_s == pytest.approx(ATTENTION * 5 / 2)


def test_attention_takes_the_longer_the_narrower_the_heads_are() -> None:
    # With 32 numbers more for each score a head of 64 takes 96, of which half are the product's; one of 128 takes 160 for 128.
    fast = kind(attention_width=32.0)
    wide, narrow, wider = (Transformer("m", 1, 256, 8, 256 // width, 10, head_dim=width) for width in (128, 64, 256))
    of_wide_s = layer_seconds(fast, STACK, wide, 1, 4).attention_s
    assert of_wide_s == pytest.approx(4 * 4 * 4 * 256 / 2)
    assert layer_seconds(fast, STACK, narrow, 1, 4).attention_s == pytest.approx(of_wide_s * (96 / 64) / (160 / 128))
    assert layer_seconds(fast, STACK, wider, 1, 4).attention_s == pytest.approx(of_wide_s)


def test_without_flash_the_scores_of_all_keys_are_two_matmuls_and_pass_through_memory() -> None:
    # FLOP: all 512, and 2 matmuls that saturate. Bytes: 4 tokens of (4 x 8 + 4 x 2 heads x 4 keys) elements of 2 bytes.
    matmuls = layer_seconds(kind(2.0, matmul_half_s=5.0), UNFUSED, TINY, 1, 4)
    assert matmuls.attention_s == pytest.approx(512 / 2 + 2 * 5.0)
    assert matmuls.attention_backward_s == pytest.approx(2 * matmuls.attention_s)
    assert matmuls.backward_input_s == pytest.approx(5120 / 2 + 4 * 5.0 + matmuls.attention_backward_s)
    bytes_ = layer_seconds(kind(NEVER, 2.0), UNFUSED, TINY, 1, 4)
    assert bytes_.attention_s == pytest.approx(4 * (32 + 32) * 2 / 2)
    launches = layer_seconds(kind(NEVER, launch_s=1.0), UNFUSED, TINY, 1, 4)
    assert launches.attention_s == pytest.approx(3)  # scores, softmax, their product with the values
    assert launches.forward_s == pytest.approx(11 + 2)


def test_a_sliding_window_leaves_the_attention_to_the_keys_it_shows() -> None:
    # Window 1 of 4 keys: each token sees itself; by the formula 1 x (1 - 1 / 8) keys, where causality alone leaves 2.
    window = layer_seconds(kind(), STACK, replace(TINY, sliding_window=1), 1, 4)
    assert window.attention_s == pytest.approx(512 / 4 * (1 - 1 / 8))
    assert layer_seconds(kind(), STACK, replace(TINY, sliding_window=4), 1, 4).attention_s == pytest.approx(ATTENTION)


@pytest.mark.parametrize("window", [None, 3, 5, 8])
@pytest.mark.parametrize("slices", [2, 4])
def test_the_slices_of_a_sequence_have_its_flop_together(slices: int, window: int | None) -> None:
    model, length = replace(TINY, sliding_window=window), 8 // slices
    whole = layer_seconds(kind(), STACK, model, 1, 8)
    parts = [layer_seconds(kind(), STACK, model, 1, length, tokens_before=i * length) for i in range(slices)]
    for field in ("forward_s", "backward_input_s", "backward_weight_s", "attention_s"):
        assert sum(getattr(part, field) for part in parts) == pytest.approx(getattr(whole, field)), field


def test_a_slice_attends_to_those_before_it() -> None:
    """Two slices of 4 of 8 tokens: of the 8 x 8 scores the first has an eighth, the second three eighths."""
    first, second = (layer_seconds(kind(), STACK, TINY, 1, 4, tokens_before=before).attention_s for before in (0, 4))
    assert (first, second) == pytest.approx((ATTENTION, 3 * ATTENTION))
    # Without flash it computes the scores of all keys up to its end: 4 x 4, then 4 x 8.
    first, second = (layer_seconds(kind(), UNFUSED, TINY, 1, 4, tokens_before=before).attention_s for before in (0, 4))
    assert (first, second) == pytest.approx((512, 2 * 512))
    # Where only bytes take time: query, key, value and result of 4 tokens, 4 x 4 x 8 x 2, and the keys and values before them.
    first, second = (layer_seconds(kind(NEVER, 1.0), STACK, TINY, 1, 4, tokens_before=before).attention_s for before in (0, 4))
    assert (first, second) == pytest.approx((256, 256 + 4 * 2 * 8 * 2))


def test_two_tensor_parallel_ranks_halve_the_flop_of_each() -> None:
    whole, half = layer_seconds(kind(), STACK, TINY, 1, 4), layer_seconds(kind(), STACK, TINY, 1, 4, 2)
    assert half.forward_s == pytest.approx(whole.forward_s / 2)
    both = (head_seconds(kind(), STACK, TINY, 1, 4), head_seconds(kind(), STACK, TINY, 1, 4, 2))
    assert both[1].forward_s == pytest.approx(both[0].forward_s / 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_ranks_divide_flop_and_bytes_equally(ranks: int) -> None:
    for gpu in (kind(), kind(NEVER, 1.0)):
        whole, part = layer_seconds(gpu, STACK, TINY, 1, 8), layer_seconds(gpu, STACK, TINY, 1, 8, context_parallel=ranks)
        assert part.forward_s == pytest.approx(whole.forward_s / ranks)
        assert part.backward_s == pytest.approx(whole.backward_s / ranks)
        ends = [
            (embedding_seconds(gpu, STACK, TINY, 1, 8), embedding_seconds(gpu, STACK, TINY, 1, 8, 1, "bf16", ranks)),
            (head_seconds(gpu, STACK, TINY, 1, 8), head_seconds(gpu, STACK, TINY, 1, 8, 1, False, "bf16", ranks)),
        ]
        for first, second in ends:
            assert second.forward_s == pytest.approx(first.forward_s / ranks)


def test_only_the_chosen_experts_compute_wherever_they_are() -> None:
    experts = replace(TINY, experts=Moe(experts=4, top_k=1, ffn=16))
    router = 2 * 4 * 8 * 4
    for ranks in (1, 2, 4):
        layer = layer_seconds(kind(), STACK, experts, 1, 4, expert_parallel=ranks)
        assert layer.forward_s == pytest.approx(5120 + ATTENTION + router)
    # However many of them a rank holds, it runs 2 matmuls for all at once, besides query, output and router.
    halves = [
        layer_seconds(kind(NEVER, matmul_half_s=1.0), STACK, experts, 1, 4, expert_parallel=ranks).forward_s
        for ranks in (1, 2, 4)
    ]
    assert halves == pytest.approx([5, 5, 5])


def test_tensor_ranks_with_whole_experts_compute_as_much_and_move_less() -> None:
    model = Transformer(name="t", layers=1, hidden=8, ffn=16, heads=2, vocab=10, experts=Moe(experts=4, top_k=2, ffn=16))

    def forward_s(kind: GpuKind, whole: bool) -> float:
        degree = 4 if whole else 2  # of ranks, two of each group, in the other case with half of each expert of two
        return layer_seconds(kind, STACK, model, 1, 8, 2, True, expert_parallel=degree, whole_experts=whole).forward_s

    # As much but for the router, which sees half of the tokens, of 8 x 2 x 8 x 4 FLOP for all.
    assert forward_s(kind(), False) - forward_s(kind(), True) == pytest.approx(8 * 2 * 8 * 4 / 2)
    # 8 tokens x (3 x 2 + 1) x 8 elements of 2 bytes go to experts and back; here half of them.
    assert forward_s(kind(NEVER, 1.0), False) - forward_s(kind(NEVER, 1.0), True) == pytest.approx(8 * 7 * 8 * 2 / 2)


def test_below_16_bits_only_the_matmuls_of_the_layers_are_faster() -> None:
    both = GpuKind("toy", 2**40, {"bf16": 1.0, "fp8": 2.0}, NEVER, None, 0.0, 1.0, None, IDEAL)
    assert layer_seconds(both, STACK, TINY, 1, 4, precision="fp8").forward_s == pytest.approx(5120 / 2 + ATTENTION)
    assert layer_seconds(both, UNFUSED, TINY, 1, 4, precision="fp8").forward_s == pytest.approx(5120 / 2 + 512)
    assert head_seconds(both, STACK, TINY, 1, 4, precision="fp8").forward_s == pytest.approx(640)


def test_slowest_takes_the_longest_of_every_column() -> None:
    a, b = layer_seconds(kind(1.0, 9.0), STACK, TINY, 1, 4), layer_seconds(kind(1e6, 1e-3), STACK, TINY, 1, 4)
    both = slowest([a, b])
    assert a.backward_weight_s > b.backward_weight_s and a.forward_s != b.forward_s
    assert both.forward_s == max(a.forward_s, b.forward_s)
    assert both.backward_weight_s == a.backward_weight_s


def test_a_kind_without_the_precision_is_told_with_what_it_has() -> None:
    with pytest.raises(InputError, match=r"^toy has no fp8; it has bf16$"):
        rates_of(kind(), "fp8")


# --- Stacks ----------------------------------------------------------------------------------------------------------


def test_a_stack_scales_the_rates_and_bytes_that_it_is_about() -> None:
    matmul_only = Stack("half", matmul_scale=0.5)
    assert layer_seconds(kind(), matmul_only, TINY, 1, 4).forward_s == pytest.approx(2 * 5120 + ATTENTION)
    attention_only = Stack("half", attention_scale=0.5)
    assert layer_seconds(kind(), attention_only, TINY, 1, 4).forward_s == pytest.approx(5120 + 2 * ATTENTION)
    assert layer_seconds(kind(), replace(attention_only, flash_attention=False), TINY, 1, 4).attention_s == pytest.approx(1024)
    slow, double = kind(NEVER, 1.0), Stack("double", memory_traffic=2.0)
    once, twice = layer_seconds(slow, STACK, TINY, 1, 4), layer_seconds(slow, double, TINY, 1, 4)
    assert twice.forward_s - twice.attention_s == pytest.approx(2 * (once.forward_s - once.attention_s))
    assert twice.attention_s == once.attention_s
    # Of the head the final norm, 4 tokens read and written; the cross-entropy has a constant of its own.
    norm, logits = 2 * 4 * 8 * 2, 4 * 10 * (4 + 4 + 2 + 4)
    for stack, forward_s in (
        (STACK, norm + logits),
        (double, 2 * norm + logits),
        (Stack("l", loss_traffic=3.0), norm + 3 * logits),
    ):
        head = head_seconds(slow, stack, TINY, 1, 4)
        assert head.forward_s == pytest.approx(forward_s)
        # The norm moves half as much again, the cross-entropy as much.
        assert head.backward_input_s == pytest.approx(forward_s + norm * stack.memory_traffic / 2)
        more = head_seconds(slow, replace(stack, backward_traffic=2.0), TINY, 1, 4)
        assert (more.forward_s, more.backward_weight_s) == (head.forward_s, head.backward_weight_s)
        assert more.backward_input_s == pytest.approx(2 * head.backward_input_s)


def test_the_backward_may_move_more_of_what_memory_bounds_and_nothing_else() -> None:
    slow, more = kind(NEVER, 1.0), replace(STACK, backward_traffic=3.0)
    fused, plain = layer_seconds(slow, STACK, TINY, 1, 4), layer_seconds(slow, more, TINY, 1, 4)
    # Norms and residuals of 4 tokens of 8 numbers and their activation in bf16 move half as much again as forward.
    rest = fused.forward_s - fused.attention_s
    assert plain.backward_input_s - fused.backward_input_s == pytest.approx(2 * 1.5 * rest)
    same = ("forward_s", "backward_weight_s", "attention_s", "attention_backward_s", "pointwise_s")
    assert [getattr(plain, name) for name in same] == [getattr(fused, name) for name in same]
    # Without flash the scores move through memory, too, which their backward does half as often again.
    scores = [replace(stack, flash_attention=False) for stack in (STACK, more)]
    fused, plain = (layer_seconds(slow, stack, TINY, 1, 4) for stack in scores)
    assert plain.attention_backward_s == pytest.approx(3 * fused.attention_backward_s)
    assert fused.attention_backward_s == pytest.approx(1.5 * fused.attention_s) and plain.attention_s == fused.attention_s
    embedding = [embedding_seconds(slow, stack, TINY, 1, 4) for stack in (STACK, more)]
    assert embedding[1].backward_weight_s == pytest.approx(3 * embedding[0].backward_weight_s)
    assert embedding[1].forward_s == embedding[0].forward_s


def test_a_softmax_that_megatrons_kernel_does_not_take_is_five_kernels() -> None:
    # Two heads and one sequence of 20 tokens: 800 scores in two matrices, which are no four. Cast to fp32 (6 bytes), scaled (8),
    # masked (9), normalised (8) and cast back (6), where one kernel reads and writes 2 bytes each; the backward as of others.
    slow, launching = kind(NEVER, 1.0), kind(NEVER, launch_s=1.0)

    def added(gpu: GpuKind, stack: Stack, sequences: int, precision: str = "bf16") -> tuple[float, ...]:
        one, other = (layer_seconds(gpu, s, TINY, sequences, 20, precision=precision) for s in (stack, MEGATRON))
        both = (other.attention_s - one.attention_s, other.attention_backward_s - one.attention_backward_s)
        whole = (other.forward_s - one.forward_s, other.backward_s - one.backward_s)
        assert both == pytest.approx(whole)
        return both

    assert added(slow, UNFUSED, 1) == pytest.approx((33 * 800, 1.5 * 33 * 800))
    assert added(launching, UNFUSED, 1) == pytest.approx((4, 8))
    assert kernels_of(layer_seconds(kind(), MEGATRON, TINY, 1, 20)) == (13 + 4, 22 + 8, 4, 3 + 4)
    # Two sequences have four matrices. In fp32, which is not cast, no matrices are taken.
    assert added(slow, UNFUSED, 2) == added(launching, UNFUSED, 2) == (0, 0)
    for sequences in (1, 2):
        bytes_ = 17 * 800 * sequences
        assert added(kind(NEVER, 1.0, "fp32"), UNFUSED, sequences, "fp32") == pytest.approx((bytes_, 1.5 * bytes_))
        assert added(kind(NEVER, precision="fp32", launch_s=1.0), UNFUSED, sequences, "fp32") == pytest.approx((2, 4))
    # A flash kernel has no softmax of its own; and what its matmuls and scores lose is not lost by the casts.
    flash = replace(MEGATRON, flash_attention=True)
    assert layer_seconds(slow, flash, TINY, 1, 20) == layer_seconds(slow, STACK, TINY, 1, 20)
    halved = [layer_seconds(slow, replace(stack, attention_scale=0.5), TINY, 1, 20) for stack in (UNFUSED, MEGATRON)]
    assert halved[1].attention_s - halved[0].attention_s == pytest.approx(33 * 800)


def test_what_tensor_parallelism_divides_may_move_more() -> None:
    slow = kind(NEVER, 1.0)
    llama = Transformer(name="t", layers=1, hidden=8, ffn=12, heads=2, vocab=10)
    # Of 4 tokens: norms and residuals 10 x 8; 2 x 2 x 4 for each head that is turned; 3 x ffn of swiglu.
    for degree, inner in ((1, 2 * 2 * 8 + 3 * 12), (2, 2 * 2 * 4 + 3 * 6)):
        for stack, moved in (
            (Stack("all", memory_traffic=2.0), 2 * (80 + inner)),
            (Stack("inner", memory_traffic=2.0, sharded_traffic=5.0), 2 * 80 + 5 * inner),
        ):
            layer = layer_seconds(slow, stack, llama, 1, 4, degree)
            assert layer.forward_s - layer.attention_s == pytest.approx(4 * moved * 2)


def test_the_way_to_experts_and_back_may_move_more() -> None:
    slow = kind(NEVER, 1.0)
    mixture = Transformer(name="t", layers=1, hidden=8, ffn=12, heads=2, vocab=10, experts=Moe(4, 2, 12))
    # Of 4 tokens: norms and residuals 10 x 8, 2 x 2 x 8 turned, 3 x ffn of swiglu twice; routed: 7 x 8.
    rest, routed = 80 + 32 + 72, 56
    for stack, moved in (
        (Stack("all", memory_traffic=2.0), 2 * (rest + routed)),
        (Stack("routing", memory_traffic=2.0, routing_traffic=5.0), 2 * rest + 5 * routed),
    ):
        layer = layer_seconds(slow, stack, mixture, 1, 4)
        assert layer.forward_s - layer.attention_s == pytest.approx(4 * moved * 2)


def test_all_experts_of_a_layer_are_launched_at_once() -> None:
    few, many = (replace(TINY, experts=Moe(experts, 2, 12)) for experts in (2, 64))
    assert layer_seconds(kind(), STACK, few, 1, 64).forward_kernels == layer_seconds(kind(), STACK, many, 1, 64).forward_kernels


def test_a_stack_may_have_slower_kernels() -> None:
    plain, slow = Stack("plain"), Stack("slow", kernel_s=0.5)
    for at in (layer_seconds, embedding_seconds, head_seconds):
        a, b = at(kind(), plain, TINY, 1, 4), at(kind(), slow, TINY, 1, 4)
        assert b.forward_s - a.forward_s == pytest.approx(a.forward_kernels / 2)
        assert b.backward_s - a.backward_s == pytest.approx((a.backward_input_kernels + a.backward_weight_kernels) / 2)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_attention_of_four_bytes_has_the_peak_of_fp32(precision: str) -> None:
    a100, flash = gpu_kind("A100-80GB-SXM"), STACK
    attention_s = layer_seconds(a100, flash, LLAMA_7B, 1, 4096, precision=precision).attention_s
    flop = 4 * 4096**2 / 2 * 4096
    assert attention_s > flop / a100.peak_flop_per_s["fp32"]
    assert attention_s > 4 * layer_seconds(a100, flash, LLAMA_7B, 1, 4096).attention_s


def test_the_kernels_are_counted_that_the_host_launches() -> None:
    # Launched forward: 11; in the input half of the backward: 4 matmuls and 2 x 7 others; in the weight half: 4 matmuls.
    # Head: norm, matmul, cast, cross-entropy. Embedding: the look-up.
    found = [piece(kind(), STACK, TINY, 1, 4) for piece in (layer_seconds, head_seconds, embedding_seconds)]
    assert [kernels_of(piece)[:3] for piece in found] == [(11, 18, 4), (4, 5, 1), (1, 0, 2)]
    assert found[0].attention_kernels == 1
    # Without flash the scores, the softmax and their product with the values; each twice in the backward.
    assert kernels_of(layer_seconds(kind(), UNFUSED, TINY, 1, 4)) == (13, 22, 4, 3)


PROJECTED = replace(TINY, position="learned", max_positions=16, embedding_width=4)


@pytest.mark.parametrize("model", [TINY, PROJECTED, replace(TINY, final_norm=False)])
@pytest.mark.parametrize("stack", [STACK, UNFUSED])
@pytest.mark.parametrize("piece", [layer_seconds, head_seconds, embedding_seconds])
def test_a_gpu_that_only_launches_takes_a_second_for_each_counted_kernel(
    piece: Callable[..., PieceSeconds], stack: Stack, model: Transformer
) -> None:
    found = piece(kind(NEVER, launch_s=1.0), stack, model, 1, 4)
    seconds = (found.forward_s, found.backward_input_s, found.backward_weight_s, found.attention_s)
    assert seconds == pytest.approx(kernels_of(found))


@pytest.mark.parametrize("gpu", [kind(), kind(NEVER)])
def test_the_host_is_not_in_the_seconds_of_a_piece(gpu: GpuKind) -> None:
    # An instruction has many pieces, which the host launches ahead of the GPU: `sim.cost.compute` compares the two there.
    waiting = Stack("slow host", host_s=1.0, tensor_host_s=1.0, micro_batch_s=1.0)
    for piece in (layer_seconds, head_seconds, embedding_seconds):
        assert piece(gpu, waiting, TINY, 1, 4) == piece(gpu, STACK, TINY, 1, 4)


@pytest.mark.parametrize(("degree", "layer", "embedding", "head"), [(1, 640 + 16, 80, 80 + 8), (2, 320 + 16, 40, 40 + 8)])
def test_summing_gradients_moves_its_bytes_for_each_parameter_in_the_weight_half(
    degree: int, layer: int, embedding: int, head: int
) -> None:
    # 640 weights and two norms of 8; 10 tokens of 8; the head's norm besides. Tensor ranks divide all but the norms.
    half = kind(NEVER, 1.0, memory_fraction=0.5)  # so that a byte takes two seconds
    summing = Stack("sums", gradient_bytes=6.0)
    for piece, parameters in ((layer_seconds, layer), (embedding_seconds, embedding), (head_seconds, head)):
        without, found = (piece(half, stack, TINY, 1, 4, degree) for stack in (STACK, summing))
        assert found.backward_weight_s - without.backward_weight_s == pytest.approx(6 * parameters * 2)
        assert replace(found, backward_weight_s=without.backward_weight_s) == without
    # However many tokens: it comes once for each backward.
    long, longer = (layer_seconds(kind(NEVER, 1.0), summing, TINY, count, 4).backward_weight_s for count in (1, 7))
    assert long == longer == pytest.approx(6 * 656)
    tied = replace(TINY, tied_embeddings=True)  # whose head has a copy of the embedding
    assert head_seconds(kind(NEVER, 1.0), summing, tied, 1, 4).backward_weight_s == pytest.approx(6 * (80 + 8))


# --- Published -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "precision", "tflop_per_s"),
    [
        ("A100-80GB-SXM", 2048, 2048, 2048, "fp16", 221.8),
        ("A100-80GB-SXM", 8192, 8192, 8192, "fp16", 253.7),
        ("A100-80GB-SXM", 802816, 192, 768, "fp16", 157.8),
        ("H100-80GB-SXM", 4096, 4096, 4096, "fp8", 1216.9),
    ],
)
def test_matmuls_take_what_was_published(name: str, m: int, n: int, k: int, precision: str, tflop_per_s: float) -> None:
    """cublasLt on Azure ND A100 v4 and ND H100 v5 (Azure/AI-benchmarking-guide), within a sixth."""
    gpu = gpu_kind(name)
    work = matmul_work([Matmul("gemm", m, n, k)], 2)
    assert rates_of(gpu, precision).matmul_s(work, gpu.peak_flop_per_s[precision]) == pytest.approx(
        2 * m * n * k / (tflop_per_s * 1e12), rel=1 / 6
    )


@pytest.mark.parametrize(
    ("name", "sequences", "length", "forward_ms"),
    [
        ("V100-16GB-SXM", 4, 1024, 23.3455),
        ("A100-40GB-SXM", 8, 1024, 19.3436),
        ("A10G", 4, 1024, 32.8704),
        ("H100-NVL", 8, 4096, 44.1619),
    ],
)
def test_a_layer_takes_what_was_published(name: str, sequences: int, length: int, forward_ms: float) -> None:
    """One layer of Llama-7B in fp16 with norms and rotary positions in pieces (Zorse), within an eighth."""
    eager = Stack("eager", memory_traffic=4.0)
    layer = layer_seconds(gpu_kind(name), eager, LLAMA_7B, sequences, length, precision="fp16")
    assert layer.forward_s == pytest.approx(forward_ms / 1e3, rel=1 / 8)


# --- Laws ------------------------------------------------------------------------------------------------------------

gpus = st.sampled_from([gpu for gpu in catalogue().values() if gpu.peak("fp16") or gpu.peak("bf16")])
stacks = st.builds(
    Stack,
    st.just("any"),
    flash_attention=st.booleans(),
    matmul_scale=st.floats(0.5, 1.0),
    unaligned_scale=st.just(1.0) | st.floats(0.1, 1.0),
    attention_scale=st.floats(0.5, 1.5),
    memory_traffic=st.floats(1.0, 5.0),
    sharded_traffic=st.just(0.0) | st.floats(1.0, 9.0),
    routing_traffic=st.just(0.0) | st.floats(1.0, 9.0),
    kernel_s=st.just(0.0) | st.floats(1e-7, 1e-5),
    backward_traffic=st.floats(1.0, 2.0),
    gradient_bytes=st.floats(0.0, 10.0),
)


def columns(gpu: GpuKind, stack: Stack, sequences: int, length: int, *split: int) -> tuple[float, float, float, float]:
    precision = "bf16" if gpu.peak("bf16") else "fp16"
    degree, context = (*split, 1, 1)[:2]
    layer = layer_seconds(gpu, stack, LLAMA_7B, sequences, length, degree, False, precision, context)
    return (layer.forward_s, layer.backward_input_s, layer.backward_weight_s, layer.attention_s)


@given(gpus, stacks, st.integers(1, 16), st.sampled_from([64, 512, 2048, 8192]), st.integers(1, 8))
def test_more_sequences_and_longer_ones_never_take_less(
    gpu: GpuKind, stack: Stack, sequences: int, length: int, more: int
) -> None:
    base = columns(gpu, stack, sequences, length)
    for other in (columns(gpu, stack, sequences + more, length), columns(gpu, stack, sequences, length + 64 * more)):
        assert all(b >= a for a, b in zip(base, other, strict=True))


@given(gpus, stacks, st.integers(1, 8), st.sampled_from([512, 4096]), st.sampled_from([2, 4, 8]))
def test_ranks_take_less_but_no_less_than_their_share(
    gpu: GpuKind, stack: Stack, sequences: int, length: int, ranks: int
) -> None:
    whole = columns(gpu, stack, sequences, length)
    for part in (columns(gpu, stack, sequences, length, ranks), columns(gpu, stack, sequences, length, 1, ranks)):
        assert all(a / ranks <= b * (1 + 1e-9) and b <= a for a, b in zip(whole, part, strict=True))


@given(gpus, stacks, st.integers(1, 8), st.sampled_from([512, 4096]))
def test_a_layer_takes_at_least_its_flop_at_peak(gpu: GpuKind, stack: Stack, sequences: int, length: int) -> None:
    forward_s, input_s, weight_s, _ = columns(gpu, stack, sequences, length)
    peak = gpu.peak("bf16") or gpu.peak("fp16") or math.nan
    least_s = 2 * sequences * length * (4 * 4096**2 + 3 * 4096 * 11008) / peak
    assert min(forward_s, input_s, weight_s) >= least_s
