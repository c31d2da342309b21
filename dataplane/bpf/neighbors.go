package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

// Intervals of next hop resolution: for unresolved next hops, and for all, so that entries that only the program uses
// stay known.
const (
	askUnresolved = time.Second
	askAll        = 20 * time.Second
)

// neighbors mirrors the MAC addresses of next hops and devices for SUNH frames, because no network stack writes their
// Ethernet header. nil, without SUNH, has none. Except for follow, Steering's mutex guards it.
type neighbors struct {
	handle  *netlink.Handle
	space   vishnetns.NsHandle
	log     *slog.Logger
	hops    map[hop][6]byte
	own     map[int][6]byte // by device; read by learn
	asked   time.Time       // last request of all next hops
	updates chan netlink.NeighUpdate
	quit    chan struct{} // ends the subscription
}

// hop is a next hop behind a device.
type hop struct {
	device int
	addr   netip.Addr
}

// openNeighbors subscribes to the neighbor table of a namespace. The caller must call follow and then close.
func openNeighbors(handle *netlink.Handle, space netns.Namespace, log *slog.Logger) (*neighbors, error) {
	n := &neighbors{
		handle: handle, space: vishnetns.NsHandle(space.FD()), log: log, hops: map[hop][6]byte{}, own: map[int][6]byte{}, quit: make(chan struct{}),
	}
	if err := n.subscribe(); err != nil {
		return nil, err
	}
	return n, nil
}

func (n *neighbors) subscribe() error {
	n.updates = make(chan netlink.NeighUpdate, 64)
	err := netlink.NeighSubscribeWithOptions(n.updates, n.quit, netlink.NeighSubscribeOptions{Namespace: &n.space, ListExisting: true})
	if err != nil {
		return fmt.Errorf("bpf: watch the neighbor table: %w", err)
	}
	return nil
}

// close ends the subscription, and with it follow.
func (n *neighbors) close() {
	if n != nil {
		close(n.quit)
	}
}

// follow calls update for each update of the neighbor table, and tick every askUnresolved, until close. It subscribes
// again after messages were lost; if that fails, no further updates arrive, and the known next hops stay in use.
func (n *neighbors) follow(update func(netlink.NeighUpdate), tick func()) {
	ticker := time.NewTicker(askUnresolved)
	defer ticker.Stop()
	for {
		select {
		case u, ok := <-n.updates:
			if ok {
				update(u)
				continue
			}
			select {
			case <-n.quit:
				return
			default:
			}
			if err := n.subscribe(); err != nil {
				n.log.Error("steering: the watch of next hops has ended", "err", err)
				n.updates = nil
			}
		case <-ticker.C:
			tick()
		case <-n.quit:
			if n.updates != nil {
				for range n.updates { // drain until the subscription has ended
				}
			}
			return
		}
	}
}

// take records an update, and reports whether it changes an address. An entry that the kernel removes because it is
// unused stays valid; one that has failed does not.
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

// learn reads the MAC address of a device unless it is known.
func (n *neighbors) learn(device int) {
	if _, known := n.own[device]; known {
		return
	}
	if l, err := n.handle.LinkByIndex(device); err == nil && len(l.Attrs().HardwareAddr) == 6 {
		n.own[device] = [6]byte(l.Attrs().HardwareAddr)
	}
}

// forget removes the MAC address of a device, which may have changed.
func (n *neighbors) forget(device int) {
	if n != nil {
		delete(n.own, device)
	}
}

// macs returns the first 12 bytes of a frame to the first known next hop behind a device.
func (n *neighbors) macs(device int, hops ...netip.Addr) (macs [12]byte, ok bool) {
	if n == nil {
		return macs, false
	}
	own, known := n.own[device]
	if !known {
		return macs, false
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

// due reports whether a request of all next hops is due at a time, and records it.
func (n *neighbors) due(now time.Time) bool {
	all := now.Sub(n.asked) > askAll
	if all {
		n.asked = now
	}
	return all
}

// resolve makes the kernel resolve next hops, as if a packet were sent to each.
func (n *neighbors) resolve(hops map[hop]bool) {
	for h := range hops {
		err := n.handle.NeighSet(&netlink.Neigh{LinkIndex: h.device, IP: h.addr.AsSlice(), Flags: netlink.NTF_USE})
		if err != nil && !errors.Is(err, unix.ENETDOWN) {
			n.log.Debug("steering: cannot trigger the resolution of a next hop", "addr", h.addr, "err", err)
		}
	}
}
