package core

import (
	"bytes"
	"cmp"
	"compress/flate"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net/netip"
	"sync"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

// The values of FlowHash.Algorithm; all others are unsupported.
const (
	FlowHashLinux = "linux-l4"
	FlowHashAsk   = "ask"
)

// FlowHash is a data plane's description of the hash by which it places flows (fare.v1.FlowHash). The zero value means
// that the data plane has not described it.
type FlowHash struct {
	Algorithm string `json:"algorithm,omitempty"`
	Seed      uint32 `json:"seed,omitempty"`
	Buckets   uint32 `json:"buckets,omitempty"`
	Lasting   uint32 `json:"lasting,omitempty"`
}

// String returns the hash in readable form: "unknown", "ask", "linux-l4 (seed 7, 16 lasting of 1024 buckets)".
func (h FlowHash) String() string {
	switch h.Algorithm {
	case "":
		return "unknown"
	case FlowHashLinux:
		return fmt.Sprintf("%s (seed %d, %d lasting of %d buckets)", h.Algorithm, h.Seed, h.Lasting, h.Buckets)
	}
	return h.Algorithm
}

// hasher returns the hasher over n sub-ports, or nil if ports are to be uniform; the error explains why ports are
// uniform despite the data plane's description.
func (h FlowHash) hasher(n int, asked wecmp.Asked) (wecmp.Hasher, error) {
	const uniform = "source ports are spread evenly; "
	switch h.Algorithm {
	case "":
		return nil, nil
	case FlowHashLinux:
		if h.Lasting == 0 || int64(h.Buckets) < int64(n) {
			return nil, fmt.Errorf("%s: the data plane reports %d buckets for %d sub-ports, %d lasting each, which is not possible: "+uniform+"give each sub-port at least one bucket",
				h.Algorithm, h.Buckets, n, h.Lasting)
		}
		return wecmp.LinuxL4{Seed: h.Seed, Buckets: int(h.Buckets), Lasting: int(min(h.Lasting, h.Buckets))}, nil
	case FlowHashAsk:
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
		_, err := h.hasher(len(c.layout.Sources[i].SubPorts), nil)
		c.fault("the data plane's flow hash", err)
	}
}

// Planners returns the source groups' planners, which choose source ports; they are safe for any goroutine. asked
// resolves flow placement if the data plane must be queried; nil makes such ports uniform.
func (c *Core) Planners(asked wecmp.Asked) []*wecmp.Planner {
	var out []*wecmp.Planner
	for i := range c.sources {
		planner := c.sources[i].engine.Planner()
		if c.flowHash != (FlowHash{}) {
			l := &c.layout.Sources[i]
			engine := l.EngineConfig(c.cfg)
			engine.Hash, _ = c.flowHash.hasher(len(l.SubPorts), asked) // the error is a fault since setFlowHash
			if p, err := wecmp.NewPlanner(engine); err == nil {        // always: the same configuration was accepted at the start
				planner = p
			}
		}
		out = append(out, planner)
	}
	return out
}

// flow is a pair of addresses.
type flow struct{ src, dst netip.Addr }

func (f flow) compare(g flow) int { return cmp.Or(f.src.Compare(g.src), f.dst.Compare(g.dst)) }

// placement is the data plane's answer for a flow, and a digest of it.
type placement struct {
	table  []byte // never modified
	digest [8]byte
}

// land records an answer of the data plane, or drops it.
func (c *Core) land(ev Landing) {
	key := flow{ev.Source, ev.Destination}
	if len(ev.Table) == 0 {
		delete(c.landings, key)
		return
	}
	if c.landings == nil {
		c.landings = map[flow]placement{}
	}
	sum := sha256.Sum256(ev.Table)
	c.landings[key] = placement{ev.Table, [8]byte(sum[:])}
}

// Landing returns the data plane's last answer for a pair of addresses, or nil; it is a wecmp.Asked for the core's
// goroutine.
func (c *Core) Landing(src, dst netip.Addr) []byte { return c.landings[flow{src, dst}].table }

// LandingTable is the content of a Landing. Its text is Huffman-coded, because few values of a byte occur.
type LandingTable []byte

// packers holds writers: creating one takes eight times as long as packing a table.
var packers = sync.Pool{New: func() any {
	w, _ := flate.NewWriter(nil, flate.HuffmanOnly) // fails for other levels only
	return w
}}

// MarshalText implements encoding.TextMarshaler.
func (t LandingTable) MarshalText() ([]byte, error) {
	w := packers.Get().(*flate.Writer)
	defer packers.Put(w)
	var b bytes.Buffer
	w.Reset(&b)
	if _, err := w.Write(t); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return base64.StdEncoding.AppendEncode(nil, b.Bytes()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler. It refuses a table of another length than one byte for each source
// port.
func (t *LandingTable) UnmarshalText(text []byte) error {
	const ports = wecmp.MaxPort - wecmp.MinPort + 1
	packed, err := base64.StdEncoding.AppendDecode(nil, text)
	if err != nil {
		return fmt.Errorf("landing table: %w", err)
	}
	table, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), ports+1))
	if err != nil {
		return fmt.Errorf("landing table: %w", err)
	}
	if len(table) != ports {
		return fmt.Errorf("landing table: it is not of %d source ports", ports)
	}
	*t = table
	return nil
}
