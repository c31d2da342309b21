package worker

import (
	"slices"
	"time"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/internal/waits"
)

const (
	// memorable is the time for which a refused node is remembered.
	memorable = 10 * time.Minute
	// maxStrangers bounds the refused nodes, maxID their identifiers.
	maxStrangers = 100
	maxID        = 64
)

// stranger is a refused node, with the worker that has refused it.
type stranger struct {
	*fleetv1.RefusedNode
	origin string
}

// strange notes a node that this worker has refused.
func (s *store) strange(x *fleetv1.RefusedNode) {
	s.strangeOf(own, x)
	s.mu.Lock()
	defer s.mu.Unlock()
	for f := range s.followers {
		f.strangers = true
		waits.Ring(f.wake)
	}
}

// strangeOf notes a node that a worker has refused.
func (s *store) strangeOf(origin string, x *fleetv1.RefusedNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.strangers, func(o stranger) bool { return o.RouterId == x.RouterId && o.Address == x.Address })
	if i >= 0 && s.strangers[i].LastNs >= x.LastNs {
		return // a repetition by another worker
	}
	if i >= 0 {
		s.strangers = slices.Delete(s.strangers, i, i+1)
	}
	at, _ := slices.BinarySearchFunc(s.strangers, x.LastNs, func(o stranger, ns uint64) int {
		if o.LastNs > ns {
			return -1
		}
		return 1
	})
	s.strangers = slices.Insert(s.strangers, at, stranger{x, origin})
	s.strangers = s.strangers[:min(len(s.strangers), maxStrangers)]
}

// refusedNodes returns the nodes that were refused not long ago, the last one first.
func (s *store) refusedNodes(now time.Time) (all []*fleetv1.RefusedNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strangers = slices.DeleteFunc(s.strangers, func(x stranger) bool { return now.Sub(time.Unix(0, int64(x.LastNs))) > memorable })
	for _, x := range s.strangers {
		all = append(all, x.RefusedNode)
	}
	return all
}
