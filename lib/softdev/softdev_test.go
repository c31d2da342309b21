// Package softdev tests fared_soft0, the software verbs device: its parts alone, unmodified programs over it, and its
// packets.
package softdev

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// run runs a command and returns its output.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// needs skips the test if a program or the headers of libibverbs are missing.
func needs(t testing.TB, tools ...string) {
	t.Helper()
	netnstest.Tools(t, append(tools, "gcc", "make", "/usr/include/infiniband/verbs.h")...)
}

// library makes libfared-softdev.so, and returns its path.
func library(t testing.TB) string {
	t.Helper()
	needs(t)
	return filepath.Join(cbuild.Make(t, "softdev"), "libfared-softdev.so")
}

// compile compiles a program of tests in a pass of the Makefile, and returns its path.
func compile(t testing.TB, program, pass string) string {
	t.Helper()
	needs(t)
	path := filepath.Join("tests", pass, program)
	return filepath.Join(cbuild.Make(t, "softdev", path), path)
}

// TestWire compares the CRC with its definition bit by bit, and checks that the ICRC's check finds any IPv4
// identification.
func TestWire(t *testing.T) {
	run(t, compile(t, "wire_unit", "memory"))
}

// TestSlots moves paths when the slot table changes, and only those that must move.
func TestSlots(t *testing.T) {
	run(t, compile(t, "slots", "memory"), "../../internal/slotfile/testdata/v2.slots")
}

// TestEngine compares random operations with a model while the wire loses, duplicates, delays and reorders packets, in
// virtual time.
func TestEngine(t *testing.T) {
	gate.Needed(t, "the engine on a simulated wire that loses packets")
	program := compile(t, "engine", "memory")
	operations := gate.Count(t, gate.C, 2_000, 500_000)
	for _, loss := range []string{"0", "20", "100"} {
		t.Log(run(t, program, fmt.Sprint(rand.Uint32()), fmt.Sprint(operations), loss))
	}
}

// ends are two namespaces, connected by a veth pair, and the device's library.
type ends struct {
	server, client *netnstest.Namespace
	library        string
}

const serverAddress, clientAddress = "192.0.2.1", "192.0.2.2"

func newEnds(t testing.TB, tools ...string) *ends {
	t.Helper()
	needs(t, tools...)
	netnstest.Require(t, tools...)
	path := library(t)
	server, client := netnstest.Pair(t, "eth0", serverAddress+"/24", clientAddress+"/24")
	return &ends{server: server, client: client, library: path}
}

// environment returns a command that runs another one over fared_soft0.
func (e *ends) environment(address string, command ...string) []string {
	return append([]string{"timeout", "180", "env", "LD_PRELOAD=" + e.library, "FARED_SOFT_ADDRESS=" + address, "FARED_SOFT_COUNTERS=1"}, command...)
}

// play runs a program as server, which listens on a TCP port, and as client, and returns the client's output.
func (e *ends) play(t testing.TB, port string, command ...string) string {
	t.Helper()
	command = append(command, "-p", port)
	s := e.environment(serverAddress, command...)
	server := e.server.Start(t, s[0], s[1:]...)
	server.AwaitSocket(t, e.server, "-tlnH", ":"+port+" ")
	c := e.environment(clientAddress, append(command, serverAddress)...)
	out, err := e.client.Output(c[0], c[1:]...)
	// perftest measures the processor's clock for its report, after the transfer. Where other processes disturb that it
	// ends with an error, and no test judges speed.
	text := fmt.Sprint(string(out), err) // the error has the standard error
	unmeasured := strings.Contains(text, "Correlation coefficient r^2") && strings.Contains(text, "Can't produce a report")
	if err != nil && !unmeasured {
		t.Fatalf("%s: %v\n%s\nserver:\n%s", strings.Join(command, " "), err, out, server.Log())
	}
	server.AwaitEnd(t)
	for _, bad := range []string{"bad_icrc", "malformed", "wrong_source", "refused"} {
		if regexp.MustCompile(` ` + bad + ` [1-9]`).MatchString(server.Log() + string(out)) {
			t.Errorf("%s: %s is above 0\n%s\n%s", strings.Join(command, " "), bad, out, server.Log())
		}
	}
	return string(out)
}

// port returns a port for a program that listens in a namespace of the test.
func port() string { return fmt.Sprint(20000 + rand.IntN(10000)) }

// TestUCX runs unmodified ucx_perftest over reliable connections, with the datagrams that set them up, and over
// datagrams alone.
func TestUCX(t *testing.T) {
	e := newEnds(t, "ucx_perftest", "ucx_info")
	info := e.server.Run("env", "LD_PRELOAD="+e.library, "FARED_SOFT_ADDRESS="+serverAddress, "UCX_TLS=rc_v", "UCX_NET_DEVICES=fared_soft0:1", "ucx_info", "-d")
	for _, want := range []string{"atomic_fadd: 64 bit", "atomic_cswap: 64 bit"} {
		if _, rc, _ := strings.Cut(info, "rc_verbs"); !strings.Contains(rc, want) {
			t.Errorf("UCX has not %q of the device:\n%s", want, info)
		}
	}
	if all := e.server.Run("sh", "-c", `LD_PRELOAD=$0 FARED_SOFT_ADDRESS=$1 ucx_info -d 2>&1`, e.library, serverAddress); strings.Contains(all, "rdma_cm is not supported") {
		t.Errorf("a line about rdma_cm, which UCX does not need:\n%s", all)
	}
	for transport, tests := range map[string][]string{
		"rc_v,ud_v": {"tag_lat -n 500", "tag_bw -s 65536 -n 500", "ucp_put_bw -s 100000 -n 300", "ucp_get -s 100000 -n 300", "ucp_fadd -s 8 -n 300"},
		"ud_v":      {"tag_lat -n 500", "stream_bw -s 30000 -n 300"},
	} {
		for _, test := range tests {
			t.Run(transport+" "+test, func(t *testing.T) {
				if test != tests[0] {
					gate.Slow(t, gate.C, "another operation")
				}
				e.play(t, port(), append([]string{"env", "UCX_TLS=" + transport, "UCX_NET_DEVICES=fared_soft0:1", "ucx_perftest", "-w", "10", "-t"}, strings.Fields(test)...)...)
			})
		}
	}
}

// TestPrograms runs unmodified programs of rdma-core and perftest over two devices.
func TestPrograms(t *testing.T) {
	e := newEnds(t, "ibv_rc_pingpong", "ib_write_bw")
	if out, err := e.server.Output("env", "LD_PRELOAD="+e.library, "FARED_SOFT_ADDRESS="+serverAddress, "ibv_devinfo", "-d", "fared_soft0"); err != nil ||
		!strings.Contains(string(out), "active_mtu:		1024") || !strings.Contains(string(out), "PORT_ACTIVE") {
		t.Errorf("ibv_devinfo: %v\n%s", err, out)
	}
	for i, command := range []string{
		"ibv_rc_pingpong -g 0 -c", "ibv_rc_pingpong -g 0 -c -e -s 100000", "ibv_ud_pingpong -g 0 -c -s 1024", "ibv_srq_pingpong -g 0",
		"ib_write_bw -n 1000", "ib_write_bw -a -n 20", "ib_write_bw -b -q 8 -n 200", "ib_write_bw --use_old_post_send -I 64 -s 64 -n 1000", "ib_write_lat -s 8 -n 200",
		"ib_send_bw -n 1000", "ib_send_bw -e -n 1000", "ib_send_bw --use-srq -n 1000", "ib_send_bw -c UD -n 1000", "ib_send_lat -n 1000", "ib_send_lat -c UD -n 1000",
		"ib_read_bw -n 500", "ib_read_bw -a -n 20", "ib_read_lat -n 1000", "ib_read_lat -e -n 200", "ib_atomic_bw -n 1000", "ib_atomic_lat -n 1000", "ib_atomic_lat -A CMP_AND_SWAP -n 1000",
	} {
		t.Run(command, func(t *testing.T) {
			if i%9 != 0 {
				gate.Slow(t, gate.C, "another program")
			}
			e.play(t, port(), append(strings.Fields(command), "-d", "fared_soft0")...)
		})
	}
}

// TestSanitizers transfers messages between programs that contain the device, under the sanitizers of threads,
// addresses and undefined behavior, and valgrind.
func TestSanitizers(t *testing.T) {
	gate.Slow(t, gate.C, "real traffic under three sanitizers")
	e := newEnds(t, "valgrind")
	for name, command := range map[string][]string{
		"thread":   {compile(t, "traffic-device", "thread")},
		"memory":   {compile(t, "traffic-device", "memory")},
		"valgrind": {"valgrind", "-q", "--error-exitcode=9", "--leak-check=full", compile(t, "traffic-device", "plain")},
	} {
		t.Run(name, func(t *testing.T) {
			ends := *e
			ends.library = ""
			port := fmt.Sprint(20000 + rand.IntN(20000))
			s := ends.environment(serverAddress, append(command, "fared_soft0", port)...)
			server := e.server.Start(t, s[0], s[1:]...)
			c := ends.environment(clientAddress, append(command, "fared_soft0", port, serverAddress, "4", "100", "20000")...)
			if out, err := e.client.Output(c[0], c[1:]...); err != nil || !strings.Contains(string(out), "verified 400 messages") {
				t.Errorf("%v\n%s", err, out)
			}
			server.AwaitEnd(t)
			if !strings.Contains(server.Log(), "verified 400 messages") || strings.Contains(server.Log(), "WARNING") {
				t.Errorf("server:\n%s", server.Log())
			}
		})
	}
}

// TestWithInterposer preloads libfared-verbs.so, too, in both orders: it leaves fared_soft0's queue pairs to the
// device, which move when a plane is parked.
func TestWithInterposer(t *testing.T) {
	needs(t)
	program, verbs := compile(t, "traffic", "plain"), filepath.Join(cbuild.Make(t, ".", "libfared-verbs.so"), "libfared-verbs.so")
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprint("first ", first), func(t *testing.T) {
			f := newFabric(t)
			if first {
				f.library = verbs + ":" + f.library
			} else {
				f.library += ":" + verbs
			}
			const qps, messages = 8, 1000
			f.setWeights(t, 1, 1, 1, 1)
			running := f.start(t, program, qps, messages, 65536)
			for f.flows(t, running[1]); running[1].Running() == nil; f.flows(t, running[1]) {
				f.setWeights(t, 1, 0, 1, 1)
				f.flows(t, running[1])
				f.setWeights(t, 1, 1, 1, 1)
			}
			finish(t, running, qps*messages)
			for _, end := range running {
				if !regexp.MustCompile(` moved [1-9]`).MatchString(end.Log()) {
					t.Errorf("no queue pair has moved:\n%s", end.Log())
				}
			}
		})
	}
}
