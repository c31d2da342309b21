package daemon

import (
	"context"
	"io"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/status"
)

// Replayed is one event of a recording with its results, or a report of the data plane's progress.
type Replayed = core.Replayed

// Effect is the data plane's progress with the weights of a recording.
type Effect = core.Effect

// Replay runs a recording through a fresh core and calls each, if not nil, after every event, for every report of the
// data plane's progress and for every gap. It returns the final state.
func Replay(in io.Reader, each func(Replayed)) (*core.Core, error) { return core.Replay(in, each) }

// Weights returns the weights that a replay ends with, sorted by address, in the form of WeightService. No weight is
// shown as in effect, because a replay has no data plane; the last Replayed.Effect is that of the recording daemon's.
func Weights(c *core.Core) ([]*farev1.DestinationWeights, error) {
	l := newLoop(&Daemon{}, c)
	if l.ports != nil {
		l.ports.use(c.Planners(c.Landing))
	}
	c.Destinations(func(source int, prefix netip.Prefix, vector uint32) {
		l.shown.assign(l.key(source, prefix), 0, l.started, vector, 0, nil)
		l.builder.MarkVector(vector)
		l.builder.MarkDestination(status.Key{Prefix: prefix, Source: source})
	})
	l.builder.Commit()
	here := func(_ context.Context, fn func()) error { fn(); return nil }
	service, err := status.NewService(status.ServiceConfig{Reader: l.builder.Reader(here), Explain: l.explain, Drain: noDrain, ClearSession: noClear, Reload: noReload})
	var all []*farev1.DestinationWeights
	for token := ""; err == nil; {
		var page *farev1.ListWeightsResponse
		if page, err = service.Weights().ListWeights(context.Background(), &farev1.ListWeightsRequest{PageSize: 10000, PageToken: token}); err == nil {
			all = append(all, page.Weights...)
			if token = page.NextPageToken; token == "" {
				return all, nil
			}
		}
	}
	return nil, err
}

func noDrain(context.Context, status.DrainRequest) (status.DrainTarget, []string, error) {
	return status.DrainTarget{}, nil, errStopped
}
func noClear(context.Context, string) error            { return errStopped }
func noReload(context.Context, bool) ([]string, error) { return nil, errStopped }
