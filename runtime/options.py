"""The words of a command line that stand for a run's settings, both ways: parsed, and written for the workers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from runtime.settings import BACKENDS, DEVICES, DTYPES, RATE_SCHEDULES, TOKEN_TYPES, Settings
from sim.spec.reading import InputError, quantity

EXAMPLE = "python -m runtime plan.json --steps 20 --data text:corpus/ --results results/"

HELP: dict[str, tuple[str, str]] = {
    "steps": ("N", "optimizer steps of the whole training, those before a resumption included"),
    "data": ("SOURCE", "text:FILE or text:FOLDER (bytes as tokens), or tokens:FILE"),
    "device": ("|".join(DEVICES), "what the workers compute on"),
    "precision": ("|".join(name for name in DTYPES if name != "fp64"), "in the place of the plan's"),
    "seed": ("N", "of the first weights and of the order of samples"),
    "learning_rate": ("RATE", "its highest value"),
    "final_rate": ("FRACTION", "of the learning rate that a linear or cosine schedule ends with"),
    "rate_schedule": ("|".join(RATE_SCHEDULES), "how the learning rate falls after the warm-up"),
    "warm_up_steps": ("N", "steps over which the learning rate rises from 0"),
    "weight_decay": ("RATE", "of matrices; vectors do not decay"),
    "beta1": ("FRACTION", "of Adam, the mean of the gradients"),
    "beta2": ("FRACTION", "of Adam, the mean of their squares"),
    "epsilon": ("NUMBER", "of Adam"),
    "clip_norm": ("NORM", "the global norm that gradients are clipped to; 0 for not at all"),
    "token_type": ("|".join(TOKEN_TYPES), "of the numbers in a tokens: file"),
    "checkpoints": ("DIR", "the folder of the run's checkpoints"),
    "checkpoint_every": ("N", "steps between checkpoints; 0 for one at the end alone"),
    "keep_checkpoints": ("N", "how many of the latest complete checkpoints stay; 0 for all"),
    "resume": ("", "go on from the latest complete checkpoint"),
    "weights": ("DIR", "a Hugging Face folder whose safetensors are the first weights"),
    "save_weights": ("DIR", "where the trained weights are written, as Hugging Face safetensors"),
    "timeout_s": ("TIME", "how long a worker waits for another before the run is given up, such as 60s or 5min"),
    "backend": ("|".join(BACKENDS), "of messages; by default nccl on cuda and gloo on the cpu"),
    "compile": ("", "compile the layers by torch.compile"),
    "quiet": ("", "print no line for each step"),
    "pace": ("FILE", "a pace file: each instruction waits to take as long as it says"),
    "testbed": ("NAME", "run in the namespaces of this testbed"),
    "results": ("DIR", "where the measured trace and the figures are written"),
}
"""For each field of Settings, what its option's help shows: the value's form, empty for a switch, and what it is."""


def parse(words: Sequence[str]) -> tuple[str, str | None, Settings]:
    """The plan's path, the model in the place of the plan's where one is given, and the settings.

    Raises InputError for words that are missing, unknown or of no use; `--help` prints the help and ends the process.
    """
    parser = _Parser(
        prog="python -m runtime",
        description="Trains what a plan describes: starts one worker per device of the plan on this machine; under torchrun, "
        "is one of the workers.",
        epilog=f"example: {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("plan", metavar="PLAN", help="the plan's JSON file")
    parser.add_argument("--model", metavar="PRESET|PATH", help="in the place of the plan's: a preset, a config.json or a folder")
    for field in dataclasses.fields(Settings):
        metavar, what = HELP[field.name]
        if field.type == "bool":
            parser.add_argument(_flag(field.name), dest=field.name, action="store_true", help=what)
            continue
        required = field.default is dataclasses.MISSING
        shown = "" if required or field.default is None else f" (default {_text(field.name, field.default)})"
        parser.add_argument(
            _flag(field.name),
            dest=field.name,
            metavar=metavar,
            type=_seconds if field.name == "timeout_s" else _TYPES[str(field.type)],
            required=required,
            default=None if required else field.default,
            help=what + shown,
        )
    values = vars(parser.parse_args(list(words)))
    plan, model = values.pop("plan"), values.pop("model")
    return plan, model, Settings(**values)


def arguments(settings: Settings, model: str | None = None) -> list[str]:
    """The words that `parse` reads these settings and this model from, beside the plan's path; defaults are left out."""
    words = [] if model is None else _words("--model", model)
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if field.type == "bool":
            words += [_flag(field.name)] if value else []
        elif value != field.default:
            words += _words(_flag(field.name), _text(field.name, value))
    return words


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see python -m runtime --help")


def _seconds(text: str) -> float:
    """The seconds of a time with its unit."""
    try:
        return quantity(text, "time")
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, but got {text!r}") from None


def _number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, but got {text!r}") from None


_TYPES: dict[str, Any] = {"int": _whole, "float": _number, "str": str, "str | None": str, "Path | None": Path}
"""What reads a value, by the annotation of its field."""


def _flag(name: str) -> str:
    """The option of a field of Settings."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def _text(name: str, value: object) -> str:
    """The word for a field's value, to the last bit."""
    return f"{str(value).removesuffix('.0')}s" if name == "timeout_s" else str(value)


def _words(flag: str, value: str) -> list[str]:
    """An option with its value; as one word where the value looks like an option itself."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]
