package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	reloadPlanes       = 3
	reloadDestinations = 2048
)

// newReloadBed is a returnBed whose server has two cables in each of three planes, eth0 to eth5. BIRD, in other,
// advertises 2,048 destinations behind the leaf, with 100G in each plane.
func newReloadBed(t *testing.T, driver string, flags ...string) *returnBed {
	t.Helper()
	netnstest.Require(t, "bird")
	t.Setenv(clitest.AsFared, "1")
	b := &returnBed{t: t, server: netnstest.New(t), leaf: netnstest.New(t), other: netnstest.New(t), dir: testbed.ShortDir(t)}
	b.flags = append([]string{"--driver=" + driver, "--socket=" + b.socket("agent")}, flags...)
	t.Cleanup(func() { testbed.Flush(t, b.server, b.flags...) })
	leaf := "role: leaf\nrouter_id: 10.254.0.1\nas: 65100\naccept: [10.255.0.0/16]\nplanes:\n"
	bird := fmt.Sprintf("log stderr all;\nrouter id 10.255.0.2;\nprotocol device {}\nprotocol static { ipv4;\n  %s}\n", destinations())
	bird += fmt.Sprintf("filter weighted { bgp_ext_community.add((generic, 0x%x, 0x%x)); accept; }\n", 0x40040000|65002, math.Float32bits(100e9/8))
	for p := range reloadPlanes {
		leaf += fmt.Sprintf("  - name: p%d\n    sub_ports:\n", p)
		for k := 2 * p; k < 2*p+2; k++ {
			netnstest.Veth(t, b.server, fmt.Sprint("eth", k), b.leaf, fmt.Sprint("a", k))
			for _, second := range []int{0, 2} {
				b.server.Addr(fmt.Sprint("eth", k), fmt.Sprintf("10.%d.%d.1/31", second, k))
				b.leaf.Addr(fmt.Sprint("a", k), fmt.Sprintf("10.%d.%d.0/31", second, k))
			}
			leaf += fmt.Sprintf("      - {device: a%d, speed: 10G, sessions: [{peer: 10.0.%[1]d.1, local: 10.0.%[1]d.0, passive: true}, {peer: 10.2.%[1]d.1, local: 10.2.%[1]d.0, passive: true}]}\n", k)
		}
		netnstest.Cable(t, b.other, fmt.Sprint("b", p), fmt.Sprintf("10.1.%d.1/31", p), b.leaf, fmt.Sprint("b", p), fmt.Sprintf("10.1.%d.0/31", p))
		leaf += fmt.Sprintf("      - {device: b%d, speed: 100G, sessions: [{peer: 10.1.%[1]d.1, local: 10.1.%[1]d.0, passive: true}]}\n", p)
		bird += fmt.Sprintf("protocol bgp p%d { local 10.1.%[1]d.1 as 65002; neighbor 10.1.%[1]d.0 as 65100; connect delay time 1; connect retry time 1; ipv4 { import none; export filter weighted; }; }\n", p)
	}
	b.server.Addr("lo", "10.255.0.1/32")
	b.file("leaf", leaf+`dataplane: {address: "memory:"}`)
	if err := os.WriteFile(filepath.Join(b.dir, "bird.conf"), []byte(bird), 0o644); err != nil {
		t.Fatal(err)
	}
	b.start(b.leaf, "leaf", "leaf")
	b.other.Start(t, "bird", "-f", "-c", filepath.Join(b.dir, "bird.conf"), "-s", filepath.Join(b.dir, "bird.ctl"), "-P", filepath.Join(b.dir, "bird.pid"))
	b.startAgent()
	return b
}

// destinations returns the routes of BIRD, the first of which is 10.255.0.2.
func destinations() string {
	var all strings.Builder
	for n := range reloadDestinations {
		fmt.Fprintf(&all, "route 10.255.%d.%d/32 blackhole;\n", n/200, n%200+2)
	}
	return all.String()
}

// structure is the part of the server's configuration that reloads change.
type structure struct {
	ports    [2 * reloadPlanes]bool // port 0 stays
	sessions [2 * reloadPlanes]bool // the port has a second session
	gpus     []string               // loopbacks in addition to 10.255.0.1
	owned    int                    // this port serves the first of gpus alone; 0 means none
}

// next changes one to three of the parts at random.
func (s structure) next(r *rand.Rand) structure {
	s.gpus = slices.Clone(s.gpus)
	for range 1 + r.IntN(3) {
		switch k := 1 + r.IntN(len(s.ports)-1); r.IntN(5) {
		case 0, 1:
			s.ports[k] = !s.ports[k]
		case 2:
			s.sessions[k] = !s.sessions[k]
		case 3:
			gpu := fmt.Sprintf("10.255.250.%d/32", 1+r.IntN(4))
			if i := slices.Index(s.gpus, gpu); i >= 0 {
				s.gpus = slices.Delete(s.gpus, i, i+1)
			} else {
				s.gpus = append(s.gpus, gpu)
			}
		case 4:
			if s.owned = k; r.IntN(3) > 0 {
				s.owned = 0
			}
		}
	}
	if len(s.gpus) == 0 || !s.ports[s.owned] {
		s.owned = 0
	}
	return s
}

// text returns the configuration.
func (s *structure) text(b *returnBed) string {
	all := append([]string{"10.255.0.1/32"}, s.gpus...)
	out := "role: server\nrouter_id: 10.255.0.1\nas: 65001\naccept: [10.255.0.0/16]\nloopbacks: [" + strings.Join(all, ", ") + "]\n"
	out += "dataplane: {address: unix:" + b.socket("agent") + "}\nplanes:\n"
	for p := range reloadPlanes {
		if !s.ports[2*p] && !s.ports[2*p+1] {
			continue
		}
		out += fmt.Sprintf("  - name: p%d\n    sub_ports:\n", p)
		for k := 2 * p; k < 2*p+2; k++ {
			if !s.ports[k] {
				continue
			}
			out += fmt.Sprintf("      - device: eth%d\n        speed: 10G\n", k)
			if s.owned > 0 {
				of := slices.DeleteFunc(slices.Clone(all), func(l string) bool { return (k == s.owned) != (l == s.gpus[0]) })
				if k == 0 { // serves all, so that each has a port
					of = all
				}
				out += "        loopbacks: [" + strings.Join(of, ", ") + "]\n"
			}
			out += fmt.Sprintf("        sessions:\n          - {peer: 10.0.%d.0, local: 10.0.%[1]d.1}\n", k)
			if s.sessions[k] {
				out += fmt.Sprintf("          - {peer: 10.2.%d.0, local: 10.2.%[1]d.1}\n", k)
			}
		}
	}
	return out
}

// weights returns the weights that a source has by the model: a plane's are the numbers of its ports.
func (s *structure) weights(source string) (out string) {
	var counts []int
	divisor := 0
	for p := range reloadPlanes {
		n := 0
		for k := 2 * p; k < 2*p+2; k++ {
			if s.ports[k] && (s.owned == 0 || k == 0 || (k == s.owned) == (source == s.gpus[0])) {
				n++
			}
		}
		if n > 0 {
			counts = append(counts, n)
			for a, c := divisor, n; ; {
				if divisor = a; c == 0 {
					break
				}
				a, c = c, a%c
			}
		}
	}
	for _, n := range counts {
		out += fmt.Sprintf(":%d", n/divisor)
	}
	return strings.TrimPrefix(out, ":")
}

// slotsOf has the device of each slot of 10.255.0.1 toward each destination.
type slotsOf map[string]map[uint32]string

// agrees returns the slots, or an error unless all weights are those of the model and in effect.
func (s *structure) agrees(b *returnBed) (slotsOf, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
	defer cancel()
	list, err := farev1.NewWeightServiceClient(b.conn).ListWeights(ctx, &farev1.ListWeightsRequest{PageSize: 10000}, grpc.WaitForReady(true))
	all, token := list.GetWeights(), list.GetNextPageToken()
	for err == nil && token != "" {
		list, err = farev1.NewWeightServiceClient(b.conn).ListWeights(ctx, &farev1.ListWeightsRequest{PageSize: 10000, PageToken: token})
		all, token = append(all, list.GetWeights()...), list.GetNextPageToken()
	}
	if err != nil {
		return nil, err
	}
	slots := slotsOf{}
	for _, d := range all {
		got := ""
		for _, p := range d.Planes {
			if got += fmt.Sprintf(":%d", p.Weight); !p.InEffect {
				return nil, fmt.Errorf("%s: %s is not in effect %s", d.Destination, p.Plane, d.NotInEffect)
			}
		}
		for _, source := range d.Sources {
			if want := s.weights(source); strings.TrimPrefix(got, ":") != want {
				return nil, fmt.Errorf("%s from %s: weights %s, want %s", d.Destination, source, got, want)
			}
		}
		for _, pair := range d.Pairs {
			if pair.Source == "10.255.0.1/32" {
				slots[d.Destination] = map[uint32]string{}
				for _, slot := range pair.Slots {
					if slots[d.Destination][slot.Slot] = slot.Device; !s.has(slot.Device) { // other ports may have had these weights before
						return nil, fmt.Errorf("%s: slot %d is on %s, which the configuration lacks", d.Destination, slot.Slot, slot.Device)
					}
				}
			}
		}
	}
	if len(slots) != reloadDestinations {
		return nil, fmt.Errorf("%d destinations", len(slots))
	}
	return slots, nil
}

// has reports whether a device is a sub-port.
func (s *structure) has(device string) bool {
	var k int
	_, err := fmt.Sscanf(device, "eth%d", &k)
	return err == nil && s.ports[k]
}

// until waits for agrees.
func (s *structure) until(b *returnBed) (slots slotsOf) {
	b.t.Helper()
	netnstest.Eventually(b.t, time.Minute, func() (err error) {
		slots, err = s.agrees(b)
		return err
	})
	return slots
}

// moved returns the number of slots that were on a sub-port which serves 10.255.0.1 still, and are elsewhere.
func (s *structure) moved(before, after slotsOf) (n int, first string) {
	for destination, slots := range before {
		for slot, device := range slots {
			if !s.has(device) || s.owned > 0 && device == fmt.Sprint("eth", s.owned) {
				continue
			}
			if now, ok := after[destination][slot]; ok && now != device { // slots are numbered without gaps: fewer ports have fewer
				n++
				first = fmt.Sprintf("slot %d to %s from %s to %q", slot, destination, device, now)
			}
		}
	}
	return n, first
}

// TestRandomReloads adds and removes sub-ports, sessions, GPUs, their ports and planes at random, at 2,048 destinations
// and while packets flow. After each reload the weights are those of a model, and every 50th time those of a daemon
// that starts; slots of sub-ports that stay do not move, and no packet is lost. FARED_RELOADS is the number of reloads.
func TestRandomReloads(t *testing.T) {
	gate.Slow(t, gate.Kernel, "100 reloads with 2,048 destinations")
	n, seed := 100, uint64(1)
	_, _ = fmt.Sscan(os.Getenv("FARED_RELOADS"), &n, &seed) // they stay if it is absent; the second word is the seed
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			b := newReloadBed(t, driver, "--buckets=1024")
			r := rand.New(rand.NewPCG(seed, 40))
			s := structure{ports: [2 * reloadPlanes]bool{true, true, true}}
			b.file("server", s.text(b))
			b.daemon = b.start(b.server, "run", "server")
			b.conn = testbed.Dial(t, b.socket("server"))
			slots := s.until(b)
			f := b.flood()
			var took []time.Duration
			for round := range n {
				next := s.next(r)
				b.file("server", next.text(b))
				begin := time.Now()
				changes, err := farev1.NewFabricServiceClient(b.conn).Reload(t.Context(), &farev1.ReloadRequest{})
				took = append(took, time.Since(begin))
				if err != nil {
					t.Fatalf("reload %d: %v\n%s", round, err, next.text(b))
				}
				now := next.until(b)
				if moved, first := next.moved(slots, now); moved > 0 {
					t.Errorf("seed %d, reload %d (%v): %d slots moved, as %s", seed, round, changes.Changes, moved, first)
				}
				if s, slots = next, now; round%50 == 49 {
					t.Logf("%d reloads, the last one in %v", round+1, took[round])
					b.daemon.Kill()
					b.daemon = b.start(b.server, "run", "server")
					b.conn.ResetConnectBackoff()
					slots = s.until(b)
				}
				if t.Failed() {
					break
				}
			}
			f.stop()
			slices.Sort(took)
			t.Logf("%d reloads with %d destinations: p50 %v, p99 %v, most %v; %d packets, none lost", len(took), reloadDestinations, took[len(took)/2], took[len(took)*99/100], took[len(took)-1], f.sent.Load())
		})
	}
}
