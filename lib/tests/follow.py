"""Does what follow.c does: follow.py FOLDER SOURCE DESTINATION, where FOLDER has fared_slots.py."""

import select
import sys
import time
import warnings

sys.path.insert(0, sys.argv[1])
import fared_slots

warned = []
warnings.showwarning = lambda message, *rest: warned.append(str(message))
warnings.simplefilter("always")
try:
    table = fared_slots.open()
except fared_slots.Error as e:
    print("0 0 0", e, flush=True)
    sys.exit()
last = ""
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        share = table.lookup(sys.argv[2], sys.argv[3]).slots[0].share
    except (fared_slots.Error, IndexError):
        share = 0
    reason = table.check()
    if reason and reason not in warned:
        reason = None  # until wait has warned
    line = f"{table.status().run} {share} {reason or 'success'}"
    if line != last:
        print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), line, flush=True)
        last = line
    table.wait(0.1)
