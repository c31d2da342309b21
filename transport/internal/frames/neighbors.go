package frames

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// refresh is the interval at which the next hops in use are looked up again, so that they follow routes and devices
	// and stay known to the kernel.
	refresh = 2 * time.Second
	// unused is the time after which a next hop without frames is forgotten.
	unused = time.Minute
	// patience is the time within which the kernel resolves an address that answers: it asks three times, a second
	// apart.
	patience = 3 * time.Second
	// poll is the interval between two looks at the neighbor table while an address is being resolved.
	poll = 2 * time.Millisecond
)

// place is a destination as seen through a device.
type place struct {
	device string
	to     netip.Addr
}

// hop is the next hop of a place. The device's lock guards it, except for its place.
type hop struct {
	place
	known  bool
	index  int // of the device
	mac    [6]byte
	used   time.Duration // time of the last frame
	asked  time.Duration // time of the last request
	asking bool
	// waiting are frames for a next hop that is not known yet.
	waiting [][]byte
}

// neighbors finds the Ethernet addresses of next hops.
type neighbors struct {
	do  func(func())
	now func() time.Duration
	// resolved is called with the device's lock held after each resolution, or its failure.
	resolved func(*hop)
	hops     map[place]*hop // guarded by the device's lock
	handle   *netlink.Handle
	asks     chan place
	quit     chan struct{}
	wait     sync.WaitGroup
}

func newNeighbors(do func(func()), now func() time.Duration, resolved func(*hop)) (*neighbors, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	n := &neighbors{do: do, now: now, resolved: resolved, hops: map[place]*hop{}, handle: handle, asks: make(chan place, 4096), quit: make(chan struct{})}
	n.wait.Go(n.run)
	return n, nil
}

func (n *neighbors) close() {
	select {
	case <-n.quit:
	default:
		close(n.quit)
	}
	n.wait.Wait()
	n.handle.Close()
}

// lookup returns the next hop toward an address through a device, and requests its resolution if that is due.
func (n *neighbors) lookup(device string, to netip.Addr) *hop {
	at := place{device, to}
	h := n.hops[at]
	if h == nil {
		h = &hop{place: at}
		n.hops[at] = h
	}
	h.used = n.now()
	if h.used-h.asked > refresh || !h.known {
		n.ask(h)
	}
	return h
}

// ask requests the resolution of a next hop.
func (n *neighbors) ask(h *hop) {
	if h.asking {
		return
	}
	select {
	case n.asks <- h.place:
		h.asking, h.asked = true, n.now()
	default: // the next frame asks again
	}
}

// question is a resolution in progress.
type question struct {
	place
	found  bool // index and next are valid
	index  int
	next   netip.Addr
	begun  time.Time
	answer [6]byte
}

// run resolves next hops until close. The kernel does not wait for an answer, so neither does this: a next hop that is
// silent delays no other.
func (n *neighbors) run() {
	var open []*question
	t := time.NewTicker(unused)
	defer t.Stop()
	wake := time.NewTimer(0)
	defer wake.Stop()
	for {
		select {
		case <-n.quit:
			return
		case at := <-n.asks:
			open = append(open, n.begin(at))
		case <-wake.C:
		case <-t.C:
			n.do(n.forget)
		}
		left := open[:0]
		for _, q := range open {
			resolved := q.found && n.read(q)
			if !resolved && q.found && time.Since(q.begun) < patience {
				left = append(left, q)
				continue
			}
			n.do(func() {
				if h := n.hops[q.place]; h != nil {
					h.asking, h.known, h.index, h.mac = false, resolved, q.index, q.answer
					n.resolved(h)
				}
			})
		}
		if open = left; len(open) > 0 {
			wake.Reset(poll)
		}
	}
}

// begin finds the device and the next hop of a place, and makes the kernel resolve it.
func (n *neighbors) begin(at place) *question {
	q := &question{place: at, next: at.to, begun: time.Now()}
	link, err := n.handle.LinkByName(at.device)
	if err != nil {
		return q
	}
	q.found, q.index = true, link.Attrs().Index
	// Without a route through the device, the destination itself is the next hop.
	if routes, err := n.handle.RouteGetWithOptions(net.IP(at.to.AsSlice()), &netlink.RouteGetOptions{OifIndex: q.index}); err == nil && len(routes) > 0 {
		gateway := routes[0].Gw
		if via, ok := routes[0].Via.(*netlink.Via); ok {
			gateway = via.Addr
		}
		if a, ok := netip.AddrFromSlice(gateway); ok && routes[0].LinkIndex == q.index {
			q.next = a.Unmap()
		}
	}
	// The same effect on the neighbor's entry as a packet. Errors show as an entry that stays unresolved.
	_ = n.handle.NeighSet(&netlink.Neigh{LinkIndex: q.index, IP: net.IP(q.next.AsSlice()), Flags: netlink.NTF_USE})
	return q
}

// read looks a question's answer up in the neighbor table.
func (n *neighbors) read(q *question) bool {
	family := uint8(unix.AF_INET)
	if q.next.Is6() {
		family = unix.AF_INET6
	}
	list, err := n.handle.NeighListExecute(netlink.Ndmsg{Family: family, Index: uint32(q.index)})
	if err != nil {
		return false
	}
	for _, x := range list {
		a, _ := netip.AddrFromSlice(x.IP)
		const usable = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT | unix.NUD_NOARP
		if a.Unmap() == q.next && x.State&usable != 0 && (len(x.HardwareAddr) == 6 || x.State&unix.NUD_NOARP != 0) {
			copy(q.answer[:], x.HardwareAddr)
			return true
		}
	}
	return false
}

// forget drops next hops that are not in use.
func (n *neighbors) forget() {
	for at, h := range n.hops {
		if n.now()-h.used > unused && !h.asking {
			delete(n.hops, at)
		}
	}
}
