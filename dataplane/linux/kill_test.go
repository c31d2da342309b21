package linux

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

const (
	killedEnv       = "FARED_TEST_FORWARDING"
	killedGroups    = 6
	killedPerFamily = 600
	killedSmall     = 2 // vectors of three destinations of each family
)

// killedState is state i of the endless sequence that the killed process programs.
func killedState(f *farev1.Forwarding, i int) *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{}
	for g := range killedGroups + killedSmall {
		set := &farev1.Vector{Id: uint32(g + 1)}
		for j, plane := range f.Planes {
			if weight := (i*3 + g + j*j) % 4; weight > 0 {
				set.Members = append(set.Members, &farev1.VectorMember{Plane: plane.Plane, Device: plane.SubPorts[0].Device, Weight: uint32(weight)})
			}
		}
		all.Vectors = append(all.Vectors, set)
	}
	for d := range killedPerFamily {
		if (d+i)%5 > 0 {
			all.Destinations = append(all.Destinations,
				&farev1.Destination{Prefix: target4(d), Vector: uint32(1 + (d+i)%killedGroups)},
				&farev1.Destination{Prefix: target6(d), Vector: uint32(1 + d%killedGroups)})
		}
	}
	for d := range 3 * killedSmall {
		vector := uint32(killedGroups + 1 + d%killedSmall)
		all.Destinations = append(all.Destinations,
			&farev1.Destination{Prefix: target4(killedPerFamily + d), Vector: vector}, &farev1.Destination{Prefix: target6(killedPerFamily + d), Vector: vector})
	}
	return all
}

// reweigh changes the vectors of few destinations.
func reweigh(d *Driver, f *farev1.Forwarding) error {
	before := killedState(f, 0).Vectors[killedGroups:]
	for i := range 24 {
		after := killedState(f, i).Vectors[killedGroups:]
		var changes []contract.Change
		for j, g := range after {
			changes = append(changes, contract.Change{Kind: contract.GroupChange, Group: g.Id, Before: before[j], After: g})
		}
		if err := d.Commit(changes); err != nil {
			return err
		}
		before = after
	}
	return nil
}

// killed is the process that TestKilled kills; TestMain runs it instead of the tests. It returns only on failure.
func killed(text string) error {
	f := &farev1.Forwarding{}
	if err := protojson.Unmarshal([]byte(text), f); err != nil {
		return err
	}
	for i := 0; ; i++ {
		d, err := Open(Config{})
		if err != nil {
			return err
		}
		server := contract.New(contract.Config{Name: "linux", Forwarder: d})
		if refused, err := server.Restore(f, killedState(f, i)); err != nil || len(refused) > 0 {
			return fmt.Errorf("%v, %w", refused, err)
		}
		if err := errors.Join(d.Settle(), reweigh(d, f), d.Close()); err != nil {
			return err
		}
		fmt.Println("programmed")
	}
}

// TestKilled kills a process during programming at random moments, and checks that the next process reaches the wanted
// state from any leftovers and leaves foreign objects unchanged.
func TestKilled(t *testing.T) {
	gate.Needed(t, "a driver that is killed at any moment returns with its state")
	netnstest.Require(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t, 4)
	for _, line := range []string{
		"nexthop add id 5 via 10.1.0.2 dev p0 proto 196", "nexthop add id 7 group 5 type resilient buckets 8 proto 196",
		"route add 10.77.0.0/16 nhid 7 proto 196", "route add default via 10.1.3.2", "rule add pref 500 fwmark 9 lookup 90",
	} {
		h.IP(strings.Fields(line)...)
	}
	foreign := func() string {
		var kept []string
		for line := range strings.Lines(h.Objects()) {
			if !strings.Contains(line, "proto 179") {
				kept = append(kept, line)
			}
		}
		return strings.Join(kept, "")
	}
	// The reference is the result of a process that is not killed.
	want := killedState(h.forwarding, 1)
	d, _ := h.restart(want)
	before := h.state()
	crash(t, d)
	others := foreign()
	text, err := protojson.Marshal(h.forwarding)
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	different := 0
	for round := range gate.Count(t, gate.Kernel, 5, 12) {
		ctx, cancel := context.WithCancel(context.Background())
		cmd := exec.CommandContext(ctx, program)
		cmd.Env = append(os.Environ(), killedEnv+"="+string(text))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Do(cmd.Start); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(out).ReadString('\n')
		if line != "programmed\n" {
			t.Fatalf("%q, %v", line, err)
		}
		time.Sleep(time.Duration(random.IntN(40_000)) * time.Microsecond) // a random moment
		cancel()
		_ = cmd.Wait() // the error is the kill
		if diff(h.state(), before) != "" {
			different++
		}
		d, _ := h.restart(want)
		if d := diff(h.state(), before); d != "" {
			t.Fatalf("round %d: %s", round, d)
		}
		if f := d.Capabilities().FlowHash; f.GetAlgorithm() != computed {
			t.Errorf("round %d: flow hash %v", round, f)
		}
		rest(t, d)
		n := sent(d.Stats())
		d.audit()
		if s := d.Stats(); sent(s) != n || s.Differences != 0 {
			t.Errorf("round %d: an audit found more: %+v", round, s)
		}
		crash(t, d)
		if now := foreign(); now != others {
			t.Fatalf("round %d: others' objects changed:\n%s\nbefore:\n%s", round, now, others)
		}
	}
	if different == 0 {
		t.Error("no killed process left anything to repair")
	}
}

// TestKilledWhileAsking checks that leftovers of a probe do not prevent a probe by the next process.
func TestKilledWhileAsking(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	program(t, c.server).do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	clean := h.Objects()
	d.mu.Lock()
	for f, check := range []netip.Addr{checkV4, checkV6} {
		target, device := []run{{0, d.state.want.size}}, d.prober.probeDevice(family(f))
		for _, asked := range []rtnl.Route{
			{Prefix: netip.PrefixFrom(check, check.BitLen()), Table: d.state.config.Table, Metric: d.state.config.Metric},
			{Prefix: netip.PrefixFrom(check, 0).Masked(), Table: d.state.config.ProbeTable, Metric: d.state.config.Metric},
		} {
			if _, err := d.prober.probe(family(f), device, target, asked, asked.Table == d.state.config.ProbeTable); err != nil {
				t.Error(err)
			}
		}
	}
	d.mu.Unlock()
	journal := c.snapshot()
	crash(t, d)
	d, c = h.restart(journal)
	if f := d.Capabilities().FlowHash; f.GetAlgorithm() != computed {
		t.Errorf("flow hash %v", f)
	}
	for i, dst := range []string{target4(0), target6(0)} {
		source := mustPrefix(h.forwarding.Loopbacks[i]).Addr()
		if _, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
			Source: source.String(), Destination: mustPrefix(dst).Addr().String(), DestinationPort: 4791,
		}); err != nil {
			t.Errorf("%s: %v", dst, err)
		}
	}
	d.audit()
	if now := h.Objects(); now != clean {
		t.Errorf("left:\n%s\nbefore:\n%s", now, clean)
	}
}
