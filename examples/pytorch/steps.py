"""Draws the time of each step of run.sh's training as SVG, and prints how long steps took after each change of a leaf.

usage: steps.py PLAIN SLOTS EVENTS SVG

PLAIN and SLOTS have the lines 'step N loss L at TIME' of both runs, EVENTS the lines 'TIME LEAF down|up' of the second one.
"""
import statistics
import sys


def ends(path):
    """Returns the times at which steps ended."""
    with open(path) as lines:
        return [float(line.split()[-1]) for line in lines if line.startswith("step ")]


def durations(times):
    """Returns the end and the duration of each step but the first."""
    return [(b, b - a) for a, b in zip(times, times[1:])]


def settles(steps, median, begin, end):
    """Returns the time from an event until the end of the last slow step before the next one, and the longest step; a slow step takes twice the median."""
    found = [(at, took) for at, took in steps if at > begin and at - took < end]
    slow = [at - begin for at, took in found if took > 2 * median]
    return max(slow, default=0.0), max((took for _, took in found), default=0.0)


def svg(steps, median, outages, begin):
    """Returns the drawing."""
    width, height, left, top, bottom = 960, 300, 56, 40, 36
    last, most = steps[-1][0] - begin, 1.1 * max(took for _, took in steps)

    def x(seconds):
        return left + (width - left - 12) * seconds / last

    def y(seconds):
        return height - bottom - (height - top - bottom) * seconds / most

    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">' % (width, height),
           '<title>Time of each training step while leaves fail and return</title>', '<rect width="%d" height="%d" fill="#fff"/>' % (width, height)]
    for leaf, down, up in outages:
        out.append('<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="#f6c6c0"/>' % (x(down - begin), top, x(up - begin) - x(down - begin), height - top - bottom))
        out.append('<text x="%.1f" y="%d" text-anchor="middle" font-size="10">%s</text>' % (x((down + up) / 2 - begin), top - 6, leaf.replace("leaf", "p")))
    unit = next(u for u in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300) if most / u <= 8)
    for i in range(int(most / unit) + 1):
        out.append('<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.0f ms</text>' % (left, y(i * unit), width - 12, left - 6, y(i * unit) + 4, 1000 * i * unit))
    unit = next(u for u in (1, 2, 5, 10, 20, 60, 300, 3600) if last / u <= 16)
    for i in range(int(last / unit) + 1):
        out.append('<text x="%.1f" y="%d" text-anchor="middle">%d s</text>' % (x(i * unit), height - bottom + 16, i * unit))
    out.append('<path d="M%d %.1fH%d" stroke="#2a7" stroke-dasharray="4 3"/>' % (left, y(median), width - 12))
    out.append('<path d="M%s" fill="none" stroke="#236" stroke-width="1.2"/>' % "L".join("%.1f %.1f" % (x(at - begin), y(took)) for at, took in steps))
    out.append('<text x="%d" y="16">time of each step; red: the leaf of this plane is down; dashed: median of the run without failures, %.0f ms</text>' % (left, 1000 * median))
    return "\n".join(out + ["</svg>", ""])


plain, times = durations(ends(sys.argv[1])), ends(sys.argv[2])
steps = durations(times)
median = statistics.median(took for _, took in plain)
with open(sys.argv[3]) as lines:
    events = [(float(at), leaf, state) for at, leaf, state in map(str.split, lines) if float(at) < times[-1]]
begin, outages = times[0], []
for i, (at, leaf, state) in enumerate(events):
    after = events[i + 1][0] if i + 1 < len(events) else times[-1]
    if state == "down":
        outages.append((leaf, at, after))
slow = [took for _, took in plain if took > 2 * median]
print("without failures: %d steps, median %.0f ms, slowest %.0f ms, %d above twice the median" % (len(plain), 1000 * median, 1000 * max(took for _, took in plain), len(slow)))
print("with failures: %d steps, median %.0f ms, %.2f times as long in all" % (len(steps), 1000 * statistics.median(took for _, took in steps), sum(took for _, took in steps) / sum(took for _, took in plain)))
for want in ("down", "up"):
    results = [settles(steps, median, at, events[i + 1][0] if i + 1 < len(events) else times[-1]) for i, (at, _, state) in enumerate(events) if state == want]
    if results:
        back = sorted(back for back, _ in results)
        print("leaf %s: %d times, last slow step ended after %.2f s (median), %.2f s (most); slowest step %.0f ms; %d not within 1 s" % (
            want, len(back), statistics.median(back), back[-1], 1000 * max(longest for _, longest in results), sum(b > 1 for b in back)))
with open(sys.argv[4], "w") as out:
    out.write(svg(steps, median, outages, begin))
