"""What a wide-area link's distance is made of where the kernel cannot delay packets: frames kept for a while between two TAPs.

A process of its own, started by `runtime.testbed` with Python's standard library alone:
`relay.py TAP TAP LATENCY_S BYTES_PER_S [TAP TAP ...]`. It prints a line when the devices are open, and runs until it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
PR_SET_TIMERSLACK = 29
PRIORITY = 23
"""Of the real-time scheduler: above those of the workers (`runtime.pacer`)."""

LONGEST_FRAME = 65_536
REST_S = 0.05
"""How long a device that cannot be read, as one that is set down, is left alone."""


def open_tap(name: str) -> int:
    """The file descriptor of a TAP device in this process's network namespace, which does not block. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


class Way:
    """One direction of a link: what was read from `source` is written to `target` after `latency_s`, in order.

    And after the time that the link needs for the frame: a shaper lets the first frame of many pass at once, a wire does not.
    """

    def __init__(self, source: int, target: int, latency_s: float, bytes_per_s: float) -> None:
        self.source, self.target = source, target
        self.latency_s, self.byte_s = latency_s, 1 / bytes_per_s
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.rests_until_s = 0.0

    def take(self) -> None:
        """Nothing; reads all frames that have come."""
        try:
            while True:
                frame = os.read(self.source, LONGEST_FRAME)
                due_s = time.monotonic() + self.latency_s + len(frame) * self.byte_s
                self.under_way.append((max(due_s, self.under_way[-1][0] if self.under_way else 0.0), frame))
        except BlockingIOError:
            return
        except OSError:
            self.rests_until_s = time.monotonic() + REST_S

    def give(self, now_s: float) -> None:
        """Nothing; writes the frames whose time has come. What a device does not take is lost, as on a broken link."""
        while self.under_way and self.under_way[0][0] <= now_s:
            with contextlib.suppress(OSError):
                os.write(self.target, self.under_way.popleft()[1])


def relay(ways: Sequence[Way]) -> None:
    """Nothing; never returns."""
    while True:
        now_s = time.monotonic()
        for way in ways:
            way.give(now_s)
        due_s = [way.under_way[0][0] for way in ways if way.under_way]
        due_s += [way.rests_until_s for way in ways if way.rests_until_s > now_s]
        waits_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        listening = {way.source: way for way in ways if way.rests_until_s <= now_s}
        ready, _, _ = select.select(list(listening), [], [], waits_s)
        for source in ready:
            listening[source].take()


def main(words: Sequence[str]) -> None:
    """Nothing; opens the devices and relays between them."""
    ways = []
    for first, second, latency, rate in zip(*[iter(words)] * 4, strict=True):
        a, b = open_tap(first), open_tap(second)
        ways += [Way(a, b, float(latency), float(rate)), Way(b, a, float(latency), float(rate))]
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # among busy workers a frame would else be late by a turn of theirs
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    print("ready", flush=True)
    relay(ways)


if __name__ == "__main__":
    main(sys.argv[1:])
