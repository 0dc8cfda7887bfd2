"""The questions people ask: command line, sweeps, comparisons, validation, plots, reports."""
