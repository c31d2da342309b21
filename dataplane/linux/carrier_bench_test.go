package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
)

// observer is a socket that receives the kernel's notifications of links and nexthop objects, in the kernel's order.
type observer struct {
	fd int
	rx []byte
}

func observe(b *testing.B, h *host) *observer {
	o := &observer{rx: make([]byte, 1<<16)}
	h.Must(func() (err error) {
		if o.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptTimeval(o.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
			unix.Bind(o.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_NEXTHOP-1)}),
		)
	})
	b.Cleanup(func() { _ = unix.Close(o.fd) })
	return o
}

// await returns the time of the first message of a type that match accepts.
func (o *observer) await(b *testing.B, kind uint16, match func(body []byte) bool) time.Time {
	b.Helper()
	for {
		n, _, err := unix.Recvfrom(o.fd, o.rx, 0)
		at := time.Now()
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			b.Fatal(err)
		}
		for m := o.rx[:n]; len(m) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(m))
			if binary.NativeEndian.Uint16(m[4:]) == kind && match(m[unix.NLMSG_HDRLEN:size]) {
				return at
			}
			m = m[min((size+3)&^3, len(m)):]
		}
	}
}

// BenchmarkCarrierLost measures the time from the kernel's event of a lost carrier until the kernel has the corrected
// buckets of the group, as announced by the kernel, and the time from the request to cut the cable until then.
func BenchmarkCarrierLost(b *testing.B) {
	for _, destinations := range []int{1, 10000} {
		b.Run(fmt.Sprintf("destinations=%d", destinations), func(b *testing.B) {
			n := newBench(b, 1, benchPlanes)
			n.commit(append(n.setGroups(nil, 0, ""), n.destinations(destinations, true)...))
			o := observe(b, n.h)
			var leaf *netlink.Handle
			n.h.leaf.Must(func() (err error) { leaf, err = netlink.NewHandle(unix.NETLINK_ROUTE); return err })
			b.Cleanup(leaf.Close)
			far, err := leaf.LinkByName("p3")
			if err != nil {
				b.Fatal(err)
			}
			index := uint32(n.p.device("p3").Index)
			carrier := func(up bool) func([]byte) bool {
				return func(body []byte) bool {
					return binary.NativeEndian.Uint32(body[4:]) == index && (binary.NativeEndian.Uint32(body[8:])&unix.IFF_LOWER_UP != 0) == up
				}
			}
			group := func([]byte) bool { return true }
			if g := n.p.state.have.groups[groupKey{1, v4}]; g != nil {
				id := binary.NativeEndian.AppendUint32(nil, g.id)
				group = func(body []byte) bool { return slices.Equal(body[12:16], id) } // NHA_ID is the first attribute
			}
			var event, cut []time.Duration
			for b.Loop() {
				begin := time.Now()
				if err := leaf.LinkSetDown(far); err != nil {
					b.Fatal(err)
				}
				lost := o.await(b, unix.RTM_NEWLINK, carrier(false))
				done := o.await(b, unix.RTM_NEWNEXTHOP, group)
				event, cut = append(event, done.Sub(lost)), append(cut, done.Sub(begin))
				b.StopTimer()
				// The control plane's equal weights cost nothing.
				before := sent(n.p.Stats())
				g := n.vector(1, 0)
				g.Members = slices.Delete(g.Members, 3, 4)
				n.commit([]contract.Change{{Kind: contract.GroupChange, Group: 1, Before: n.groups[1], After: g}})
				if after := sent(n.p.Stats()); after != before {
					b.Errorf("%d messages for equal weights", after-before)
				}
				n.commit([]contract.Change{{Kind: contract.GroupChange, Group: 1, Before: g, After: n.groups[1]}})
				if err := leaf.LinkSetUp(far); err != nil {
					b.Fatal(err)
				}
				o.await(b, unix.RTM_NEWLINK, carrier(true))
				o.await(b, unix.RTM_NEWNEXTHOP, group)
				time.Sleep(100 * time.Millisecond) // until witnesses have left the group
				b.StartTimer()
			}
			for name, took := range map[string][]time.Duration{"event": event, "cut": cut} {
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), name+"-p50-us")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), name+"-p99-us")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
