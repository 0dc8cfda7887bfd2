"""The same models once more, plain: functions over a dict from canonical name to whole tensor, in one process, without fusion.

What the runtime computes, however it is divided, must equal this. Shapes: B sequences, S tokens, H hidden, N heads, D width of
a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from runtime.parameters import Section, initial_values, model_parameters, range_parameters
from runtime.settings import Settings
from sim.spec.plan import LayerRange
from sim.spec.transformer import Transformer

Weights = dict[str, torch.Tensor]
"""Every parameter by name, whole, in the orientation of `runtime.parameters`."""


# --- Weights ---------------------------------------------------------------------------------------------------------


def initial_weights(transformer: Transformer, seed: int, dtype: torch.dtype = torch.float64) -> Weights:
    """The first weights that training starts from with a seed, as leaves."""
    weights = {}
    for parameter in model_parameters(transformer):
        values = initial_values(transformer, parameter, 0, parameter.rows, seed)
        shape = (parameter.rows,) if parameter.width is None else (parameter.rows, parameter.width)
        weights[parameter.name] = values.view(shape).to(dtype).requires_grad_()
    return weights


def rough_weights(transformer: Transformer, seed: int, dtype: torch.dtype = torch.float64) -> Weights:
    """Weights of which every number matters: large, with biases and norms that are neither 0 nor 1. Leaves."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for parameter in model_parameters(transformer):
        shape = (parameter.rows,) if parameter.width is None else (parameter.rows, parameter.width)
        values = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) + (parameter.initial == "ones")
        weights[parameter.name] = values.to(dtype).requires_grad_()
    return weights


def sections_of(transformer: Transformer, weights: Weights, index: int = 0, degree: int = 1) -> dict[LayerRange, Section]:
    """What a rank of a tensor-parallel group holds of the weights: embedding, first layer, the others, head."""
    n = transformer.layers
    sections = {}
    for layers in ((0, 0), (0, 1), (1, n), (n, n)):
        parameters = range_parameters(transformer, layers)
        dtype = weights["embedding.tokens.weight"].dtype
        sections[layers] = Section(parameters, layers, index, degree, dtype, torch.device("cpu"))
        for segment in sections[layers].segments:
            rows = weights[segment.parameter.name].detach()[segment.start : segment.stop]
            sections[layers].values[segment.offset : segment.offset + segment.size] = rows.flatten()
    return sections


def gradients_of(sections: Mapping[LayerRange, Section]) -> Weights:
    """What backwards have accumulated in the parameters, by name: the rank's rows of each. 0 where there is nothing."""
    gradients = {}
    for section in sections.values():
        flat = torch.zeros_like(section.values)
        for names, parameter in section.parameters.items():
            if parameter.grad is not None:
                start, stop = section.spans[names]
                flat[start:stop] += parameter.grad.flatten()
        for segment in section.segments:
            rows, width = flat[segment.offset : segment.offset + segment.size], segment.parameter.width
            gradients[segment.parameter.name] = rows if width is None else rows.view(-1, width)
    return gradients


# --- The model -------------------------------------------------------------------------------------------------------


def _norm(t: Transformer, weights: Weights, name: str, x_BSH: torch.Tensor) -> torch.Tensor:
    if t.norm == "rmsnorm":
        return x_BSH / torch.sqrt((x_BSH**2).mean(-1, keepdim=True) + t.norm_epsilon) * weights[f"{name}.weight"]
    centred = x_BSH - x_BSH.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + t.norm_epsilon)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(weights: Weights, name: str, x: torch.Tensor, stored_in_out: bool = False) -> torch.Tensor:
    weight = weights[f"{name}.weight"]
    y = x @ weight if stored_in_out else x @ weight.T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _turn(t: Transformer, x_BSD: torch.Tensor) -> torch.Tensor:
    """One head turned: numbers i and i + D/2 are the plane that turns by position / theta^(2i/D)."""
    half = t.head_dim // 2
    turned = torch.empty_like(x_BSD)
    for i in range(half):
        angle = torch.arange(x_BSD.shape[1], dtype=x_BSD.dtype) * t.rope_theta ** (-2 * i / t.head_dim)
        a, b = x_BSD[..., i], x_BSD[..., i + half]
        turned[..., i] = a * angle.cos() - b * angle.sin()
        turned[..., i + half] = a * angle.sin() + b * angle.cos()
    return turned


def _attention(t: Transformer, weights: Weights, at: str, x_BSH: torch.Tensor) -> torch.Tensor:
    query, key, value = (_linear(weights, f"{at}.{part}", x_BSH) for part in ("query", "key", "value"))
    length, window = x_BSH.shape[1], t.sliding_window or x_BSH.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    hidden_keys = (j > i) | (j <= i - window)
    heads = []
    for n in range(t.heads):
        of_keys = slice((n * t.kv_heads // t.heads) * t.head_dim, (n * t.kv_heads // t.heads + 1) * t.head_dim)
        q, k, v = query[..., n * t.head_dim : (n + 1) * t.head_dim], key[..., of_keys], value[..., of_keys]
        if t.qk_norm:
            root_of_square = [torch.sqrt((x**2).mean(-1, keepdim=True) + t.norm_epsilon) for x in (q, k)]
            q = q / root_of_square[0] * weights[f"{at}.query_norm.weight"]
            k = k / root_of_square[1] * weights[f"{at}.key_norm.weight"]
        if t.position == "rotary":
            q, k = _turn(t, q), _turn(t, k)
        scores = (q @ k.transpose(1, 2) / math.sqrt(t.head_dim)).masked_fill(hidden_keys, -math.inf)
        exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
        heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v)
    return _linear(weights, f"{at}.output", torch.cat(heads, dim=-1), stored_in_out=True)


def _mlp(t: Transformer, weights: Weights, at: str, x_BSH: torch.Tensor) -> torch.Tensor:
    up = _linear(weights, f"{at}.up", x_BSH)
    if t.activation == "swiglu":
        gate = _linear(weights, f"{at}.gate", x_BSH)
        up = gate / (1 + torch.exp(-gate)) * up
    elif t.activation == "gelu":
        up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        up = up * (up > 0)
    return _linear(weights, f"{at}.down", up, stored_in_out=True)


def _experts(t: Transformer, weights: Weights, at: str, x_BSH: torch.Tensor) -> torch.Tensor:
    """Each token's experts, one after another, weighted by the softmax over all experts, which for those chosen is made 1."""
    moe = t.experts
    assert moe is not None
    routed_BSE = torch.softmax(_linear(weights, f"{at}.router", x_BSH), dim=-1)
    chosen_BSK = routed_BSE.topk(moe.top_k, dim=-1)
    shares_BSK = chosen_BSK.values / chosen_BSK.values.sum(-1, keepdim=True)
    y_BSH = torch.zeros_like(x_BSH)
    for number in range(moe.experts):
        share_BS = (shares_BSK * (chosen_BSK.indices == number)).sum(-1)
        y_BSH = y_BSH + share_BS[..., None] * _mlp(t, weights, f"{at}.experts.{number}", x_BSH)
    return y_BSH + _mlp(t, weights, f"{at}.shared", x_BSH) if moe.shared_experts else y_BSH


def reference_logits(transformer: Transformer, weights: Weights, tokens_BS: torch.Tensor) -> torch.Tensor:
    """logits_BSV over the vocabulary without its padding."""
    t = transformer
    x_BSH = weights["embedding.tokens.weight"][tokens_BS]
    if t.position == "learned":
        x_BSH = x_BSH + weights["embedding.positions.weight"][: tokens_BS.shape[1]]
    for layer in range(t.layers):
        at = f"layers.{layer}"
        x_BSH = x_BSH + _attention(t, weights, f"{at}.attention", _norm(t, weights, f"{at}.attention_norm", x_BSH))
        inner = _mlp if t.experts is None else _experts
        x_BSH = x_BSH + inner(t, weights, f"{at}.mlp", _norm(t, weights, f"{at}.mlp_norm", x_BSH))
    if t.final_norm:
        x_BSH = _norm(t, weights, "head.norm", x_BSH)
    output = weights["embedding.tokens.weight" if t.tied_embeddings else "head.output.weight"]
    return x_BSH @ output[: t.vocab].T


def reference_loss(transformer: Transformer, weights: Weights, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all tokens."""
    logits_BSV = reference_logits(transformer, weights, tokens_BS)
    likelihood = torch.log_softmax(logits_BSV, dim=-1)
    return -likelihood.gather(-1, labels_BS[..., None]).mean()


# --- Training --------------------------------------------------------------------------------------------------------


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of a step: a straight warm-up, then as the schedule says, down to final_rate x the rate at the last step."""
    rate, warm_up = settings.learning_rate, settings.warm_up_steps
    if step < warm_up:
        return rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - 1 - warm_up)
    left = {
        "constant": 1.0,
        "linear": 1 - progress * (1 - settings.final_rate),
        "cosine": settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return rate * left[settings.rate_schedule]


def train(
    transformer: Transformer,
    weights: Weights,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    optimizer: str,
    settings: Settings,
) -> list[float]:
    """The losses of training on (tokens_BS, labels_BS), one step each, from step 0 on; changes the weights. adamw or sgd."""
    decays = {parameter.name: parameter.decays for parameter in model_parameters(transformer)}
    groups = [
        {"params": [weights[name] for name in weights if decays[name]], "weight_decay": settings.weight_decay},
        {"params": [weights[name] for name in weights if not decays[name]], "weight_decay": 0.0},
    ]
    stepper: torch.optim.Optimizer
    if optimizer == "adamw":
        betas = (settings.beta1, settings.beta2)
        stepper = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon)
    else:
        assert optimizer == "sgd"
        stepper = torch.optim.SGD(groups, lr=settings.learning_rate)
    losses = []
    for step, (tokens_BS, labels_BS) in enumerate(batches):
        loss = reference_loss(transformer, weights, tokens_BS, labels_BS)
        stepper.zero_grad()
        loss.backward()
        if settings.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip_norm)
        for group in stepper.param_groups:
            group["lr"] = learning_rate(settings, step)
        stepper.step()
        losses.append(loss.item())
    return losses
