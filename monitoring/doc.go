// Package monitoring generates the files with which operators watch fared in Prometheus and Grafana from the metrics in
// the code, and tests them with promtool.
package monitoring

//go:generate go run ./gen -root ..
