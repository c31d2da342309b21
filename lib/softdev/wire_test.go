package softdev

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestPacketsAgreeWithTheSpecification captures the packets of programs and checks each by a separate implementation of
// the specification. The kernel of the sender cuts batches, so the capture has the identifications that receivers see.
func TestPacketsAgreeWithTheSpecification(t *testing.T) {
	gate.Slow(t, gate.C, "captures of every operation")
	e := newEnds(t, "tcpdump", "ethtool", "python3", "ib_write_bw")
	for _, ns := range []*netnstest.Namespace{e.server, e.client} {
		ns.Run("ethtool", "-K", "eth0", "tx-udp-segmentation", "off")
	}
	capture := filepath.Join(t.TempDir(), "packets.pcap")
	tcpdump := e.server.Start(t, "tcpdump", "-i", "eth0", "-Z", "root", "-B", "65536", "-U", "-w", capture, "udp", "port", "4791")
	tcpdump.AwaitText(t, "listening")
	for i, command := range []string{
		"ib_write_bw -s 10001 -n 50", "ib_send_bw -s 10001 -n 50", "ib_read_bw -s 10001 -n 50", "ib_atomic_lat -n 20", "ib_atomic_lat -A CMP_AND_SWAP -n 20", "ib_send_lat -s 3 -n 20",
		"ib_send_lat -c UD -s 7 -n 20", "ib_write_lat -s 5 -n 20",
	} {
		e.play(t, fmt.Sprint(21000+i), append(strings.Fields(command), "-d", "fared_soft0")...)
	}
	program := compile(t, "traffic", "plain")
	server := e.server.Start(t, "env", e.environment(serverAddress, program, "fared_soft0", "7777")[2:]...)
	c := e.environment(clientAddress, program, "fared_soft0", "7777", serverAddress, "2", "40", "4999")
	if out, err := e.client.Output(c[0], c[1:]...); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, server.Log())
	}
	tcpdump.Stop()
	out := run(t, netnstest.Python(t), "-B", "tests/check_icrc.py", capture)
	t.Log(out)
	for _, want := range []int{0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20, 0x64} {
		if !strings.Contains(out, fmt.Sprintf(" %d:", want)) {
			t.Errorf("no packet has opcode %d", want)
		}
	}
	if regexp.MustCompile("numbered 0 ").MatchString(out) {
		t.Error("no packet has an identification above 0")
	}
	// The check notices one wrong bit.
	b, err := os.ReadFile(capture)
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.Clone(b)
	b[24+16+14+20+8+12] ^= 1
	if err := os.WriteFile(capture, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := e.server.Output(netnstest.Python(t), "-B", "tests/check_icrc.py", capture); err == nil {
		t.Errorf("a wrong packet is not noticed:\n%s", out)
	}
}

// TestZeroChecksum has a peer that is no fared_soft0 send a datagram over IPv6 to an unmodified program, with a UDP
// checksum, and with 0 in its place: rdma_rxe leaves the checksum out, and Linux drops such packets unless the socket
// accepts it (RFC 6935).
func TestZeroChecksum(t *testing.T) {
	e := newEnds(t, "ibv_ud_pingpong", "python3", "ss")
	const server, client = "2001:db8::1", "2001:db8::2"
	e.server.Addr("eth0", server+"/64")
	e.client.Addr("eth0", client+"/64")
	for _, checksum := range []string{"valid", "zero"} {
		t.Run(checksum, func(t *testing.T) {
			s := e.environment(server, "ibv_ud_pingpong", "-d", "fared_soft0", "-g", "0", "-n", "1", "-s", "64")
			program := e.server.Start(t, s[0], s[1:]...)
			program.AwaitSocket(t, e.server, "-tlnH", ":18515 ")
			out, err := e.client.Output(netnstest.Python(t), "-B", "tests/pingpong_peer.py", serverAddress, server, client, checksum)
			if err != nil {
				t.Fatalf("%v\n%s\n%s", err, out, program.Log())
			}
			program.AwaitEnd(t)
			if !strings.Contains(program.Log(), "received 1 ") || regexp.MustCompile(` (bad_icrc|malformed|unknown_qp) [1-9]`).MatchString(program.Log()) {
				t.Errorf("the server:\n%s", program.Log())
			}
		})
	}
}
