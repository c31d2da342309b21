package superp

import (
	"fmt"
	"maps"

	"github.com/fared/fared/dataplane/internal/udp"
	"github.com/fared/fared/dataplane/rdma"
)

// Transport is a Core on sockets: an rdma.Transport.
type Transport struct {
	*Core
	endpoint *udp.Endpoint
}

var _ rdma.Transport = (*Transport)(nil)

// New makes a transport; the configuration must be one that Config.Resolve takes, else it panics. Start opens its sockets, in the
// network namespace of the thread that calls it.
func New(cfg Config) *Transport { return &Transport{Core: NewCore(cfg, nil)} }

// Start opens the sockets: it fails when the UDP port is taken at the host's address, or the address is not there.
func (t *Transport) Start(h rdma.Host) error {
	if err := t.Core.Start(h); err != nil {
		return err
	}
	endpoint, err := udp.Open(udp.Config{Address: h.Address(), Port: t.cfg.Port, Core: t.Core, Do: h.Do, Now: h.Now})
	if err != nil {
		return fmt.Errorf("superp: UDP port %d of %v: %w", t.cfg.Port, h.Address(), err)
	}
	// What came before this was for connections that nobody had, and needed no answer.
	h.Do(func() { t.out, t.endpoint = endpoint, endpoint })
	return nil
}

// Flush sends what has been queued.
func (t *Transport) Flush() {
	if t.endpoint == nil {
		return
	}
	t.Core.Flush()
	t.endpoint.Flush()
}

// Counters are the core's and the sockets'.
func (t *Transport) Counters() map[string]uint64 {
	m := t.Core.Counters()
	if t.endpoint != nil {
		maps.Copy(m, t.endpoint.Counters())
	}
	return m
}

// Stop closes the sockets and waits for what reads them.
func (t *Transport) Stop() {
	if t.endpoint != nil {
		t.endpoint.Close()
	}
}
