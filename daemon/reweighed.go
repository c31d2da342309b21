package daemon

import (
	"fmt"
	"time"

	"github.com/fared/fared/daemon/internal/status"
)

// reweighedEvery is the least time between two events of changed weights: a flood must not displace other events from the journal.
const reweighedEvery = time.Second

// reweighed counts the changes of weights since the last event that reported them.
type reweighed struct {
	vectors, destinations int
	last                  time.Time // of the last event
}

func (r *reweighed) any() bool { return r.vectors+r.destinations > 0 }

// reportWeights reports changed weights: immediately if the last report is at least reweighedEvery ago, else together with the changes that
// follow until then.
func (l *loop) reportWeights() {
	r := &l.reweighed
	now := time.Now()
	if !r.any() || now.Sub(r.last) < reweighedEvery {
		return
	}
	detail := fmt.Sprintf("%d weight vectors set, %d destinations assigned", r.vectors, r.destinations)
	l.builder.Event(status.Event{Time: now, Kind: status.EventWeights, Subject: "weights", Detail: detail})
	l.log.Debug(status.EventWeights.String(), "detail", detail)
	*r = reweighed{last: now}
}
