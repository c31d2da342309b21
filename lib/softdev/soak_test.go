package softdev

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// judge counts, at one end of the planes, the bytes that each of them delivers, and the packets of RoCEv2 that arrive
// by another device than that of their source port: by sockets that receive these alone.
type judge struct {
	t       testing.TB
	ns      *netnstest.Namespace
	sockets []int
	strays  int
}

func newJudge(t testing.TB, ns *netnstest.Namespace) *judge {
	t.Helper()
	j := &judge{t: t, ns: ns}
	for p, device := range append(planeDevices(), "eth0") {
		ports := [2]uint32{firstPort + uint32(p)*slotsOfAPlane, firstPort + uint32(p+1)*slotsOfAPlane - 1}
		if device == "eth0" {
			ports = [2]uint32{1 << 16, 1 << 16} // none belongs here
		}
		ns.Must(func() error { return j.listen(device, ports) })
	}
	return j
}

// listen counts the packets that a device receives for UDP port 4791, unless their source port is in a range.
func (j *judge) listen(device string, ports [2]uint32) error {
	const dropped, accepted = 9, 8
	to := func(n int, at int) uint8 { return uint8(n - at - 1) }
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 12}, // type of the Ethernet frame
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.ETH_P_IP, Jf: to(dropped, 1)},
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 36}, // destination port
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: 4791, Jf: to(dropped, 3)},
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 34}, // source port
		{Code: unix.BPF_JMP | unix.BPF_JGE, K: ports[0], Jf: to(accepted, 5)},
		{Code: unix.BPF_JMP | unix.BPF_JGT, K: ports[1], Jt: to(accepted, 6)},
		{Code: unix.BPF_RET, K: 0},
		{Code: unix.BPF_RET, K: 64},
		{Code: unix.BPF_RET, K: 0},
	}
	ifi, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	j.t.Cleanup(func() { unix.Close(fd) })
	j.sockets = append(j.sockets, fd)
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
		return err
	}
	// A program of the other end sends nothing yet, so the socket misses nothing.
	return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8, Ifindex: ifi.Index})
}

func planeDevices() (names []string) {
	for p := range planes {
		names = append(names, fmt.Sprint("plane", p))
	}
	return names
}

// bytes returns the bytes that each plane has delivered.
func (j *judge) bytes() (sums [planes]float64) {
	j.t.Helper()
	out, err := j.ns.Output("ip", "-j", "-s", "link")
	var links []struct {
		Name    string `json:"ifname"`
		Stats64 struct {
			Rx struct{ Bytes float64 }
		}
	}
	if err == nil {
		err = json.Unmarshal(out, &links)
	}
	found := 0
	for _, l := range links {
		var p int
		if _, err := fmt.Sscanf(l.Name, "plane%d", &p); err == nil {
			sums[p] = l.Stats64.Rx.Bytes
			found++
		}
	}
	if err != nil || found != planes {
		j.t.Fatal(err, string(out))
	}
	return sums
}

// count returns the number of packets so far that came by another device.
func (j *judge) count() int {
	j.t.Helper()
	for _, fd := range j.sockets {
		stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			j.t.Fatal(err)
		}
		j.strays += int(stats.Packets) // since the last call, with those that had no room
	}
	return j.strays
}

// phase is a time with constant weights, in which every plane with weight is up.
type phase struct {
	*judge
	from, got, want [planes]float64
}

func (x *phase) begin() { x.from = x.bytes() }

// end adds what the planes have delivered since begin, and what they should have by weight.
func (x *phase) end(weights []int) {
	now, total, sum := x.bytes(), 0.0, 0
	for p, w := range weights {
		x.got[p] += now[p] - x.from[p]
		total += now[p] - x.from[p]
		sum += w
	}
	for p, w := range weights {
		x.want[p] += total * float64(w) / float64(sum)
	}
}

// TestLeavesDie sends messages by planes of which one fails each second, as when its leaf dies, and returns once the
// others have delivered some more. No request ends in error, every byte is right, and at both ends every packet arrives
// by the plane of its source port, and each plane delivers its share within 1 %, in the time in which its weight is its
// state. FARED_SOFTDEV_BYTES is the size of the transfer.
func TestLeavesDie(t *testing.T) {
	gate.Slow(t, gate.C, "400 MB while leaves fail each second")
	const qps, size = 48, 16384 // queue pairs for equal numbers on three planes and on four
	volume := 400e6
	if v := os.Getenv("FARED_SOFTDEV_BYTES"); v != "" {
		var err error
		if volume, err = strconv.ParseFloat(v, 64); err != nil {
			t.Fatal(err)
		}
	}
	messages := int(math.Ceil(volume / qps / size))
	f := newFabric(t)
	program := compile(t, "traffic", "plain")
	all := []int{1, 1, 1, 1}
	f.setWeights(t, all...)
	var ends [2]*phase
	for i, ns := range f.namespaces() {
		ends[i] = &phase{judge: newJudge(t, ns)}
	}
	begin := func() {
		for _, x := range ends {
			x.begin()
		}
	}
	end := func(weights ...int) {
		for _, x := range ends {
			x.end(weights)
		}
	}
	var running [2]*netnstest.Process
	for i, ns := range f.namespaces() {
		command := []string{"LD_PRELOAD=" + f.library, "FARED_SOFT_COUNTERS=1", "FARED_SLOTS=" + f.tables[i].Path, program, "fared_soft0", "7777"}
		if i == 1 {
			command = append(command, serverAddress, fmt.Sprint(qps), fmt.Sprint(messages), fmt.Sprint(size), "4")
		}
		running[i] = ns.Start(t, "env", command...)
	}
	f.flows(t, running[1])
	start, failures := time.Now(), 0
	begin()
	for p := 1; running[1].Running() == nil; p = p%3 + 1 {
		time.Sleep(time.Until(start.Add(time.Duration(failures) * time.Second)))
		weights := []int{1, 1, 1, 1}
		weights[p] = 0
		end(all...)
		f.server.IP("link", "set", fmt.Sprint("plane", p), "down")
		time.Sleep(50 * time.Millisecond) // the plane drops everything until fared would have noticed
		f.setWeights(t, weights...)
		f.flows(t, running[1])
		begin()
		f.flows(t, running[1])
		end(weights...)
		f.server.IP("link", "set", fmt.Sprint("plane", p), "up")
		for i := range 2 {
			f.route(i, p)
		}
		f.setWeights(t, all...)
		f.flows(t, running[1])
		begin()
		failures++
	}
	seconds := time.Since(start).Seconds()
	finish(t, running, qps*messages)
	if failures < 2 {
		t.Errorf("%d failures during the transfer", failures)
	}
	t.Logf("%.2f GB verified in %.1f s, %d failures\n%s%s", float64(qps*messages*size)/1e9, seconds, failures, running[0].Log(), running[1].Log())
	for i, x := range ends {
		total := 0.0
		for p := range planes {
			total += x.got[p]
		}
		name := []string{"server", "client"}[i]
		for p := range planes {
			difference := 100 * (x.got[p] - x.want[p]) / total
			t.Logf("%s: plane %d has delivered %.2f %%, %+.2f of its share", name, p, 100*x.got[p]/total, difference)
			if math.Abs(difference) > 1 {
				t.Errorf("%s: plane %d differs from its share by %.2f %%", name, p, difference)
			}
		}
		if strays := x.count(); strays > 0 {
			t.Errorf("%s: %d packets have arrived by other planes than those of their source ports", name, strays)
		}
	}
	// The judge sees a packet that comes by another device.
	f.client.Must(func() error {
		conn, err := net.Dial("udp4", serverAddress+":4791")
		if err == nil {
			defer conn.Close()
			_, err = conn.Write([]byte("stray"))
		}
		return err
	})
	netnstest.Eventually(t, time.Minute, func() error {
		if strays := ends[0].count(); strays != 1 {
			return fmt.Errorf("%d packets are counted after one was sent", strays)
		}
		return nil
	})
}
