package rdmatest_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/wecmp"
)

const (
	incastSenders = 8
	incastSlots   = 4
	incastRate    = 25_000_000 // bytes per second: 200 Mbit/s
	incastQueue   = 128 << 10
	incastPiece   = 16 << 10
	incastAhead   = 32 // messages that a sender has posted
)

// incast is the result of runIncast.
type incast struct {
	goodput float64 // part of the link's rate that is payload of completed operations
	dropped float64 // part of the datagrams to the receiver
	marked  float64
}

// runIncast has senders write to one receiver for a second, whose link has a finite queue, or has the receiver read
// from all of them. The bytes on the link are those of the network, and not those that a transport counts.
func runIncast(t *testing.T, construct seeded, opcode rdma.Opcode, link rdmatest.Link) incast {
	t.Helper()
	at := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)}) }
	receiver := at(incastSenders)
	sent := 0
	net := rdmatest.NewNet(rdmatest.NetConfig{Seed: 1, Planes: []rdmatest.Plane{{Delay: 20 * time.Microsecond, Jitter: 10 * time.Microsecond, Inbound: link}},
		Trace: func(d rdmatest.Datagram) {
			if d.To.Addr() == receiver {
				sent++
			}
		}})
	var devices []*rdma.Device
	for i := range incastSenders + 1 {
		end := net.Transport(netip.AddrPortFrom(at(i), 0), construct(uint64(1+i)))
		d, err := rdma.Open(rdma.Config{Address: at(i), Transports: []rdma.Transport{end}, Clock: net.Now})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Close)
		devices = append(devices, d)
	}
	var queues []*rdma.CQ
	var posts []func()
	for i, d := range devices[:incastSenders] {
		pair := [2]*rdma.Device{d, devices[incastSenders]}
		if opcode == rdma.Read {
			pair[0], pair[1] = pair[1], pair[0]
		}
		var slots []rdma.Slot
		for j := range incastSlots {
			slots = append(slots, rdma.Slot{Slot: j, Plane: "p0", Port: uint16(61440 + incastSlots*i + j), Share: wecmp.Parts / incastSlots})
		}
		e := rdmatest.Connect(t, pair, rdma.SetConfig{Ordering: wecmp.Weak}, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead, [2]int{incastPiece, incastPiece}, [2][]rdma.Slot{slots, slots})
		set, memory := e.Sets[0], e.Memory
		queues = append(queues, e.CQs[0])
		posts = append(posts, func() {
			if _, err := set.PostSend(rdma.SendWR{Opcode: opcode, Local: rdma.SGE{MR: memory[0], Length: incastPiece},
				RemoteAddress: memory[1].Address(), RemoteKey: memory[1].Key()}); err != nil {
				t.Fatal(err)
			}
		})
	}
	for range incastAhead {
		for _, post := range posts {
			post()
		}
	}
	done, least := 0, 1<<30
	each := make([]int, incastSenders)
	batch := make([]rdma.Completion, 64)
	net.Run(func() bool {
		for i, cq := range queues {
			for _, c := range batch[:cq.Poll(batch)] {
				if c.Err != nil {
					t.Fatal(c.Err)
				}
				done++
				each[i]++
				posts[i]()
			}
		}
		return false
	}, net.Now()+time.Second)
	if err := net.Err(); err != nil {
		t.Fatal(err)
	}
	for _, n := range each {
		least = min(least, n)
	}
	stats := net.Stats()
	r := incast{goodput: float64(done*incastPiece) / incastRate, dropped: float64(stats.Dropped) / float64(sent), marked: float64(stats.Marked) / float64(sent)}
	t.Logf("%.3f of the link, %.2f %% of %d datagrams dropped, %.2f %% marked, messages of each sender %v", r.goodput, 100*r.dropped, sent, 100*r.marked, each)
	if fair := done / incastSenders; 3*least < fair {
		t.Errorf("a sender has completed %d messages, %d would be its part", least, fair)
	}
	return r
}

// testIncast runs incasts of WRITEs and of the answers to READs, over a link whose queue drops, and over one whose
// queue marks.
func testIncast(t *testing.T, construct seeded) {
	for _, opcode := range []rdma.Opcode{rdma.Write, rdma.Read} {
		for _, x := range []struct {
			name           string
			link           rdmatest.Link
			dropped, marks float64
		}{
			{"drops", rdmatest.Link{Rate: incastRate, Queue: incastQueue}, 0.05, 0},
			{"marks", rdmatest.Link{Rate: incastRate, Queue: incastQueue, Mark: incastQueue / 4}, 0.002, 0.001},
		} {
			t.Run(fmt.Sprint(opcode, ", ", x.name), func(t *testing.T) {
				r := runIncast(t, construct, opcode, x.link)
				if r.goodput < 0.85 || r.dropped > x.dropped || r.marked < x.marks {
					t.Errorf("want at least 0.85 of the link, at most %.1f %% dropped, and at least %.1f %% marked", 100*x.dropped, 100*x.marks)
				}
			})
		}
	}
}

func TestRoCEIncast(t *testing.T) {
	testIncast(t, newRoCE)
}

func TestSUPERpIncast(t *testing.T) {
	testIncast(t, newSUPERp)
}

// TestRoCEReadsFillALink compares the goodput of READs with that of WRITEs on an otherwise idle link: requests in parts
// must not cost any, whatever the delay and the number of outstanding requests.
func TestRoCEReadsFillALink(t *testing.T) {
	const rate, n = 200_000_000, 64 << 10 // bytes per second, and of an operation
	run := func(opcode rdma.Opcode, delay time.Duration, limit int) float64 {
		net := rdmatest.NewNet(rdmatest.NetConfig{Seed: 1, Planes: []rdmatest.Plane{{Delay: delay, Inbound: rdmatest.Link{Rate: rate}}}})
		var devices [2]*rdma.Device
		for i := range devices {
			at := netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)})
			core := func(out wire.Out) rdmatest.Core {
				rng := rand.New(rand.NewPCG(uint64(i), 1))
				return roce.NewCore(roce.Config{Random: rng.Uint32, MaxReadAtomic: limit}, out)
			}
			var err error
			if devices[i], err = rdma.Open(rdma.Config{Address: at, Transports: []rdma.Transport{net.Transport(netip.AddrPortFrom(at, 0), core)}, Clock: net.Now}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(devices[i].Close)
		}
		var slots []rdma.Slot
		for i := range incastSlots {
			slots = append(slots, rdma.Slot{Slot: i, Plane: "p0", Port: uint16(61440 + i), Share: wecmp.Parts / incastSlots})
		}
		e := rdmatest.Connect(t, devices, rdma.SetConfig{Ordering: wecmp.Weak}, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead, [2]int{n, n}, [2][]rdma.Slot{slots, slots})
		set, memory := e.Sets[0], e.Memory
		done, posted := 0, 0
		batch := make([]rdma.Completion, 64)
		transfer := func(d time.Duration) int {
			before := done
			net.Run(func() bool {
				for posted-done < incastAhead {
					posted++
					if _, err := set.PostSend(rdma.SendWR{Opcode: opcode, Local: rdma.SGE{MR: memory[0], Length: n}, RemoteAddress: memory[1].Address(), RemoteKey: memory[1].Key()}); err != nil {
						t.Fatal(err)
					}
				}
				for _, c := range batch[:e.CQs[0].Poll(batch)] {
					if c.Err != nil {
						t.Fatal(c.Err)
					}
					done++
				}
				return false
			}, net.Now()+d)
			return done - before
		}
		transfer(50 * time.Millisecond) // the window grows
		return float64(transfer(50*time.Millisecond)*n) / (rate / 20)
	}
	for _, delay := range []time.Duration{5 * time.Microsecond, 500 * time.Microsecond} {
		write := run(rdma.Write, delay, 16)
		for _, limit := range []int{1, 2, 16} {
			read := run(rdma.Read, delay, limit)
			t.Logf("delay %v: READs %.3f of the link with %d outstanding, WRITEs %.3f", delay, read, limit, write)
			if read < 0.95*write || write < 0.9 {
				t.Errorf("delay %v: READs %.3f of the link with %d outstanding, WRITEs %.3f", delay, read, limit, write)
			}
		}
	}
}
