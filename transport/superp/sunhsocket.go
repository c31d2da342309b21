package superp

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/alarm"
	"github.com/fared/fared/transport/internal/frames"
	"github.com/fared/fared/transport/rdma"
)

// sunhSocket carries a core's packets in SUNH frames. The caller holds the device's lock, except in Close.
type sunhSocket struct {
	core   *Core
	own    uint16 // SUNH address
	frames *frames.Endpoint
	alarm  *alarm.Alarm
	head   []byte
	// Counted here: ticks of the alarm, and received frames whose header is wrong.
	ticks, strange uint64
}

func openSUNH(core *Core, h rdma.Host) (*sunhSocket, error) {
	cfg := &core.cfg.SUNH
	if !cfg.Subnet.Contains(h.Address()) {
		return nil, fmt.Errorf("%v is not in the SUPERp subnet %v: SUNH addresses hosts by the host part of their loopbacks", h.Address(), cfg.Subnet)
	}
	s := &sunhSocket{core: core, own: hostPart(cfg.Subnet, h.Address())}
	var err error
	s.frames, err = frames.Open(frames.Config{EtherType: cfg.EtherType, Filter: sunhFilter(s.own), Receive: s.receive, Do: h.Do, Now: h.Now})
	if err != nil {
		return nil, err
	}
	s.alarm, err = alarm.Open(h.Now, h.Do, func() {
		s.ticks++
		core.Tick()
	})
	if err != nil {
		s.frames.Close()
		return nil, err
	}
	return s, nil
}

// sunhFilter accepts frames to this host with SUPERp for a SUNH address.
func sunhFilter(own uint16) []unix.SockFilter {
	const packetType = 0xfffff000 + 4 // SKF_AD_OFF + SKF_AD_PKTTYPE
	load := func(size uint16, at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | size | unix.BPF_ABS, K: at}
	}
	equal := func(n uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: n, Jt: yes, Jf: no}
	}
	return []unix.SockFilter{
		load(unix.BPF_W, packetType), equal(unix.PACKET_OTHERHOST, 5, 0),
		load(unix.BPF_B, 1), equal(NextHeader, 0, 3),
		load(unix.BPF_H, 6), equal(uint32(own), 0, 1),
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffff},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
}

// receive handles the payload of a frame.
func (s *sunhSocket) receive(b []byte) {
	cfg := &s.core.cfg
	h, rest, err := unframe(b, cfg.SUNH.Lite)
	if err != nil || h.Source&^hostMask(cfg.SUNH.Subnet) != 0 {
		s.strange++
		return
	}
	from := netip.AddrPortFrom(hostAddress(cfg.SUNH.Subnet, h.Source), firstPort+h.FlowLabel)
	s.core.receive(from, rest, len(b) <= minFrame)
}

// send implements carrier: through the path's device, or through Config.SUNH.Device.
func (s *sunhSocket) send(p *rdma.Path, to netip.Addr, class uint8, head, payload []byte) {
	cfg, device := &s.core.cfg, p.Device
	if cfg.SUNH.Device != "" {
		device = cfg.SUNH.Device
	}
	h := SUNH{TrafficClass: class, NextHeader: NextHeader, HopLimit: cfg.SUNH.HopLimit, FlowLabel: p.Port & 0xfff, Source: s.own,
		Destination: hostPart(cfg.SUNH.Subnet, to)}
	b := append(h.Append(s.head[:0]), head...)
	if missing := minFrame - len(b) - len(payload); missing > 0 {
		b = append(append(b, payload...), make([]byte, missing)...)
		payload = nil
	}
	s.frames.Send(device, to, b, payload)
	s.head = b[:0]
}

// WakeAt implements carrier.
func (s *sunhSocket) WakeAt(at time.Duration) { s.alarm.WakeAt(at) }

// Flush does nothing: frames are sent at once.
func (s *sunhSocket) Flush() {}

// Counters returns the counters of the frames, with ticks, and received_strange: received frames with an impossible
// header.
func (s *sunhSocket) Counters() map[string]uint64 {
	m := s.frames.Counters()
	m["ticks"], m["received_strange"] = s.ticks, s.strange
	return m
}

// Close closes the socket and waits for its readers.
func (s *sunhSocket) Close() {
	s.frames.Close()
	s.alarm.Close()
}
