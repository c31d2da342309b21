package rdma

import (
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// pairBed is fared_soft0 in a namespace and rdma_rxe in the initial one, connected by a veth pair.
type pairBed struct {
	host *netnstest.Namespace // of fared_soft0
}

const (
	rxeAddress   = "192.0.2.1"
	softAddress  = "192.0.2.2"
	rxeAddress6  = "2001:db8::1"
	softAddress6 = "2001:db8::2"
	rxeDevice    = "rxe9"
)

func newPairBed(t testing.TB) *pairBed {
	t.Helper()
	netnstest.Require(t, "rdma", "tcpdump", "ethtool", "python3", "ss")
	b := &pairBed{host: netnstest.New(t)}
	netnstest.IP(t, "link", "add", "rxenet", "type", "veth", "peer", "name", "eth0", "netns", b.host.Name)
	// In this order rdma_rxe gives them the GID indexes 1 and 2.
	netnstest.IP(t, "addr", "add", rxeAddress+"/24", "dev", "rxenet")
	netnstest.IP(t, "addr", "add", rxeAddress6+"/64", "dev", "rxenet", "nodad")
	netnstest.IP(t, "link", "set", "rxenet", "up")
	b.host.Addr("eth0", softAddress+"/24", softAddress6+"/64")
	// The kernel of the sender cuts batches, so that a capture has the packets that rdma_rxe receives.
	b.host.Run("ethtool", "-K", "eth0", "tx-udp-segmentation", "off")
	if out, err := exec.Command("rdma", "link", "add", rxeDevice, "type", "rxe", "netdev", "rxenet").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() {
		exec.Command("rdma", "link", "delete", rxeDevice).Run()
		netnstest.IP(t, "link", "delete", "rxenet")
	})
	return b
}

// command is a program over fared_soft0, or over rdma_rxe, with a GID of IPv4 or IPv6.
func (b *pairBed) command(soft, six bool, words string) []string {
	device, gid, address := rxeDevice, "1", softAddress
	if six {
		gid, address = "2", softAddress6
	}
	var environment []string
	if soft {
		device, gid = "fared_soft0", "0"
		environment = []string{"LD_PRELOAD=" + filepath.Join(folder, "libfared-softdev.so"), "FARED_SOFT_ADDRESS=" + address, "FARED_SOFT_COUNTERS=1"}
	}
	if strings.HasPrefix(words, "ucx_") {
		environment = append(environment, "UCX_TLS=rc_v,ud_v", "UCX_NET_DEVICES="+device+":1", "UCX_IB_GID_INDEX="+gid)
		if !soft && !six {
			// UCX 1.13 reads the IP version of a datagram from the service level of its completion, as mlx5's driver
			// reports it. rdma_rxe has 0 there, and UCX drops the datagram because it looks for an IPv6 destination in
			// the IPv4 header.
			environment = append(environment, "UCX_UD_ETH_DGID_CHECK=n")
		}
	}
	command := append(append([]string{"env"}, environment...), "timeout", "120")
	command = append(command, strings.Fields(words)...)
	switch {
	case strings.HasPrefix(words, "ibv_"):
		command = append(command, "-d", device, "-g", gid)
	case strings.HasPrefix(words, "ib_"):
		command = append(command, "-d", device, "-x", gid)
	}
	return command
}

// awaitListener waits until a program listens by TCP.
func (b *pairBed) awaitListener(t testing.TB, soft bool, server string) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		run := func() ([]byte, error) { return exec.Command("ss", "-tlnH").CombinedOutput() }
		if soft {
			run = func() ([]byte, error) { return b.host.Output("ss", "-tlnH") }
		}
		out, err := run()
		if err == nil && !strings.Contains(string(out), "LISTEN") {
			err = fmt.Errorf("%s does not listen", server)
		}
		return err
	})
}

// play runs a program that listens on one of the devices, and its peer on the other one. Both must succeed.
func (b *pairBed) play(t testing.TB, softListens, six bool, server, client string) error {
	t.Helper()
	var logs [2]strings.Builder
	start := func(soft bool, words string, log *strings.Builder) *exec.Cmd {
		args := b.command(soft, six, words)
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = log, log
		begin := cmd.Start
		var err error
		if soft {
			err = b.host.Do(begin)
		} else {
			err = begin()
		}
		if err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	listener := start(softListens, server, &logs[0])
	b.awaitListener(t, softListens, server)
	peer := start(!softListens, client, &logs[1])
	errs := [2]error{1: peer.Wait()}
	if errs[1] != nil {
		if err := listener.Process.Signal(unix.SIGTERM); err != nil { // timeout passes it on
			t.Log(err)
		}
	}
	errs[0] = listener.Wait()
	all := logs[0].String() + "\n---\n" + logs[1].String()
	if errs[0] == nil && errs[1] == nil {
		return nil
	}
	return fmt.Errorf("%s: %w\n%s: %w\n%s", server, errs[0], client, errs[1], all)
}

// TestSoftDevice runs Debian's programs between fared_soft0 and rdma_rxe, with each of them as the server, and checks
// every packet of both against the specification.
func TestSoftDevice(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	b := newPairBed(t)
	capture := filepath.Join(t.TempDir(), "packets.pcap")
	tcpdump := b.host.Start(t, "tcpdump", "-i", "eth0", "-Z", "root", "-B", "32768", "-U", "-w", capture, "udp", "port", "4791")
	tcpdump.AwaitText(t, "listening")
	for _, program := range []struct {
		server string
		six    bool // the device's addresses are those of IPv6
	}{
		{"ib_write_bw -n 50 -s 5000", false},
		{"ib_send_lat -n 50", false},
		{"ib_read_bw -n 50 -s 5000", false},
		{"ib_atomic_lat -n 50", false},
		{"ibv_ud_pingpong -c -n 50 -s 1000", false},
		{"ucx_perftest -t tag_lat -n 50 -w 5", false},
		{"ib_write_bw -n 50 -s 5000", true},
		{"ibv_ud_pingpong -c -n 50 -s 1000", true},
		{"ucx_perftest -t tag_lat -n 50 -w 5", true},
	} {
		for _, soft := range []bool{true, false} {
			name := strings.ReplaceAll(program.server, " ", "_") + map[bool]string{true: "_over_IPv6"}[program.six] + map[bool]string{true: "/to fared_soft0", false: "/to rdma_rxe"}[soft]
			t.Run(name, func(t *testing.T) {
				server := program.server + " -p " + fmt.Sprint(20000+rand.IntN(20000))
				client := server + " " + map[bool]string{true: softAddress, false: rxeAddress}[soft]
				err := b.play(t, soft, program.six, server, client)
				for i := 0; i < 3 && err != nil && strings.Contains(err.Error(), "Correlation coefficient"); i++ {
					err = b.play(t, soft, program.six, server, client) // perftest could not measure the emulated processor's clock
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
	tcpdump.Stop()
	out, err := exec.Command("python3", "-B", "../../lib/softdev/tests/check_icrc.py", capture, rxeAddress, rxeAddress6).CombinedOutput()
	t.Log(string(out))
	if err != nil {
		t.Error(err)
	}
}

// TestSoftDeviceConnectionManager connects by rdma_cm from an address of fared_soft0 where the kernel has a device with
// another one: the kernel refuses it.
func TestSoftDeviceConnectionManager(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	b := newPairBed(t)
	for program, want := range map[string]string{
		"rping -s -a " + softAddress: "rdma_bind_addr: No such device",
		"rping -c -a " + rxeAddress:  "RDMA_CM_EVENT_ADDR_ERROR, error -19", // ENODEV
	} {
		c := b.command(true, false, program)
		if _, err := b.host.Output(c[0], c[1:]...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s ends without %q: %v", program, want, err)
		}
	}
}
