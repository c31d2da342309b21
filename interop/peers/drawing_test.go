package peers

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// colors of the contestants in order, for light and dark backgrounds alike.
var colors = []string{"#d9822b", "#3b82c4", "#2a9d5c", "#b0479b", "#7a7a7a", "#a0522d", "#6a5acd"}

// drawing returns an SVG with a row for each labeled figure: a dot at the median of each contestant, and a line to its
// 99th percentile, on a logarithmic axis.
func (r *report) drawing() string {
	const (
		left, right, top = 300, 40, 84
		width            = 960
		rowHeight        = 30
	)
	var rows []result
	low, high := math.Inf(1), 0.0
	for _, f := range r.Figures {
		if f.label == "" || len(f.By) == 0 {
			continue
		}
		rows = append(rows, f)
		for _, d := range f.By {
			if d.P50 > 0 {
				low, high = min(low, d.P50), max(high, d.P99)
			}
		}
	}
	if len(rows) == 0 {
		low, high = 1, 10
	}
	first, last := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high))
	if first == last {
		last++
	}
	height := top + rowHeight*len(rows) + 40
	x := func(ms float64) float64 {
		return left + (math.Log10(max(ms, math.Pow(10, first)))-first)/(last-first)*(width-left-right)
	}

	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="Milliseconds of each contestant">`, width, height, width, height)
	line(`<style>text{font:13px system-ui,sans-serif;fill:#24292f}.paper{fill:#fff}.grid{stroke:#d0d7de}.title{font-size:16px;font-weight:600}.faint{fill:#57606a}`)
	line(`@media (prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}.grid{stroke:#30363d}.faint{fill:#9198a1}}</style>`)
	line(`<rect class="paper" width="%d" height="%d" rx="6"/>`, width, height)
	line(`<text class="title" x="20" y="28">From the event to correct weights: milliseconds, less is better</text>`)
	at := 20.0
	for i, c := range r.settings.contestants {
		line(`<circle cx="%.0f" cy="52" r="5" fill="%s"/><text x="%.0f" y="56">%s</text>`, at+5, colors[i%len(colors)], at+16, html.EscapeString(c.name()))
		at += 44 + 8*float64(len(c.name()))
	}
	line(`<text class="faint" x="%.0f" y="56">dot: median, line: to the 99th percentile</text>`, at)
	bottom := top + rowHeight*len(rows)
	for e := first; e <= last; e++ {
		ms := math.Pow(10, e)
		line(`<line class="grid" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`, x(ms), x(ms), top, bottom)
		line(`<text class="faint" x="%.1f" y="%d" text-anchor="middle">%g</text>`, x(ms), bottom+20, ms)
	}
	for i, f := range rows {
		middle := top + rowHeight*i + rowHeight/2
		line(`<text x="%d" y="%d" text-anchor="end">%s</text>`, left-16, middle+4, html.EscapeString(f.label))
		line(`<line class="grid" x1="20" x2="%d" y1="%d" y2="%[2]d"/>`, width-right, top+rowHeight*(i+1))
		for k, c := range r.settings.contestants {
			d, ok := f.By[c.name()]
			if !ok {
				continue
			}
			y := float64(middle) + (float64(k)-float64(len(r.settings.contestants)-1)/2)*6
			line(`<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="%s" stroke-width="2" stroke-opacity="0.55"/>`, x(d.P50), x(d.P99), y, y, colors[k%len(colors)])
			line(`<circle cx="%.1f" cy="%.1f" r="4" fill="%s"><title>%s: %s ms, p99 %s, n %d</title></circle>`, x(d.P50), y, colors[k%len(colors)],
				html.EscapeString(c.name()), number(d.P50), number(d.P99), d.N)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}
