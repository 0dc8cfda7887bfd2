"""Calibration: from measured runs, and measurements of links, to the constants of a cluster that predict them best.

`observations` reads what runs measured, `constants` says what may be fitted, and `fit` fits it.
"""

from sim.calibrate.fit import NEEDED_PLANS, Calibrated, Errors, Prediction, Told, calibrate, chosen_fitting
from sim.calibrate.observations import Elsewhere, Observed, observed

__all__ = [
    "NEEDED_PLANS",
    "Calibrated",
    "Elsewhere",
    "Errors",
    "Observed",
    "Prediction",
    "Told",
    "calibrate",
    "chosen_fitting",
    "observed",
]
