package worker

import (
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/topo"
)

// TestDoubles simulates all double failures next to a failed cable by one process, by three workers, and by two after
// the loss of one: the answers are the same, byte for byte.
func TestDoubles(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 5, SubPorts: 1})
	present := message(f, f.Server[2], 1, 1)
	present.Ports.Ports[1].State = "dark"
	ask3 := func(peers int, lost bool) string {
		var listeners []net.Listener
		var addresses []string
		for range 1 + peers {
			l := listen(t)
			listeners, addresses = append(listeners, l), append(addresses, l.Addr().String())
		}
		if lost {
			listeners[1].Close()
		}
		for i, l := range listeners[1:] {
			if !lost || i > 0 {
				serve(t, f, l)
			}
		}
		w, _ := serve(t, f, listeners[0], addresses[1:]...)
		w.set(f.Server[2], present, own)
		m, err := whatIf(t, ask(t, addresses[0]), &fleetv1.WhatIfRequest{AllDouble: true, Fail: []string{"server5/p0", "leaf0-1/up1"}})
		if err != nil {
			t.Fatal(err)
		}
		return prototext.Format(m)
	}
	one := ask3(0, false)
	var m fleetv1.WhatIfResponse
	if err := prototext.Unmarshal([]byte(one), &m); err != nil {
		t.Fatal(err)
	}
	sum := uint64(0)
	for _, n := range m.CasesByPlanes {
		sum += n
	}
	// 10 cables, 5 servers, 4 leaves, 8 uplinks, 4 spines and 2 planes, without the three that have failed.
	if n := uint64(30); sum != n*(n-1)/2 || m.CasesByPlanes[0] == 0 || len(m.Cases) != maxCases || m.Cases[0].PairsByPlanes[0] == 0 {
		t.Errorf("%d cases, by planes %v, and %d worst ones", sum, m.CasesByPlanes, len(m.Cases))
	}
	for i, c := range m.Cases[1:] {
		if before := m.Cases[i]; before.PairsByPlanes[0] < c.PairsByPlanes[0] {
			t.Errorf("%v comes before %v", before, c)
		}
	}
	if got := ask3(2, false); got != one {
		t.Errorf("three workers answer\n%s\none\n%s", got, one)
	}
	if got := ask3(2, true); got != one {
		t.Errorf("two of three workers answer\n%s\none\n%s", got, one)
	}
	var broken []string // each server another set of cables
	large := number(t, topo.Spec{Planes: 8, Servers: 40})
	for i := range large.Servers {
		for p := range large.Planes {
			if i>>p&1 == 1 {
				broken = append(broken, fmt.Sprintf("server%d/p%d.0", i+1, p))
			}
		}
	}
	w := New(Config{Fabric: large})
	if _, err := w.answerWhatIf(t.Context(), &fleetv1.WhatIfRequest{AllDouble: true, Fail: broken}, &progress{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("too many: %v", err)
	}
}

// whatIf asks a worker, and waits for the answer.
func whatIf(t *testing.T, c fleetv1.FleetServiceClient, req *fleetv1.WhatIfRequest) (*fleetv1.WhatIfResponse, error) {
	t.Helper()
	stream, err := c.WhatIf(t.Context(), req, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	return Answer(stream, func(uint64, uint64) {})
}

// TestProgress checks that a caller learns how far a simulation of all failures is.
func TestProgress(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 3})
	l := listen(t)
	w, _ := serve(t, f, l)
	w.whatIf.Lock()
	held := true
	stream, err := ask(t, l.Addr().String()).WhatIf(t.Context(), &fleetv1.WhatIfRequest{AllSingle: true}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	m, err := Answer(stream, func(done, total uint64) {
		if held {
			if done != 0 || total == 0 {
				t.Errorf("%d of %d before the simulation begins", done, total)
			}
			held = false
			w.whatIf.Unlock()
		}
	})
	if err != nil || held || len(m.Cases) == 0 || m.Total != 0 {
		t.Errorf("%v, %v, without progress: %v", m, err, held)
	}
}
