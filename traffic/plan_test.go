package traffic

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// gpus is a node with n loopbacks that implements only Describe.
type gpus struct {
	farev1.TrafficServiceClient
	node, n int
}

func (g gpus) DescribeTraffic(context.Context, *farev1.DescribeTrafficRequest, ...grpc.CallOption) (*farev1.DescribeTrafficResponse, error) {
	out := &farev1.DescribeTrafficResponse{Transport: "roce"}
	for i := range g.n {
		out.Loopbacks = append(out.Loopbacks, fmt.Sprintf("10.255.%d.%d", g.node, i+1))
	}
	return out, nil
}

// node returns the third octet of a loopback, the number of its node.
func node(loopback string) string { return strings.Split(loopback, ".")[2] }

// planned plans a pattern over nodes with the given numbers of loopbacks.
func planned(t *testing.T, pattern Pattern, loopbacks ...int) (pairs []*farev1.TrafficPair, notices []string, err error) {
	t.Helper()
	c := &coordinator{cfg: Config{Pattern: pattern, Notice: func(s string) { notices = append(notices, s) }}.withDefaults()}
	for i, n := range loopbacks {
		c.servers = append(c.servers, Server{Name: fmt.Sprint("n", i), Client: gpus{node: i, n: n}})
	}
	if err := c.describe(t.Context()); err != nil {
		t.Fatal(err)
	}
	pairs, err = c.plan(1000)
	return pairs, notices, err
}

// TestPairsBetweenServers verifies that with 8 GPUs per server every pattern has pairs, none inside a server, and that
// a ring passes every GPU once.
func TestPairsBetweenServers(t *testing.T) {
	for _, test := range []struct {
		pattern Pattern
		servers int
		pairs   int
		leftOut int
	}{
		{AllToAll, 2, 16 * 8, 16 * 7}, {AllToAll, 3, 24 * 16, 24 * 7}, {Incast, 2, 8, 7}, {Incast, 3, 16, 7},
		{Ring, 2, 16, 0}, {Ring, 3, 24, 0}, {PeerPeer, 2, 8, 0}, {PeerPeer, 3, 12, 0},
	} {
		t.Run(fmt.Sprintf("%s-%d", test.pattern, test.servers), func(t *testing.T) {
			counts := make([]int, test.servers)
			for i := range counts {
				counts[i] = 8
			}
			pairs, notices, err := planned(t, test.pattern, counts...)
			if err != nil || len(pairs) != test.pairs {
				t.Fatalf("%d pairs, %v; want %d", len(pairs), err, test.pairs)
			}
			next := map[string]string{}
			for i, p := range pairs {
				if int(p.GetPair()) != i || node(p.GetSource()) == node(p.GetDestination()) {
					t.Errorf("pair %d: %v", i, p)
				}
				next[p.GetSource()] = p.GetDestination()
				if test.pattern == Ring && pairs[p.GetAfter()].GetDestination() != p.GetSource() {
					t.Errorf("%v waits for %v", p, pairs[p.GetAfter()])
				}
			}
			if test.pattern == Ring {
				at, steps := pairs[0].GetSource(), 0
				for begin := at; steps == 0 || at != begin && steps <= len(pairs); steps++ {
					at = next[at]
				}
				if steps != test.pairs {
					t.Errorf("the ring closes after %d of %d", steps, test.pairs)
				}
			}
			if want := fmt.Sprintf("%d pairs inside one server left out", test.leftOut); test.leftOut == 0 && len(notices) > 0 || test.leftOut > 0 && !strings.HasPrefix(strings.Join(notices, ""), want) {
				t.Errorf("notices %q, want %q", notices, want)
			}
		})
	}
}

// TestNoPairBetweenServers verifies that a run without any pair, and a ring that cannot be closed, fail before a node
// is asked to run, which gpus does not implement.
func TestNoPairBetweenServers(t *testing.T) {
	for _, pattern := range Patterns() {
		cfg := Config{Pattern: Pattern(pattern), Size: 1 << 20}
		if _, err := Coordinate(t.Context(), cfg, []Server{{Name: "a", Client: gpus{n: 8}}}, nil); !errors.As(err, new(*InsideError)) || strings.Contains(err.Error(), "--") {
			t.Errorf("%s with one node: %v", pattern, err)
		}
	}
	if _, _, err := planned(t, Ring, 1, 3); err == nil || !strings.Contains(err.Error(), "same node n1") {
		t.Errorf("a ring of 1 and 3: %v", err)
	}
	if pairs, _, err := planned(t, PeerPeer, 1, 3); err != nil || len(pairs) != 1 {
		t.Errorf("peers of 1 and 3: %v, %v", pairs, err)
	}
}
