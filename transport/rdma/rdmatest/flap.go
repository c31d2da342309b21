package rdmatest

import (
	"cmp"
	"slices"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// firstPort is the first source port of slots. It lies above Linux's default ephemeral ports (32768-60999), which other
// programs may hold.
const firstPort = 61440

// port returns the source port of an end's slot on a plane. The plane of a port is the port modulo the number of planes
// (Bed.Planes).
func (e *end) port(plane int) uint16 {
	planes := e.m.bed.Planes()
	first := (firstPort + planes - 1) / planes * planes
	return uint16(first + e.index*planes + plane)
}

// home returns the plane of an end with a single slot.
func (e *end) home() int { return e.index % e.m.bed.Planes() }

// choose returns the paths of an end as a set would choose them from the beliefs of its host, and whether the end is
// parked: all its slots are parked, and it may post no new operations. A parked end has a lent path if any plane is up.
func (e *end) choose() (paths []rdma.Path, parked bool) {
	m := e.m
	beliefs := m.beliefs[e.side]
	path := func(plane int, share uint32) rdma.Path {
		return rdma.Path{Slot: plane, Plane: string(rune('A' + plane)), Port: e.port(plane), Share: share,
			Sent: e.sent[plane], Again: e.again[plane]}
	}
	lend := -1
	for p, up := range beliefs {
		if up && lend < 0 {
			lend = p
		}
	}
	if m.hosts[0].transport.Limits().Spread && !e.ordered {
		for p, up := range beliefs {
			share := uint32(0)
			if up {
				share = m.shares[p]
			}
			paths = append(paths, path(p, share))
		}
		return paths, lend < 0
	}
	home := e.home()
	if beliefs[home] {
		return append(paths, path(home, m.shares[home])), false
	}
	if lend < 0 {
		return append(paths, path(home, 0)), true
	}
	paths = append(paths, path(lend, 0))
	paths[0].Lent = true
	return paths, true
}

// retarget applies the current paths to an end's channel.
func (e *end) retarget() {
	if e.closed {
		return
	}
	var paths []rdma.Path
	paths, e.parked = e.choose()
	e.ch.SetPaths(paths)
	e.pump()
}

// flapLater schedules changes to planes until no work is left.
func (m *model) flapLater() {
	m.after(time.Duration(m.rng.ExpFloat64()*float64(m.o.Flap)), func() {
		if !m.work() {
			return
		}
		m.flap()
		m.flapLater()
	})
}

// flap takes a plane down for a while, mostly a short one, or changes shares.
func (m *model) flap() {
	plane := m.rng.IntN(m.bed.Planes())
	if m.rng.IntN(3) == 0 {
		m.flaps++
		m.shares[plane] = 1 + uint32(m.rng.IntN(4))
		m.updateHosts(plane)
		return
	}
	if m.down[plane] {
		return
	}
	m.down[plane] = true
	last := !slices.Contains(m.down, false)
	if last && m.o.Outage > 0 {
		m.down[plane] = false // no operation could complete before another plane returns
		return
	}
	m.flaps++
	m.bed.SetPlane(plane, false)
	m.updateHosts(plane)
	outage := time.Duration(m.rng.Int64N(int64(cmp.Or(m.o.Outage, 4*m.o.Flap))))
	if m.o.Outage == 0 && m.rng.IntN(20) == 0 {
		outage += time.Duration(m.rng.Int64N(int64(5 * time.Second)))
	}
	if last {
		outage = min(outage, m.o.Flap)
	}
	m.after(outage, func() {
		m.down[plane] = false
		m.bed.SetPlane(plane, true)
		m.updateHosts(plane)
	})
}

// updateHosts updates each host's belief about a plane after a random delay, with the state at that time.
func (m *model) updateHosts(plane int) {
	for side := range m.hosts {
		m.after(time.Duration(m.rng.Int64N(int64(m.o.Notice))), func() {
			m.beliefs[side][plane] = m.o.Blind || !m.down[plane]
			m.planeLearned(side)
		})
	}
}
