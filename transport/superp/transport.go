package superp

import (
	"fmt"
	"maps"

	"github.com/fared/fared/transport/internal/udp"
	"github.com/fared/fared/transport/rdma"
)

// Transport is a Core on sockets: an rdma.Transport.
type Transport struct {
	*Core
	endpoint socket // nil before Start
}

// socket carries packets in UDP (udp.Endpoint), or in SUNH.
type socket interface {
	Flush()
	Counters() map[string]uint64
	Close()
}

var _ rdma.Steered = (*Transport)(nil)

// New makes a transport. It panics if Config.Resolve rejects the configuration. Start opens the sockets, in the network
// namespace of the calling thread.
func New(cfg Config) *Transport { return &Transport{Core: NewCore(cfg, nil)} }

// Start opens the sockets. It fails if the UDP port is taken at the host's address, or if the host lacks the address;
// with SUNH if the process lacks CAP_NET_RAW, or if the address is not in the SUPERp subnet.
func (t *Transport) Start(h rdma.Host) error {
	if err := t.Core.Start(h); err != nil {
		return err
	}
	if t.cfg.SUNH.enabled() {
		s, err := openSUNH(t.Core, h)
		if err != nil {
			return fmt.Errorf("superp: SUNH: %w", err)
		}
		h.Do(func() { t.out, t.endpoint = s, s })
		return nil
	}
	endpoint, err := udp.Open(udp.Config{Address: h.Address(), Port: t.cfg.Port, Core: t.Core, Do: h.Do, Now: h.Now,
		TrafficClass: t.cfg.TrafficClass, FlowLabels: true})
	if err != nil {
		return fmt.Errorf("superp: UDP port %d of %v: %w", t.cfg.Port, h.Address(), err)
	}
	// Packets that arrived before were for no existing connection, and needed no answer.
	h.Do(func() { t.out, t.endpoint = newDatagrams(endpoint, t.cfg.Port), endpoint })
	return nil
}

// Service implements rdma.Steered. SUNH frames have no ports.
func (t *Transport) Service() rdma.Service {
	if t.cfg.SUNH.enabled() {
		return rdma.Service{}
	}
	return rdma.Service{Protocol: rdma.ProtocolUDP, Port: t.cfg.Port}
}

// Flush sends the queued packets.
func (t *Transport) Flush() {
	if t.endpoint == nil {
		return
	}
	t.Core.Flush()
	t.endpoint.Flush()
}

// Counters returns the counters of the core and of the sockets.
func (t *Transport) Counters() map[string]uint64 {
	m := t.Core.Counters()
	if t.endpoint != nil {
		maps.Copy(m, t.endpoint.Counters())
	}
	return m
}

// Stop closes the sockets and waits for their readers.
func (t *Transport) Stop() {
	if t.endpoint != nil {
		t.endpoint.Close()
	}
}
