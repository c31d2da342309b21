package daemon

import (
	"fmt"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

// The values of FlowHash.Algorithm; any other is not understood.
const (
	flowHashLinux = "linux-l4"
	flowHashAsk   = "ask"
)

// FlowHash is what a data plane said of the hash by which it places flows: fare.v1.FlowHash. The zero value: nothing.
type FlowHash struct {
	Algorithm string `json:"algorithm,omitempty"`
	Seed      uint32 `json:"seed,omitempty"`
	Buckets   uint32 `json:"buckets,omitempty"`
	Lasting   uint32 `json:"lasting,omitempty"`
}

func flowHash(h *farev1.FlowHash) FlowHash {
	return FlowHash{Algorithm: h.GetAlgorithm(), Seed: h.GetSeed(), Buckets: h.GetBuckets(), Lasting: h.GetLastingBuckets()}
}

// String is what people read: "unknown", "ask", "linux-l4 (seed 7, 16 of 1024 buckets last)".
func (h FlowHash) String() string {
	switch h.Algorithm {
	case "":
		return "unknown"
	case flowHashLinux:
		return fmt.Sprintf("%s (seed %d, %d of %d buckets last)", h.Algorithm, h.Seed, h.Lasting, h.Buckets)
	}
	return h.Algorithm
}

// hasher returns what computes the hash over n sub-ports, nil when ports are to be uniform; the error says why they are
// although the data plane said something.
func (h FlowHash) hasher(n int, asked wecmp.Asked) (wecmp.Hasher, error) {
	const uniform = "source ports are spread evenly; "
	switch h.Algorithm {
	case "":
		return nil, nil
	case flowHashLinux:
		if h.Lasting == 0 || int64(h.Buckets) < int64(n) {
			return nil, fmt.Errorf("%s: %d buckets for %d sub-ports, %d of each lasting, make no sense: "+uniform+"give each sub-port at least one",
				h.Algorithm, h.Buckets, n, h.Lasting)
		}
		return wecmp.LinuxL4{Seed: h.Seed, Buckets: int(h.Buckets), Lasting: int(min(h.Lasting, h.Buckets))}, nil
	case flowHashAsk:
		if n > maxAskedSubPorts {
			return nil, fmt.Errorf("%s: an answer has room for %d sub-ports, and there are %d: "+uniform+"set weights.hash",
				h.Algorithm, maxAskedSubPorts, n)
		}
		if asked == nil {
			return nil, nil
		}
		return asked, nil
	}
	return nil, fmt.Errorf("%q is not known to this version of fared: "+uniform+"update fared, or set weights.hash", h.Algorithm)
}

// maxAskedSubPorts is what LandingResponse's byte for a port can tell apart.
const maxAskedSubPorts = 255

// setFlowHash has source ports chosen by the data plane's hash, when the configuration leaves it to it.
func (c *Core) setFlowHash(h FlowHash) {
	if c.cfg.Weights.Hash.Algorithm != config.HashDataplane || h == c.flowHash {
		return
	}
	c.flowHash = h
	hasher, err := h.hasher(len(c.layout.subPorts), c.asked)
	c.fault("the data plane's flow hash", err)
	engine := c.layout.engineConfig(c.cfg)
	engine.Hash = hasher
	planner, err := wecmp.NewPlanner(engine)
	if err != nil { // the same configuration was accepted at the start
		c.fault("the data plane's flow hash", err)
		return
	}
	c.planner = planner
}
