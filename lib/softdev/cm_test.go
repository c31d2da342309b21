package softdev

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/internal/testkit/gate"
)

// TestCommunicationManagement connects and disconnects two devices in virtual time, on a wire that loses, duplicates, delays and changes messages.
func TestCommunicationManagement(t *testing.T) {
	program := compile(t, "cm_unit", "memory")
	rounds := gate.Count(t, gate.C, 2000, 100_000)
	for _, loss := range []string{"0", "100", "300"} {
		t.Log(run(t, program, fmt.Sprint(rand.Uint32()), fmt.Sprint(rounds), loss))
	}
}

// talk runs a program that listens, and another one when the first one is ready; both must succeed. It returns their output.
func (e *ends) talk(t testing.TB, server, client []string) string {
	t.Helper()
	s := e.environment(serverAddress, server...)
	listener := e.server.Start(t, s[0], s[1:]...)
	// fared0 receives from the moment at which the program listens; fi_pingpong listens by TCP before.
	option, port := "-uanH", ":4791 "
	if strings.Contains(strings.Join(server, " "), "fi_pingpong") {
		option, port = "-tlnH", ":47592 "
	}
	listener.AwaitSocket(t, e.server, option, port)
	// Between its calls of rdma_bind_addr and rdma_listen a program rejects requests.
	c := e.environment(clientAddress, client...)
	out, err := e.client.Output(c[0], c[1:]...)
	for deadline := time.Now().Add(time.Minute); err != nil && strings.Contains(fmt.Sprint(err), "RDMA_CM_EVENT_REJECTED") && time.Now().Before(deadline); {
		out, err = e.client.Output(c[0], c[1:]...)
	}
	if err != nil && !lateRead(err, out) {
		t.Fatalf("%v: %v\n%s\nserver:\n%s", client, err, out, listener.Log())
	}
	listener.AwaitEnd(t)
	all := string(out) + "\n" + listener.Log()
	if regexp.MustCompile(` (bad_icrc|malformed|wrong_source|refused) [1-9]`).MatchString(all) {
		t.Errorf("%v: packets are wrong:\n%s", client, all)
	}
	return all
}

// lateRead reports whether rping has failed because its thread for events still wanted one after its main thread had closed their channel, at its end: then
// its exit status is 255.
func lateRead(err error, out []byte) bool {
	return strings.Contains(fmt.Sprint(err)+string(out), "rdma_get_cm_event: Bad file descriptor")
}

// TestConnectionManager runs unmodified programs that connect by rdma_cm, and checks each of their management datagrams by a separate implementation of the
// specification.
func TestConnectionManager(t *testing.T) {
	gate.Slow(t, gate.C, "27 programs and 60 connections")
	e := newEnds(t, "rping", "ucmatose", "ib_write_bw", "fi_pingpong", "tcpdump", "python3", "ss", "/usr/include/rdma/rdma_cma.h")
	capture := filepath.Join(t.TempDir(), "cm.pcap")
	tcpdump := e.server.Start(t, "tcpdump", "-i", "eth0", "-Z", "root", "-U", "-w", capture, "udp dst port 4791 and udp[8] = 0x64 and udp[13:2] = 0 and udp[15] = 1")
	tcpdump.AwaitText(t, "listening")
	connections := 0
	for _, test := range []struct {
		name, server, client, want string
		connections                int
	}{
		{"rping", "rping -s -C 5 -v", "rping -c -C 5 -v -a " + serverAddress, "server ping data: rdma-ping-4", 1},
		{"ucmatose", "ucmatose -c 5", "ucmatose -c 5 -s " + serverAddress, "return status 0", 5},
		{"ucmatose -m", "ucmatose -m -b " + serverAddress, "ucmatose -m -s " + serverAddress, "return status 0", 1},
		{"ib_write_bw", "ib_write_bw -R -n 200", "ib_write_bw -R -n 200 " + serverAddress, "65536 ", 2},
		{"ib_send_lat", "ib_send_lat -R -n 200", "ib_send_lat -R -n 200 " + serverAddress, "2 ", 2},
		{"ib_read_bw", "ib_read_bw -R -q 4 -n 100", "ib_read_bw -R -q 4 -n 100 " + serverAddress, "65536 ", 5},
		{"fi_pingpong", "fi_pingpong -p verbs -e msg -I 5", "fi_pingpong -p verbs -e msg -I 5 " + serverAddress, "1m ", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			if out := e.talk(t, strings.Fields(test.server), strings.Fields(test.client)); !strings.Contains(out, test.want) {
				t.Errorf("the output lacks %q:\n%s", test.want, out)
			}
			connections += test.connections
		})
	}
	t.Run("rejected", func(t *testing.T) { // a listener at another port
		s := e.environment(serverAddress, "rping", "-s", "-p", "7000")
		listener := e.server.Start(t, s[0], s[1:]...)
		c := e.environment(clientAddress, "rping", "-c", "-a", serverAddress, "-p", "7001")
		netnstest.Eventually(t, time.Minute, func() error {
			if out, err := e.client.Output(c[0], c[1:]...); err == nil || !strings.Contains(fmt.Sprint(err), "RDMA_CM_EVENT_REJECTED, error 8") {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
		listener.Stop()
	})
	// The check also changes each of the messages' fields, and must notice it. tcpdump writes some packets late.
	established, complete := 0, 0
	netnstest.Eventually(t, time.Minute, func() error {
		out, err := exec.Command("python3", "-B", "tests/check_cm.py", capture).CombinedOutput()
		i := strings.Index(string(out), "established ")
		if err != nil || i < 0 {
			return fmt.Errorf("%w\n%s", err, out)
		}
		if _, err := fmt.Sscanf(string(out[i:]), "established %d complete %d", &established, &complete); err != nil || established != connections || complete < connections/2 || !strings.Contains(string(out), "REJ:") {
			return fmt.Errorf("want %d connections, and a rejection: %s", connections, out)
		}
		t.Logf("%s", out)
		return nil
	})
	tcpdump.Stop()
}

// TestConnectionManagerPlanes requires that also the datagrams that connect take a plane of the slot table.
func TestConnectionManagerPlanes(t *testing.T) {
	gate.Slow(t, gate.C, "rdma_cm over a fabric")
	f := newFabric(t)
	netnstest.Tools(t, "rping")
	f.setWeights(t, 0, 0, 1, 0)
	before, _ := f.received(t)
	command := func(i int, more ...string) []string {
		return append(f.environment("", "env", "FARED_SLOTS="+f.tables[i].Path, "rping", "-C", "5", "-v"), more...)
	}
	s := command(0, "-s")
	server := f.server.Start(t, s[0], s[1:]...)
	server.AwaitSocket(t, f.server, "-uanH", ":4791 ")
	c := command(1, "-c", "-a", serverLoopback)
	if out, err := f.client.Output(c[0], c[1:]...); err != nil && !lateRead(err, out) || !strings.Contains(string(out), "ping data: rdma-ping-4") {
		t.Fatalf("%v\n%s\n%s", err, out, server.Log())
	}
	after, _ := f.received(t)
	for p := range planes {
		if n := after[p] - before[p]; (n > 1500) != (p == 2) {
			t.Errorf("plane %d has carried %.0f bytes", p, n)
		}
	}
}
