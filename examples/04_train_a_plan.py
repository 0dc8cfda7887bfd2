"""Train a small Llama on four CPU processes, as an asymmetric plan says, and read what was measured beside what is simulated.

python examples/04_train_a_plan.py
"""

from pathlib import Path

from experiments.measured import measured_run
from runtime.settings import Settings
from sim.spec.plan import read_plan
from sim.spec.trace import ACTIVITIES, BUSY

here = Path(__file__).parent
path = here / "plans" / "asymmetric-cpu-4.json"
settings = Settings(steps=5, data=f"text:{here}", learning_rate=3e-3, quiet=True)
run = measured_run(path, read_plan(path), settings, model=None, cluster=None)
assert run.simulated is not None and run.simulated_trace is not None

losses = run.result.losses
print(f"loss {losses[0]:.1f} at first, {'lower' if losses[-1] < losses[0] - 1 else 'hardly lower'} after {len(losses)} steps")
for lane, devices in run.trace.lanes.items():
    measured, simulated = (
        [span.instruction for span in trace.spans if span.lane == lane and ACTIVITIES[type(span.instruction)] in BUSY]
        for trace in (run.trace, run.simulated_trace)
    )
    same = "as simulated" if measured == simulated else "otherwise than simulated"
    print(f"{lane} on {', '.join(devices)}: {len(measured)} times work, {same}")
print(f"keys of both reports: iteration_s, {', '.join(sorted(set(vars(run.measured)) - {'iteration_s'}))}")
