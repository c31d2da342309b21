package traffic

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// wire reads how many bytes each network device has sent. The kernel counts them, whatever source port or slot they
// had, so that packets on the wrong plane show.
type wire struct{ file *os.File }

// openWire opens the counters of the network namespace of the calling thread.
func openWire() (*wire, error) {
	f, err := os.Open("/proc/thread-self/net/dev") // a file opened here keeps its namespace for all threads
	return &wire{f}, err
}

func (w *wire) close() { w.file.Close() }

// read returns the sent bytes by device since its creation.
func (w *wire) read() map[string]uint64 {
	text := make([]byte, 64<<10)
	n, _ := w.file.ReadAt(text, 0) // the error is EOF
	return sentBytes(text[:n])
}

// sentBytes parses /proc/net/dev: eight counters of receiving follow the name, then those of sending, bytes first.
func sentBytes(text []byte) map[string]uint64 {
	const sent = 8
	out := map[string]uint64{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		name, counters, ok := strings.Cut(lines.Text(), ":")
		fields := strings.Fields(counters)
		if !ok || len(fields) <= sent {
			continue
		}
		if n, err := strconv.ParseUint(fields[sent], 10, 64); err == nil {
			out[strings.TrimSpace(name)] = n
		}
	}
	return out
}

// findDevices adds the devices that the slots of the run's ends name, except in planes of shared memory.
func (r *run) findDevices() {
	for _, e := range r.ends {
		if e.set == nil {
			continue
		}
		for _, s := range e.set.Slots() {
			if s.Device != "" && cmp.Or(r.node.cfg.Planes[s.Plane], r.node.cfg.Transport) != "nupa" {
				r.wired[s.Device] = s.Plane
			}
		}
	}
}

// wireBytes returns the bytes that the planes' devices have sent since the start.
func (r *run) wireBytes() (out []*farev1.TrafficWire) {
	r.findDevices()
	now, planes := r.node.wire.read(), map[string]uint64{}
	for device, plane := range r.wired {
		planes[plane] += grown(now[device], r.wireBefore[device])
	}
	for _, name := range slices.Sorted(maps.Keys(planes)) {
		out = append(out, &farev1.TrafficWire{Plane: name, Bytes: planes[name]})
	}
	return out
}

const (
	// judgedBytes is the minimum number of payload bytes of a node whose planes are judged by the wire.
	judgedBytes = 8 << 20
	// judgedTraffic is the maximum ratio of bytes on the wire to payload bytes for that: more are short messages,
	// acknowledgements or other programs' traffic.
	judgedTraffic = 2
	// wrongPlane is the maximum difference, in parts per billion of a node's bytes, between the wire and the slots of a
	// plane.
	wrongPlane = 30_000_000
)

// wrongPlanes returns an error if a node's bytes left by other planes than those of its slots.
func wrongPlanes(n *farev1.TrafficNodeReport) []string {
	var wireSum, slotSum, again uint64
	for _, p := range n.GetPlanes() {
		if p.Wire != nil {
			wireSum, slotSum, again = wireSum+p.GetWire(), slotSum+p.GetSent()+p.GetAgain(), again+p.GetAgain()
		}
	}
	if slotSum < judgedBytes || wireSum > judgedTraffic*slotSum {
		return nil
	}
	var worst *farev1.TrafficPlaneReport
	// Packets toward a device without a carrier are in the slots' bytes and not on the wire, and are sent again.
	largest := int64(wrongPlane + ppb(again, slotSum))
	off := func(p *farev1.TrafficPlaneReport) int64 {
		return int64(ppb(p.GetWire(), wireSum)) - int64(ppb(p.GetSent()+p.GetAgain(), slotSum))
	}
	diverted := int64(0) // from planes that have failed to the others, until the slots followed
	for _, p := range n.GetPlanes() {
		if p.Wire != nil && p.GetFell() {
			diverted += max(0, -off(p))
		}
	}
	for _, p := range n.GetPlanes() {
		if p.Wire == nil {
			continue
		}
		most := off(p) - diverted
		if !p.GetFell() {
			most = max(most, -off(p))
		}
		if most > largest {
			worst, largest = p, most
		}
	}
	if worst == nil {
		return nil
	}
	return []string{fmt.Sprintf("node %s: %.1f %% of the bytes on the wire left by plane %s, whose slots sent %.1f %%: is the transport's destination port steered (dataplane.udp_ports, dataplane.tcp_ports)?",
		n.GetLoopback(), float64(ppb(worst.GetWire(), wireSum))/1e7, worst.GetPlane(), float64(ppb(worst.GetSent()+worst.GetAgain(), slotSum))/1e7)}
}

// ppb returns n / of in parts per billion; 0 of 0.
func ppb(n, of uint64) uint64 {
	if of == 0 {
		return 0
	}
	return uint64(float64(n)/float64(of)*1e9 + 0.5)
}
