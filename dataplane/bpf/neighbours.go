package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Intervals of next hop resolution: for unresolved next hops, and for all, so that entries that only the program uses stay
// known.
const (
	askUnresolved = time.Second
	askAll        = 20 * time.Second
)

// neighbors holds the MAC addresses of next hops and sub-ports for SUNH frames, because no network stack writes their
// Ethernet header. It does nothing without SUNH.
type neighbors struct {
	s     *Steering
	hops  map[hop][6]byte
	own   map[int][6]byte // by device, read on demand
	quit  chan struct{}
	asked time.Time
}

type hop struct {
	device int
	addr   netip.Addr
}

// open starts to follow the neighbor table. The thread is in the network namespace.
func (n *neighbors) open(s *Steering) error {
	if !s.cfg.SUNH.IsValid() {
		return nil
	}
	n.s, n.hops, n.own = s, map[hop][6]byte{}, map[int][6]byte{}
	quit := make(chan struct{})
	updates, err := n.subscribe(quit)
	if err != nil {
		return err
	}
	n.quit = quit
	s.done.Add(1)
	go n.follow(updates)
	return nil
}

func (n *neighbors) subscribe(quit chan struct{}) (chan netlink.NeighUpdate, error) {
	updates := make(chan netlink.NeighUpdate, 64)
	namespace := netns.NsHandle(n.s.netns.FD())
	err := netlink.NeighSubscribeWithOptions(updates, quit, netlink.NeighSubscribeOptions{Namespace: &namespace, ListExisting: true})
	if err != nil {
		return nil, fmt.Errorf("bpf: watch the neighbor table: %w", err)
	}
	return updates, nil
}

func (n *neighbors) close() {
	if n.quit != nil {
		close(n.quit)
	}
}

func (n *neighbors) follow(updates chan netlink.NeighUpdate) {
	defer n.s.done.Done()
	tick := time.NewTicker(askUnresolved)
	defer tick.Stop()
	for {
		select {
		case u, ok := <-updates:
			if !ok {
				updates = n.again()
				continue
			}
			n.s.mu.Lock()
			if !n.s.closed && n.take(u) {
				if err := n.s.refresh(); err != nil {
					n.s.cfg.Log.Error("steering: cannot update a neighbor", "err", err)
				}
			}
			n.s.mu.Unlock()
		case <-tick.C:
			n.s.mu.Lock()
			if !n.s.closed {
				n.ask()
			}
			n.s.mu.Unlock()
		case <-n.s.quit:
			for range updates { // drain until the subscription has ended
			}
			return
		}
	}
}

// again subscribes again after messages were lost. If that fails, no further updates arrive, and the known next hops stay
// in use.
func (n *neighbors) again() chan netlink.NeighUpdate {
	select {
	case <-n.s.quit:
		return closedUpdates()
	default:
	}
	updates, err := n.subscribe(n.quit)
	if err != nil {
		n.s.cfg.Log.Error("steering: the watch of next hops has ended", "err", err)
		return nil
	}
	return updates
}

func closedUpdates() chan netlink.NeighUpdate {
	c := make(chan netlink.NeighUpdate)
	close(c)
	return c
}

// take records an update, and reports whether it changes an address. An entry that the kernel removes because it is unused
// stays valid; one that has failed does not.
func (n *neighbors) take(u netlink.NeighUpdate) bool {
	addr, ok := netip.AddrFromSlice(u.IP)
	if !ok || u.Type != unix.RTM_NEWNEIGH {
		return false
	}
	key := hop{u.LinkIndex, addr.Unmap()}
	old, known := n.hops[key]
	switch {
	case u.State&unix.NUD_FAILED != 0:
		delete(n.hops, key)
		return known
	case len(u.HardwareAddr) != 6:
		return false
	}
	mac := [6]byte(u.HardwareAddr)
	n.hops[key] = mac
	return !known || old != mac
}

func (n *neighbors) linkChanged(index int) { delete(n.own, index) }

// macs returns the first 12 bytes of a frame to the next hop of a place.
func (n *neighbors) macs(device int, hops ...netip.Addr) (macs [12]byte, ok bool) {
	if n.s == nil || device == 0 {
		return macs, false
	}
	own, known := n.own[device]
	if !known {
		l, err := n.s.handle.LinkByIndex(device)
		if err != nil || len(l.Attrs().HardwareAddr) != 6 {
			return macs, false
		}
		own = [6]byte(l.Attrs().HardwareAddr)
		n.own[device] = own
	}
	for _, addr := range hops {
		if mac, known := n.hops[hop{device, addr}]; known {
			copy(macs[:], mac[:])
			copy(macs[6:], own[:])
			return macs, true
		}
	}
	return macs, false
}

// ask makes the kernel resolve next hops: the unknown ones, and periodically all.
func (n *neighbors) ask() {
	all := time.Since(n.asked) > askAll
	if all {
		n.asked = time.Now()
	}
	asked := map[string]bool{}
	for _, l := range n.s.layout.sources {
		for device, i := range l.place {
			p := n.s.places.have[l.at(i)]
			if p.Ifindex == 0 || p.Flags&placeResolved != 0 && !all || asked[device] {
				continue
			}
			asked[device] = true
			n.use(int(p.Ifindex), n.s.hops[device].NextHopV4)
			n.use(int(p.Ifindex), n.s.hops[device].NextHopV6)
		}
	}
}

// use has the effect of sending a packet on a neighbor entry.
func (n *neighbors) use(device int, addr string) {
	ip := net.ParseIP(addr)
	if ip == nil {
		return
	}
	err := n.s.handle.NeighSet(&netlink.Neigh{LinkIndex: device, IP: ip, Flags: netlink.NTF_USE})
	if err != nil && !errors.Is(err, unix.ENETDOWN) {
		n.s.cfg.Log.Debug("steering: cannot trigger the resolution of a next hop", "addr", addr, "err", err)
	}
}
