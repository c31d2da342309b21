package daemon

import (
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/metric"
)

// Metrics returns the metrics that daemons export, in the order of their documentation.
func Metrics() []*metric.Metric { return status.Exported() }
