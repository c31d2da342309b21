package rdmadev

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Sample has the counters of a report's rows at one moment.
type Sample struct {
	sent     []uint64 // bytes, by row
	known    []bool   // by row
	port     []bool   // by row: sent is the counter of the RDMA port, otherwise of the netdev
	hardware map[*Port]map[string]uint64
}

// Sample reads the counters below the root of sysfs from which the report was made.
func (r *Report) Sample(root string) Sample {
	s := Sample{hardware: map[*Port]map[string]uint64{}}
	for i := range r.Rows {
		row := &r.Rows[i]
		var n uint64
		var ok bool
		port := r.alone(i)
		if port {
			n, ok = row.Port.Sent(root)
		}
		if !ok {
			port = false
			n, ok = NetdevSent(root, row.Device)
		}
		s.port = append(s.port, port)
		s.sent, s.known = append(s.sent, n), append(s.known, ok)
		if row.Port != nil && s.hardware[row.Port] == nil {
			s.hardware[row.Port] = row.Port.HardwareCounters(root)
		}
	}
	return s
}

// alone reports whether a row is the only one with its RDMA port, whose counters are then those of the row.
func (r *Report) alone(row int) bool {
	port := r.Rows[row].Port
	return port != nil && !slices.ContainsFunc(r.Rows, func(other Row) bool { return other.Port == port && other.Device != r.Rows[row].Device })
}

// PlanePackets are the RDMA packets that the ports of some planes have sent.
type PlanePackets struct {
	Planes  string // one name, or several with + where a port serves several
	Packets uint64
}

// SentPackets returns the packets of all ports with sub-ports, in the order of their first ones. It fails if such a
// port does not count packets.
func (r *Report) SentPackets(root string) (sent []PlanePackets, err error) {
	planes := map[*Port][]string{}
	var ports []*Port
	for i := range r.Rows {
		port, plane := r.Rows[i].Port, r.Rows[i].Plane
		if port == nil || plane == "" {
			continue
		}
		if planes[port] == nil {
			ports = append(ports, port)
		}
		if !slices.Contains(planes[port], plane) {
			planes[port] = append(planes[port], plane)
		}
	}
	for _, port := range ports {
		n, ok := port.SentPackets(root)
		if !ok {
			return nil, fmt.Errorf("%s/%d does not count packets", port.Device, port.Port)
		}
		names := strings.Join(planes[port], "+")
		at := slices.IndexFunc(sent, func(p PlanePackets) bool { return p.Planes == names })
		if at < 0 {
			at = len(sent)
			sent = append(sent, PlanePackets{Planes: names})
		}
		sent[at].Packets += n
	}
	return sent, nil
}

// PlaneTraffic is the traffic that a plane's sub-ports sent between two samples.
type PlaneTraffic struct {
	Plane string
	Bytes uint64
	// Known is false if a sub-port of the plane has no counter.
	Known bool
	// PortCounters means that the counters of RDMA ports were read, otherwise those of netdevs.
	PortCounters bool
}

// CounterChange is a counter of an RDMA port's driver that has changed between two samples.
type CounterChange struct {
	Device string `json:"rdma_device"`
	Port   int    `json:"rdma_port"`
	Name   string `json:"name"`
	Change uint64 `json:"change"` // modulo 2^64
}

// Traffic returns the changes between two samples, planes in the order of their first sub-ports.
func (r *Report) Traffic(from, to Sample) (planes []PlaneTraffic, counters []CounterChange) {
	for i := range r.Rows {
		row := &r.Rows[i]
		if row.Plane == "" {
			continue
		}
		at := slices.IndexFunc(planes, func(p PlaneTraffic) bool { return p.Plane == row.Plane })
		if at < 0 {
			at = len(planes)
			planes = append(planes, PlaneTraffic{Plane: row.Plane, Known: true, PortCounters: true})
		}
		p := &planes[at]
		p.Bytes += to.sent[i] - from.sent[i]
		p.Known = p.Known && from.known[i] && to.known[i] && from.port[i] == to.port[i]
		p.PortCounters = p.PortCounters && to.port[i]
	}
	for port, now := range to.hardware {
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if before, ok := from.hardware[port][name]; ok && before != now[name] {
				counters = append(counters, CounterChange{port.Device, port.Port, name, now[name] - before})
			}
		}
	}
	slices.SortFunc(counters, func(a, b CounterChange) int {
		return cmp.Or(compareNames(a.Device, b.Device), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Name, b.Name))
	})
	return planes, counters
}
