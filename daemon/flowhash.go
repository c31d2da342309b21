package daemon

import (
	"fmt"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

// The values of FlowHash.Algorithm; all others are unsupported.
const (
	flowHashLinux = "linux-l4"
	flowHashAsk   = "ask"
)

// FlowHash is a data plane's description of the hash by which it places flows (fare.v1.FlowHash). The zero value means that the data plane has
// not described it.
type FlowHash struct {
	Algorithm string `json:"algorithm,omitempty"`
	Seed      uint32 `json:"seed,omitempty"`
	Buckets   uint32 `json:"buckets,omitempty"`
	Lasting   uint32 `json:"lasting,omitempty"`
}

func flowHash(h *farev1.FlowHash) FlowHash {
	return FlowHash{Algorithm: h.GetAlgorithm(), Seed: h.GetSeed(), Buckets: h.GetBuckets(), Lasting: h.GetLastingBuckets()}
}

// String returns the hash in readable form: "unknown", "ask", "linux-l4 (seed 7, 16 lasting of 1024 buckets)".
func (h FlowHash) String() string {
	switch h.Algorithm {
	case "":
		return "unknown"
	case flowHashLinux:
		return fmt.Sprintf("%s (seed %d, %d lasting of %d buckets)", h.Algorithm, h.Seed, h.Lasting, h.Buckets)
	}
	return h.Algorithm
}

// hasher returns the hasher over n sub-ports, or nil if ports are to be uniform; the error explains why ports are uniform despite the data
// plane's description.
func (h FlowHash) hasher(n int, asked wecmp.Asked) (wecmp.Hasher, error) {
	const uniform = "source ports are spread evenly; "
	switch h.Algorithm {
	case "":
		return nil, nil
	case flowHashLinux:
		if h.Lasting == 0 || int64(h.Buckets) < int64(n) {
			return nil, fmt.Errorf("%s: the data plane reports %d buckets for %d sub-ports, %d lasting each, which is not possible: "+uniform+"give each sub-port at least one bucket",
				h.Algorithm, h.Buckets, n, h.Lasting)
		}
		return wecmp.LinuxL4{Seed: h.Seed, Buckets: int(h.Buckets), Lasting: int(min(h.Lasting, h.Buckets))}, nil
	case flowHashAsk:
		if n > maxAskedSubPorts {
			return nil, fmt.Errorf("%s: an answer can distinguish %d sub-ports, but there are %d: "+uniform+"set weights.hash",
				h.Algorithm, maxAskedSubPorts, n)
		}
		if asked == nil {
			return nil, nil
		}
		return asked, nil
	}
	return nil, fmt.Errorf("this version of fared does not recognize %q: "+uniform+"update fared, or set weights.hash", h.Algorithm)
}

// maxAskedSubPorts is the number of sub-ports that LandingResponse's byte per port can distinguish.
const maxAskedSubPorts = 255

// setFlowHash makes source ports follow the data plane's hash, if the configuration leaves the hash to the data plane.
func (c *Core) setFlowHash(h FlowHash) {
	if c.cfg.Weights.Hash.Algorithm != config.HashDataplane || h == c.flowHash {
		return
	}
	c.flowHash = h
	for i := range c.sources {
		l := &c.layout.sources[i]
		hasher, err := h.hasher(len(l.subPorts), c.asked)
		c.fault("the data plane's flow hash", err)
		engine := l.engineConfig(c.cfg)
		engine.Hash = hasher
		if planner, err := wecmp.NewPlanner(engine); err == nil { // always: the same configuration was accepted at the start
			c.sources[i].planner = planner
		}
	}
}
