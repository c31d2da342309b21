package lab

import (
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
	"github.com/fared/fared/topo"
)

// newRow returns a daemon's weights for a destination, or nil if it has none.
func newRow(f *topo.Fabric, d *farev1.DestinationWeights) *judge.Row {
	if !d.GetReachable() {
		return nil
	}
	r := &judge.Row{Planes: probe.PlaneWeights(f, d), SubPorts: subPortWeights(d)}
	for _, p := range d.Planes {
		if !p.InEffect && r.Pending == "" {
			r.Pending = p.Plane
		}
	}
	return r
}

// subPortWeights spreads the planes' weights over sub-ports by the daemon's sub-port weights, as integers for all
// planes together.
func subPortWeights(d *farev1.DestinationWeights) map[string]uint64 {
	if !d.GetReachable() {
		return nil
	}
	// Each plane's weight is divided by the weights of its sub-ports, over a common multiple of the planes' sums.
	common := uint64(1)
	sums := make([]uint64, len(d.Planes))
	for i, p := range d.Planes {
		for _, s := range p.SubPorts {
			sums[i] += uint64(s.Weight)
		}
		if p.Weight > 0 && sums[i] > 0 {
			common = common / judge.GCD(common, sums[i]) * sums[i]
		}
	}
	weights := map[string]uint64{}
	for i, p := range d.Planes {
		for _, s := range p.SubPorts {
			if p.Weight > 0 && s.Weight > 0 {
				weights[s.Device] = uint64(p.Weight) * uint64(s.Weight) * (common / sums[i])
			}
		}
	}
	return weights
}
