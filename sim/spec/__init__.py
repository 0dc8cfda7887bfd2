"""The nouns: frozen records of clusters, models, jobs, plans, programs, traces and verdicts, in SI units."""
