"""Measures how large the report of 500 runs is, how long it takes to write, and how long a browser takes to open it.

    python benchmarks/report_load.py            # to benchmarks/results/report-load.txt

The runs are simulations of 500 plans for 32 mixed GPUs, no two alike, drawn as in `estimate_speed.py`; the page has the plan and
the memory of each, and the timelines of those it simulates. Chromium opens it from the disk, its caches empty: seconds from the
beginning of the navigation until the page is shown for the first time, and until it is loaded and its script has run; and those
of the processor in the page's thread, which do not depend on what else the machine does.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from estimate_speed import drawn_plans
from run import CLUSTERS, HERE, machine

from experiments.cli import run as motley
from experiments.comparison import rows_csv
from experiments.sweep import execute, given
from sim.spec.cluster import read_cluster
from sim.spec.job import Job
from sim.spec.transformer import transformer

sys.path.insert(0, str(HERE.parent))
from tests import chromium

RUNS, OPENINGS = 500, 7
TIMES = """
const [told] = arguments;
(function wait() {
  const shown = performance.getEntriesByName("first-contentful-paint")[0];
  const { loadEventEnd } = performance.getEntriesByType("navigation")[0];
  if (shown && loadEventEnd) told([shown.startTime, loadEventEnd]); else setTimeout(wait, 50);
})();
"""
CLUSTER = CLUSTERS / "hexiscale-mixed-b.yaml"


def write_runs(folder: Path) -> int:
    """How many of the runs are feasible. Writes their rows and plans, as a sweep does."""
    cluster, job = read_cluster(CLUSTER), Job(transformer("llama-2-7b"), 2048, 64)
    rows = []
    for plan in islice(drawn_plans(cluster, job), RUNS):
        row, text = execute(given(cluster, plan))
        rows.append(row)
        place = folder / str(row["plan"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text or "", encoding="utf-8")
    (folder / "results.csv").write_text(rows_csv(rows), encoding="utf-8")
    return sum(row["iteration_s"] is not None for row in rows)


def opening_s(page: Path, width: int) -> tuple[float, float, float]:
    """Seconds until a new browser shows the page for the first time, until it is loaded, and of its processor: medians."""
    shown, loaded, worked = [], [], []
    for _ in range(OPENINGS):
        with chromium.browser() as driver:
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            chromium.resize(driver, width)
            chromium.open_page(driver, page)
            times = driver.execute_async_script(TIMES)
            metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        worked.append(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))
        shown.append(times[0] / 1000)
        loaded.append(times[1] / 1000)
    return median(shown), median(loaded), median(worked)


def main() -> None:
    """Measures, and writes the table."""
    if chromium.missing() is not None:
        sys.exit(f"report_load: {chromium.missing()}")
    with TemporaryDirectory() as name:
        folder, page = Path(name) / "runs", Path(name) / "report.html"
        feasible = write_runs(folder)
        began = time.perf_counter()
        if motley(["report", str(folder), "--cluster", str(CLUSTER), "--out", str(page)]) != 0:
            sys.exit("report_load: the report was not written")
        writing_s = time.perf_counter() - began
        lines = [
            machine(),
            "",
            f"The report of {RUNS} runs, {feasible} of them feasible, each with a plan of its own for 32 GPUs.",
            "",
            f"size                        {page.stat().st_size / 1e6:6.2f} MB",
            f"written in                  {writing_s:6.2f} s",
        ]
        for width in (1280, 390):
            shown_s, loaded_s, worked_s = opening_s(page, width)
            lines.append(f"shown, {width:4d} pixels wide     {shown_s:6.2f} s")
            lines.append(f"loaded, {width:4d} pixels wide    {loaded_s:6.2f} s")
            lines.append(f"processor, {width:4d} pixels wide {worked_s:6.2f} s")
    text = "\n".join(lines) + "\n"
    (HERE / "results" / "report-load.txt").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
