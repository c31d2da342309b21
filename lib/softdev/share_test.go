package softdev

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// pair starts a transfer of messages between a process at each end, over a TCP port; both use the addresses of all
// other pairs.
func (e *ends) pair(t testing.TB, program string, port, messages int) [2]*netnstest.Process {
	t.Helper()
	words := []string{program, "fared_soft0", fmt.Sprint(port)}
	s := e.environment(serverAddress, words...)
	c := e.environment(clientAddress, append(words, serverAddress, "4", fmt.Sprint(messages), "20000")...)
	const timeout = 2 // words, of a program that a signal would end in place of the other one
	s, c = s[timeout:], c[timeout:]
	return [2]*netnstest.Process{e.server.Start(t, s[0], s[1:]...), e.client.Start(t, c[0], c[1:]...)}
}

// awaitPackets waits until n more packets have arrived at the server.
func (e *ends) awaitPackets(t testing.TB, n int) {
	t.Helper()
	count := func() int {
		var links []struct {
			Stats64 struct{ Rx struct{ Packets int } }
		}
		if err := json.Unmarshal([]byte(e.server.IP("-j", "-s", "link", "show", "dev", "eth0")), &links); err != nil || len(links) != 1 {
			t.Fatal(err)
		}
		return links[0].Stats64.Rx.Packets
	}
	before := count()
	netnstest.Eventually(t, time.Minute, func() error {
		if now := count(); now < before+n {
			return fmt.Errorf("%d packets have arrived, want %d", now-before, n)
		}
		return nil
	})
}

// TestProcessesShareAnAddress runs transfers of several processes between the same two addresses. Each one receives its
// own packets alone, also after the process that opened the port was killed, and one that begins then takes its place.
func TestProcessesShareAnAddress(t *testing.T) {
	gate.Needed(t, "programs with several processes")
	e := newEnds(t)
	program := compile(t, "traffic", "plain")
	const endless, messages = 10_000_000, 20
	first := e.pair(t, program, 7001, endless)
	e.awaitPackets(t, 100)
	second := e.pair(t, program, 7002, endless)
	finish(t, e.pair(t, program, 7003, messages), 4*messages)
	for _, p := range first {
		if err := p.Signal(unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		netnstest.Eventually(t, time.Minute, func() error {
			if p.Running() == nil {
				return fmt.Errorf("process %d runs", p.Pid())
			}
			return nil
		})
	}
	e.awaitPackets(t, 100)
	for _, port := range []int{7004, 7005} {
		finish(t, e.pair(t, program, port, messages), 4*messages)
	}
	for _, p := range second {
		if err := p.Running(); err != nil {
			t.Errorf("the second transfer has ended: %v\n%s", err, p.Log())
		}
	}
}

// TestPortTaken runs a program while a socket has the port at every address, as the kernel module rdma_rxe has it: one
// line names that and the way out. In another namespace the program runs meanwhile.
func TestPortTaken(t *testing.T) {
	e := alone(t)
	other := alone(t)
	program := compile(t, "program", "plain")
	e.server.Must(func() error {
		taken, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			t.Cleanup(func() { unix.Close(taken) })
			err = unix.Bind(taken, &unix.SockaddrInet4{Port: 4791})
		}
		return err
	})
	out, err := e.server.Output("env", "LD_PRELOAD="+e.library, "FARED_SOFT_ADDRESS=127.0.0.2,127.0.0.3", program, "fork", "1")
	text := fmt.Sprint(string(out), err) // the error has the standard error
	const reason = "fared_soft0: cannot receive at 127.0.0.2, UDP port 4791: the kernel module rdma_rxe, or a program of another kind or user, has the port. Run this program in another network namespace"
	if err == nil || strings.Count(text, reason) != 1 {
		t.Errorf("with a port that is taken: %s", text)
	}
	other.program(t, program, "fork", "1")
}

// TestHolderIsStopped runs a program at an address whose only other process is stopped: one line names that, in place
// of another reason.
func TestHolderIsStopped(t *testing.T) {
	gate.Slow(t, gate.C, "the program waits ten seconds for the other one")
	e := newEnds(t)
	server := e.pair(t, compile(t, "traffic", "plain"), 7001, 10_000_000)[0]
	e.awaitPackets(t, 100)
	if err := server.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	out, err := e.server.Output("env", "LD_PRELOAD="+e.library, "FARED_SOFT_ADDRESS="+serverAddress+",127.0.0.3", compile(t, "program", "plain"), "fork", "1")
	text := fmt.Sprint(string(out), err)
	reason := "fared_soft0: cannot receive at " + serverAddress + ", UDP port 4791: a process of fared_soft0 that has the address does not answer"
	if err == nil || strings.Count(text, reason) != 1 {
		t.Errorf("next to a process that is stopped: %s", text)
	}
}
