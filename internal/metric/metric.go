// Package metric describes metrics once: for Prometheus, for docs/operations/metrics.md, and for tests of rules and
// dashboards.
package metric

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Type is the type of a metric, by its name in the Prometheus exposition format.
type Type string

// Types of metrics.
const (
	Gauge     Type = "gauge"
	Counter   Type = "counter"
	Histogram Type = "histogram"
)

// Metric is a metric. Units are in the name: _seconds, _bytes, _bps (bit/s), and _total for a count since start.
type Metric struct {
	Name string
	// Help is the meaning, in sentences with a period at the end.
	Help   string
	Type   Type
	Labels []string
	desc   *prometheus.Desc
}

func newMetric(t Type, name, help string, labels []string) *Metric {
	return &Metric{name, help, t, labels, prometheus.NewDesc(name, help, labels, nil)}
}

// Desc returns the description for Prometheus.
func (m *Metric) Desc() *prometheus.Desc { return m.desc }

// With returns the metric with further labels; it belongs to no Set.
func (m *Metric) With(labels ...string) *Metric {
	return newMetric(m.Type, m.Name, m.Help, slices.Concat(m.Labels, labels))
}

// Sample returns a sample of a gauge or counter; labels are the values of Labels. It panics if their number differs.
func (m *Metric) Sample(value float64, labels ...string) prometheus.Metric {
	kind := prometheus.GaugeValue
	if m.Type == Counter {
		kind = prometheus.CounterValue
	}
	return prometheus.MustNewConstMetric(m.desc, kind, value, labels...)
}

// Flag returns a sample of a gauge: 1 for true, 0 for false.
func (m *Metric) Flag(on bool, labels ...string) prometheus.Metric {
	value := 0.0
	if on {
		value = 1
	}
	return m.Sample(value, labels...)
}

// New returns an empty histogram without labels; buckets are the upper bounds, in the metric's unit.
func (m *Metric) New(buckets []float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: buckets})
}

// Set is the metrics of a program, in the order of their declaration. The zero value is an empty set.
type Set struct{ all []*Metric }

// Gauge adds a gauge.
func (s *Set) Gauge(name, help string, labels ...string) *Metric {
	return s.add(Gauge, name, help, labels)
}

// Counter adds a counter.
func (s *Set) Counter(name, help string, labels ...string) *Metric {
	return s.add(Counter, name, help, labels)
}

// Histogram adds a histogram.
func (s *Set) Histogram(name, help string) *Metric { return s.add(Histogram, name, help, nil) }

func (s *Set) add(t Type, name, help string, labels []string) *Metric {
	m := newMetric(t, name, help, labels)
	s.all = append(s.all, m)
	return m
}

// All returns the metrics, in the order of their declaration.
func (s *Set) All() []*Metric { return slices.Clone(s.all) }
