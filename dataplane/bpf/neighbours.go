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

// How often next hops are asked for: unresolved ones, and, so that they stay known though nothing but us uses them, all.
const (
	askUnresolved = time.Second
	askAll        = 20 * time.Second
)

// neighbours are the MAC addresses of next hops and sub-ports, which frames of SUNH need: no stack writes them. Without SUNH
// it does nothing.
type neighbours struct {
	s     *Steering
	hops  map[hop][6]byte
	own   map[int][6]byte // of devices, read when needed
	quit  chan struct{}
	asked time.Time
}

type hop struct {
	device int
	addr   netip.Addr
}

// open begins to follow the neighbour table. The thread is in the network namespace.
func (n *neighbours) open(s *Steering) error {
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

func (n *neighbours) subscribe(quit chan struct{}) (chan netlink.NeighUpdate, error) {
	updates := make(chan netlink.NeighUpdate, 64)
	namespace := netns.NsHandle(n.s.netns.Fd())
	err := netlink.NeighSubscribeWithOptions(updates, quit, netlink.NeighSubscribeOptions{Namespace: &namespace, ListExisting: true})
	if err != nil {
		return nil, fmt.Errorf("bpf: follow the neighbour table: %w", err)
	}
	return updates, nil
}

func (n *neighbours) close() error {
	if n.quit != nil {
		close(n.quit)
	}
	return nil
}

func (n *neighbours) follow(updates chan netlink.NeighUpdate) {
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
					n.s.cfg.Log.Error("steering: could not follow a neighbour", "err", err)
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
			for range updates { // until the subscription has ended
			}
			return
		}
	}
}

// again subscribes anew when messages were lost. When that fails, the next tick of asking brings no news either, and the
// next hops known so far go on being used.
func (n *neighbours) again() chan netlink.NeighUpdate {
	select {
	case <-n.s.quit:
		return closedUpdates()
	default:
	}
	updates, err := n.subscribe(n.quit)
	if err != nil {
		n.s.cfg.Log.Error("steering: next hops are not followed any more", "err", err)
		return nil
	}
	return updates
}

func closedUpdates() chan netlink.NeighUpdate {
	c := make(chan netlink.NeighUpdate)
	close(c)
	return c
}

// take notes news, and says whether it is any. An entry that the kernel drops because nobody uses it stays true; one that
// has failed does not.
func (n *neighbours) take(u netlink.NeighUpdate) bool {
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

func (n *neighbours) linkChanged(index int) { delete(n.own, index) }

// macs are the first 12 bytes of a frame to the next hop of a place.
func (n *neighbours) macs(device int, hops ...netip.Addr) (macs [12]byte, ok bool) {
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

// ask makes the kernel resolve next hops: those that are not known, and from time to time all.
func (n *neighbours) ask() {
	all := time.Since(n.asked) > askAll
	if all {
		n.asked = time.Now()
	}
	for device, i := range n.s.layout.place {
		p := n.s.places.have[i]
		if p.Ifindex == 0 || p.Flags&placeResolved != 0 && !all {
			continue
		}
		for _, plane := range n.s.forwarding.GetPlanes() {
			for _, sp := range plane.SubPorts {
				if sp.Device == device {
					n.use(int(p.Ifindex), sp.NextHopV4)
					n.use(int(p.Ifindex), sp.NextHopV6)
				}
			}
		}
	}
}

// use is what sending a packet does to a neighbour.
func (n *neighbours) use(device int, addr string) {
	ip := net.ParseIP(addr)
	if ip == nil {
		return
	}
	err := n.s.handle.NeighSet(&netlink.Neigh{LinkIndex: device, IP: ip, Flags: netlink.NTF_USE})
	if err != nil && !errors.Is(err, unix.ENETDOWN) {
		n.s.cfg.Log.Debug("steering: could not ask for a next hop", "addr", addr, "err", err)
	}
}
