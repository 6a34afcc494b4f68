"""A process that is stuck, until its job ends."""

import time


def oversleep():
    time.sleep(60)
    print("slept for a whole minute", flush=True)  # OVERSLEPT of launch.py
