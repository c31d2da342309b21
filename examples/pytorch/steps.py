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


def settles(steps, usual, begin, end):
    """Returns the time from an event until two steps in a row are normal, and the longest step until the next event. A normal step takes 1.5 times the usual time at most."""
    found = [(at, took) for at, took in steps if at > begin and at - took < end]
    back = 0.0
    for first, second in zip(found, found[1:]):
        if max(first[1], second[1]) <= 1.5 * usual:
            break
        back = first[0] - begin
    return back, max((took for _, took in found), default=0.0)


def report(name, steps, usual, events):
    """Prints how soon steps are normal after leaves fail, and after they return."""
    for want in ("down", "up"):
        ends_of = [events[i + 1][0] if i + 1 < len(events) else steps[-1][0] for i in range(len(events))]
        results = [settles(steps, usual, at, end) for (at, _, state), end in zip(events, ends_of) if state == want]
        if results:
            back = sorted(back for back, _ in results)
            print("%s, leaf %s, %d times: steps are normal after %.2f s (median), %.2f s (most); %d not within 1 s; slowest step %.0f ms" % (
                name, want, len(back), statistics.median(back), back[-1], sum(b > 1 for b in back), 1000 * max(longest for _, longest in results)))


def svg(steps, median, outages, begin):
    """Returns the drawing."""
    width, height, left, top, bottom = 960, 300, 64, 40, 36
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
usual = statistics.median(took for _, took in steps)
print("without failures: %d steps, median %.0f ms, slowest %.0f ms" % (len(plain), 1000 * median, 1000 * max(took for _, took in plain)))
print("with failures: %d steps, median %.0f ms, slowest %.0f ms" % (len(steps), 1000 * usual, 1000 * max(took for _, took in steps)))
report("with failures", steps, usual, events)
# What the machine's other programs do to steps: the same times in the run without failures.
shift = plain[0][0] - steps[0][0]
report("without, at the same times", plain, median, [(at + shift, leaf, state) for at, leaf, state in events if at + shift < plain[-1][0]])
with open(sys.argv[4], "w") as out:
    out.write(svg(steps, median, outages, begin))
