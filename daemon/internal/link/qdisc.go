package link

import (
	"encoding/binary"
	"math"
	"math/bits"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/fare"

	"github.com/fared/fared/internal/rtnl"
)

// Layouts of <linux/pkt_sched.h> that package unix does not define.
const (
	sizeofTcmsg     = 20
	sizeofRateSpec  = 12 // the rate is its last four bytes, in bytes per second
	tcaKind         = 1  // TCA_KIND
	tcaOptions      = 2  // TCA_OPTIONS
	tcaTBFParms     = 1  // TCA_TBF_PARMS: struct tc_tbf_qopt, begins with the rate
	tcaTBFRate64    = 4  // TCA_TBF_RATE64, if the rate does not fit 32 bits
	tcaHTBParms     = 1  // TCA_HTB_PARMS: struct tc_htb_opt, begins with the rate
	tcaHTBRate64    = 6  // TCA_HTB_RATE64
	tcRoot          = 0xffffffff
	rate32Saturated = math.MaxUint32
)

// trafficMessage is the content of a qdisc or class message.
type trafficMessage struct {
	index int
	root  bool // attached to the device itself
	kind  string
	rate  fare.Bandwidth // of a tbf qdisc or an htb class, zero if it has none
}

// parseTraffic parses RTM_*QDISC (class false) and RTM_*TCLASS (class true).
func parseTraffic(body []byte, class bool) (trafficMessage, bool) {
	if len(body) < sizeofTcmsg {
		return trafficMessage{}, false
	}
	t := trafficMessage{
		index: int(int32(binary.NativeEndian.Uint32(body[4:]))),
		root:  binary.NativeEndian.Uint32(body[12:]) == tcRoot,
	}
	var options []byte
	for kind, v := range rtnl.Attributes(body[sizeofTcmsg:]) {
		switch kind {
		case tcaKind:
			t.kind = rtnl.Text(v)
		case tcaOptions:
			options = v
		}
	}
	switch {
	case t.kind == "tbf" && !class:
		t.rate = rate(options, tcaTBFParms, tcaTBFRate64)
	case t.kind == "htb" && class:
		t.rate = rate(options, tcaHTBParms, tcaHTBRate64)
	}
	return t, t.index > 0
}

// rate decodes a rate of 32 bits, or of 64 if it does not fit.
func rate(options []byte, parms, rate64 uint16) fare.Bandwidth {
	var bytes uint64
	for kind, v := range rtnl.Attributes(options) {
		switch {
		case kind == parms && len(v) >= sizeofRateSpec && bytes < rate32Saturated:
			bytes = uint64(binary.NativeEndian.Uint32(v[sizeofRateSpec-4:]))
		case kind == rate64 && len(v) == 8:
			bytes = binary.NativeEndian.Uint64(v)
		}
	}
	hi, lo := bits.Mul64(bytes, 8)
	if hi != 0 || lo > uint64(fare.MaxBandwidth) {
		return fare.MaxBandwidth
	}
	return fare.Bandwidth(lo)
}

// shapers are the root qdiscs of all devices. The kernel answers each request with those of all devices, so they are
// requested once for the ports that are read together.
type shapers struct {
	asks  *requests
	read  bool
	roots map[int]trafficMessage
	err   error
}

func (n *namespace) newShapers() *shapers { return &shapers{asks: n.s.asks} }

// rate returns the rate of the device's root qdisc: a tbf's own, or the sum over the root classes of an htb (a root
// class has no parent to borrow from, so its rate limits it, not its ceil). It returns zero if there is neither.
func (s *shapers) rate(index int) (fare.Bandwidth, error) {
	if !s.read {
		s.read, s.roots = true, map[int]trafficMessage{}
		s.err = s.asks.dump(unix.RTM_GETQDISC, tcmsg(0), func(m rtnl.Message) {
			if t, ok := parseTraffic(m.Body, false); ok && t.root {
				s.roots[t.index] = t
			}
		})
	}
	root := s.roots[index]
	if s.err != nil || root.kind != "htb" {
		return root.rate, s.err
	}
	var sum fare.Bandwidth
	err := s.asks.dump(unix.RTM_GETTCLASS, tcmsg(index), func(m rtnl.Message) {
		if t, ok := parseTraffic(m.Body, true); ok && t.root && t.index == index {
			sum = sum.Add(t.rate)
		}
	})
	return sum, err
}

func tcmsg(index int) []byte {
	b := make([]byte, sizeofTcmsg)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	return b
}
