package roce

import (
	"maps"

	"github.com/fared/fared/transport/internal/udp"
	"github.com/fared/fared/transport/rdma"
)

// Transport is a Core on sockets.
type Transport struct {
	*Core
	endpoint *udp.Endpoint
}

var _ rdma.Steered = (*Transport)(nil)

// New makes a transport. Start opens its sockets, in the network namespace of the calling thread.
func New(cfg Config) *Transport { return &Transport{Core: NewCore(cfg, nil)} }

// Start implements rdma.Transport. It fails if the UDP port is taken at the host's address, or if the host lacks the
// address.
func (t *Transport) Start(h rdma.Host) error {
	if err := t.Core.Start(h); err != nil {
		return err
	}
	// Linux's rdma_rxe sends the UDP checksum 0 over IPv6 too. The ICRC covers more.
	endpoint, err := udp.Open(udp.Config{Address: t.address, Port: t.cfg.Port, Core: t.Core, Do: h.Do, Now: h.Now, NoChecksum: true})
	if err != nil {
		return err
	}
	// Packets that arrived before were for no existing queue pair, and needed no answer.
	h.Do(func() { t.out, t.endpoint = endpoint, endpoint })
	return nil
}

// Service implements rdma.Steered.
func (t *Transport) Service() rdma.Service {
	return rdma.Service{Protocol: rdma.ProtocolUDP, Port: t.cfg.Port}
}

// Flush implements rdma.Transport.
func (t *Transport) Flush() {
	if t.endpoint == nil {
		return
	}
	t.Core.Flush()
	t.endpoint.Flush()
}

// Counters implements rdma.Transport. It includes the counters of the sockets.
func (t *Transport) Counters() map[string]uint64 {
	m := t.Core.Counters()
	if t.endpoint != nil {
		maps.Copy(m, t.endpoint.Counters())
	}
	return m
}

// Stop implements rdma.Transport.
func (t *Transport) Stop() {
	if t.endpoint != nil {
		t.endpoint.Close()
	}
}
