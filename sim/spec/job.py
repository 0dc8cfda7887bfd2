"""The job: what is to be trained, and how much of it makes one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from sim.spec.gpu import PRECISIONS
from sim.spec.reading import InputError
from sim.spec.transformer import Transformer

OPTIMIZERS = ("adamw", "sgd")
GRADIENT_PRECISIONS = ("fp32", "bf16")

MOST_TOKENS, MOST_SEQUENCES = 2**26, 1_000_000
"""The longest sequence, and the largest global batch."""


@dataclass(frozen=True)
class Job:
    """A model trained with sequences of `sequence_length` tokens, `global_batch` of them in one iteration."""

    model: Transformer
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    gradient_precision: str = "fp32"
    """In which gradients are accumulated over micro-batches and summed over copies: bf16 halves the bytes, and rounds."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Transformer):
            raise InputError(
                f"a job's model is a Transformer, such as transformer('llama-2-7b') gives, but got {self.model!r:.80}"
            )
        sizes = (("sequence length", self.sequence_length, MOST_TOKENS), ("global batch", self.global_batch, MOST_SEQUENCES))
        for name, value, most in sizes:
            if not isinstance(value, Integral) or not 1 <= value <= most:
                raise InputError(f"the {name} is a whole number, at least 1 and at most {most:,}, but got {value!r}")
        if self.precision not in PRECISIONS:
            raise InputError(f"unknown precision {self.precision!r}; accepted: {', '.join(PRECISIONS)}")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"unknown optimizer {self.optimizer!r}; accepted: {', '.join(OPTIMIZERS)}")
        if self.gradient_precision not in GRADIENT_PRECISIONS:
            accepted = ", ".join(GRADIENT_PRECISIONS)
            raise InputError(f"unknown gradient precision {self.gradient_precision!r}; accepted: {accepted}")
        model = self.model
        if model.position == "learned" and self.sequence_length > model.max_positions:
            raise InputError(
                f"{model.name} has learned positions for {model.max_positions} tokens, but the sequence length is "
                f"{self.sequence_length}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of one iteration."""
        return self.sequence_length * self.global_batch

    @property
    def precisions(self) -> str:
        """Its precision, and that of its gradients where it is not fp32."""
        return (
            self.precision if self.gradient_precision == "fp32" else f"{self.precision}, gradients in {self.gradient_precision}"
        )

    @property
    def summary(self) -> str:
        """The job on one line."""
        return f"{self.model.name}, {self.global_batch} x {self.sequence_length} tokens, {self.precisions}, {self.optimizer}"
