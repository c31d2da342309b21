package nccl

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// softdev compiles fared_soft0, the software device that the tests carry stripes by.
func softdev(t testing.TB) string {
	t.Helper()
	netnstest.Tools(t, "/usr/include/infiniband/verbs.h")
	return filepath.Join(cbuild.Make(t, "softdev"), "libfared-softdev.so")
}

// overVerbs is the environment of a rank that carries stripes over fared_soft0.
func overVerbs(t testing.TB) []string {
	t.Helper()
	return []string{"LD_PRELOAD=" + softdev(t), "FARED_NCCL_TRANSPORT=verbs"}
}

// host is a namespace whose ranks have separate loopback addresses: UDP port 4791 of an address belongs to one process.
type host struct {
	ns     *netnstest.Namespace
	tables []*slotfiletest.Table
}

func newHost(t testing.TB, ranks int) *host {
	t.Helper()
	netnstest.Require(t, "ip")
	h := &host{ns: netnstest.New(t)}
	h.ns.IP("link", "set", "lo", "up")
	for i := range ranks {
		var far []netip.Addr
		for k := range ranks {
			if k != i {
				far = append(far, loopback(k))
			}
		}
		x := slotfiletest.New(t, loopback(i), far...)
		x.Set(t, 4, 2, 1, 1)
		h.tables = append(h.tables, x)
	}
	return h
}

// run starts a job of the first ranks.
func (h *host) run(t testing.TB, b built, ranks int, environment []string, args ...string) []*rank {
	t.Helper()
	return start(t, ranks, func(i int) ([]string, []string) {
		return []string{"ip", "netns", "exec", h.ns.Name, "setarch", "-R", b.check(), "--plugin", b.plugin()}, append([]string{"FARED_SLOTS=" + h.tables[i].Path}, environment...)
	}, args...)
}

// TestVerbsVersions runs a host that offers only one version of the interface, with each of them, over verbs.
func TestVerbsVersions(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	b, h := release(t), newHost(t, 2)
	for version := 8; version <= 12; version++ {
		for _, op := range []string{"allreduce", "grouped"} {
			ranks := h.run(t, b, 2, overVerbs(t), "--abi", fmt.Sprint(version), "--op", op, "--bytes", "3000000", "--iterations", "2", "--verbose")
			finish(t, ranks)
			for _, want := range []string{fmt.Sprintf("v%d fared-127.88.0.1 ", version), " by verbs\n"} {
				if !strings.Contains(ranks[0].out.String(), want) {
					t.Errorf("version %d has no %q:\n%s", version, want, ranks[0].out.String())
				}
			}
		}
	}
}

// TestVerbsCollectives runs every collective with sizes around those of stripes over verbs.
func TestVerbsCollectives(t *testing.T) {
	gate.Slow(t, gate.C, "five operations in two sizes, of four ranks")
	b, h := release(t), newHost(t, 4)
	for _, op := range []string{"allreduce", "allgather", "alltoall", "sendrecv", "grouped"} {
		for _, size := range []int{512, 65536*4*3 + 4} {
			finish(t, h.run(t, b, 4, overVerbs(t), "--op", op, "--bytes", fmt.Sprint(size), "--iterations", "2"))
		}
	}
}

// verbs starts a job of one rank on each server over fared_soft0.
func (f *fabric) verbs(t testing.TB, b built, environment []string, args ...string) []*rank {
	t.Helper()
	return start(t, servers, func(i int) ([]string, []string) {
		return []string{"ip", "netns", "exec", f.nodes[i].Name, b.check(), "--plugin", b.plugin()}, append(append([]string{"FARED_SLOTS=" + f.tables[i].Path}, overVerbs(t)...), environment...)
	}, args...)
}

// TestVerbsPlanes checks by the far ends' counters that stripes of queue pairs follow the weights, and that with equal
// stripes they do not.
func TestVerbsPlanes(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.judge(t, func(environment ...string) []*rank { return f.verbs(t, b, environment, "--bytes", "24000000") })
}

// TestVerbsPlanesFail takes two of four planes out and brings them back, again and again: no error, and every element
// is right. FARED_NCCL_FLAPS is the number of failures of a plane.
func TestVerbsPlanesFail(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.setWeights(t, 1, 1, 1, 1)
	flaps := 4
	if n, err := strconv.Atoi(os.Getenv("FARED_NCCL_FLAPS")); err == nil {
		flaps = n
	}
	stop, args := until(t, "--bytes", "4000000", "--verbose")
	f.flap(t, f.verbs(t, b, nil, args...), flaps, stop)
}

// TestVerbsAllPlanesFail checks that ranks over verbs fail after FARED_NCCL_TIMEOUT when nothing arrives any more.
func TestVerbsAllPlanesFail(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	f.setWeights(t, 1, 1, 1, 1)
	_, args := until(t, "--bytes", "4000000")
	f.cutAll(t, f.verbs(t, b, []string{"FARED_NCCL_TIMEOUT=2"}, args...))
}

// TestVerbsPeerEnds kills a rank over verbs: the others end with an error within seconds.
func TestVerbsPeerEnds(t *testing.T) {
	gate.Slow(t, gate.C, "waits for a time limit, over verbs")
	_, args := until(t, "--bytes", "2000000")
	killOne(t, newHost(t, 4).run(t, release(t), 4, overVerbs(t), args...))
}

// TestVerbsEnds does over verbs what TestEnds does over TCP.
func TestVerbsEnds(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	endsOf(t, []string{"ip", "netns", "exec", newHost(t, 1).ns.Name}, append(overVerbs(t), "FARED_SOFT_ADDRESS="+loopback(0).String())...)
}

// TestTransport checks the choice of the transport: verbs only where a device is, TCP by default where there is none
// but fared_soft0, and a refusal of a peer with another transport.
func TestTransport(t *testing.T) {
	gate.Slow(t, gate.C, "starts ranks six times")
	b, h := release(t), newHost(t, 2)
	ranks := h.run(t, b, 2, []string{"LD_PRELOAD=" + softdev(t)}, "--bytes", "1000000", "--verbose")
	finish(t, ranks)
	if !strings.Contains(ranks[0].out.String(), " by TCP\n") {
		t.Errorf("by default it does not use TCP:\n%s", ranks[0].out.String())
	}
	r := h.run(t, b, 2, []string{"FARED_NCCL_TRANSPORT=verbs"}, "--bytes", "1000000")[0]
	if err := r.cmd.Wait(); err == nil || !strings.Contains(r.out.String(), "FARED_NCCL_TRANSPORT is verbs: no RDMA device has an active Ethernet port") {
		t.Errorf("without an RDMA device: %v\n%s", err, r.out.String())
	}
	ranks = start(t, 2, func(i int) ([]string, []string) {
		return []string{"ip", "netns", "exec", h.ns.Name, b.check(), "--plugin", b.plugin()},
			[]string{"FARED_SLOTS=" + h.tables[i].Path, "LD_PRELOAD=" + softdev(t), "FARED_NCCL_TRANSPORT=" + []string{"tcp", "verbs"}[i]}
	}, "--bytes", "1000000")
	for i, r := range ranks {
		if err := r.cmd.Wait(); err == nil || !strings.Contains(r.out.String(), "set FARED_NCCL_TRANSPORT to the same value for all ranks") {
			t.Errorf("rank %d of two transports: %v\n%s", i, err, r.out.String())
		}
	}
}
