package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/interop/transports/superppeer"
)

// startSuperpAgent starts 'fared superp-agent' at a loopback in a separate process, and returns the address of its API.
func startSuperpAgent(t *testing.T, address string, args ...string) (at string, p *clitest.Process) {
	t.Helper()
	at = "unix:" + filepath.Join(testbed.ShortDir(t), "agent.sock")
	p = start(t, append([]string{"superp-agent", "--address", address, "--listen", at, "--parameter", "udp_port=24449"}, args...)...)
	within(t, generous, func() error {
		if err := p.Running(); err != nil {
			return err
		}
		if !strings.Contains(p.Log.String(), "listens at") {
			return fmt.Errorf("the agent does not listen: %s", p.Log.String())
		}
		return nil
	})
	return at, p
}

// command runs a command line with standard input, and requires success.
func command(t *testing.T, input string, args ...string) string {
	t.Helper()
	var out, errOut bytes.Buffer
	if code := execute(t.Context(), args, strings.NewReader(input), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("fared %s: exit %d\n%s", strings.Join(args, " "), code, errOut.String())
	}
	return out.String()
}

func connectSuperp(t *testing.T, args ...string) (mesh superpMesh) {
	t.Helper()
	if err := json.Unmarshal([]byte(command(t, "", append([]string{"superp-agent", "connect", "-o", "json"}, args...)...)), &mesh); err != nil {
		t.Fatal(err)
	}
	return mesh
}

// end returns a node's end of a connection.
func (v *superpMesh) end(t *testing.T, node string, ordered bool) superpConnection {
	t.Helper()
	for _, x := range v.Connections {
		if x.Node == node && x.Ordered == ordered {
			return x
		}
	}
	t.Fatalf("node %s has no such connection: %+v", node, v)
	panic("unreachable")
}

// TestSuperpAgents connects two agents, each a process, by the commands of a connection manager, and exchanges data and
// messages of both kinds of connections between them.
func TestSuperpAgents(t *testing.T) {
	a, agent := startSuperpAgent(t, "127.86.1.1", "--slot", "p0=50001", "--slot", "p1=50002*3")
	b, _ := startSuperpAgent(t, "127.86.1.2", "--slot", "p0=50001", "--slot", "p1=50002*3")
	mesh := connectSuperp(t, "a="+a, "b="+b, "--connection", "unordered", "--connection", "ordered")
	memory := mesh.Nodes[1].Memory[0].Address
	for _, ordered := range []bool{false, true} {
		here, there := mesh.end(t, "a", ordered), mesh.end(t, "b", ordered)
		if here.LocalCID != there.RemoteCID || here.LocalKey != there.RemoteKey || here.LocalKey == 0 || here.LocalKey == here.RemoteKey {
			t.Errorf("ends of a connection: %+v, %+v", here, there)
		}
		cid, peer := fmt.Sprint(here.LocalCID), fmt.Sprint(there.LocalCID)
		text := strings.Repeat("some bytes, ", 3000)
		command(t, text, "superp-agent", "write", cid, memory, "--agent", a)
		if got := command(t, "", "superp-agent", "read", cid, memory, fmt.Sprint(len(text)), "--agent", a); got != text {
			t.Errorf("ordered %v: %d bytes are read, which differ from the %d written", ordered, len(got), len(text))
		}
		for _, message := range []string{"", "hello", text} {
			command(t, message, "superp-agent", "send", cid, "--agent", a)
			if got := command(t, "", "superp-agent", "receive", peer, "--agent", b); got != message {
				t.Errorf("ordered %v: a message of %d bytes arrives with %d", ordered, len(message), len(got))
			}
		}
		if e := refused(t, cli.ExitFailed, "superp-agent", "read", cid, "0x10", "8", "--agent", a); !strings.Contains(e, "remote access error") {
			t.Errorf("a read of other memory: %s", e)
		}
		if e := refused(t, cli.ExitFailed, "superp-agent", "receive", cid, "--agent", a, "--timeout", "50ms"); !strings.Contains(e, "no result within 50ms") {
			t.Errorf("no message: %s", e)
		}
	}
	shown := command(t, "", "superp-agent", "show", "--agent", a)
	for _, want := range []string{"127.86.1.1: generation", "started", "window 256", "p0     -       50001", "p1     -       50002"} {
		if !strings.Contains(shown, want) {
			t.Errorf("show has no %q:\n%s", want, shown)
		}
	}
	var st struct {
		Address     string
		Counters    map[string]uint64
		Connections []struct {
			Paths []struct {
				SentBytes uint64 `json:"sent_bytes"`
			}
		}
	}
	if err := json.Unmarshal([]byte(command(t, "", "superp-agent", "show", "--agent", a, "-o", "json")), &st); err != nil {
		t.Fatal(err)
	}
	if st.Address != "127.86.1.1" || st.Counters["packets_sent"] == 0 || len(st.Connections) != 2 {
		t.Errorf("show as JSON: %+v", st)
	}
	for _, c := range st.Connections {
		// How they divide the bytes is judged in transport/superp, in virtual time: on a busy machine a path may look
		// congested.
		if n := len(c.Paths); n == 2 && (c.Paths[0].SentBytes == 0 || c.Paths[1].SentBytes == 0) || n != 2 && n != 1 {
			t.Errorf("two paths that carry, or a single one: %+v", c.Paths)
		}
	}
	if e := refused(t, cli.ExitFailed, "superp-agent", "connect", "a="+a, "b="+b); !strings.Contains(e, "is configured: shut it down first") {
		t.Errorf("a second configuration: %s", e)
	}
	command(t, "x", "superp-agent", "write", fmt.Sprint(mesh.end(t, "a", true).LocalCID), memory, "--agent", a) // the first configuration is as before
	command(t, "", "superp-agent", "shutdown", a, b)
	if e := refused(t, cli.ExitNotFound, "superp-agent", "send", "1", "--agent", a); !strings.Contains(e, "no connection has the local cid 1") {
		t.Errorf("after the shutdown: %s", e)
	}
	if code := agent.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("the agent ends with %d", code)
	}
	refused(t, cli.ExitUnreachable, "superp-agent", "show", "--agent", a)
}

// TestSuperpAgentWithStranger connects an agent in a process with another implementation in this one, which gets its
// end from 'connect': cids, keys and the address of memory. Each reads and writes the other's memory and sends
// messages.
func TestSuperpAgentWithStranger(t *testing.T) {
	own, other := netip.MustParseAddrPort("127.86.2.2:24449"), netip.MustParseAddrPort("127.86.2.1:24449")
	a, _ := startSuperpAgent(t, other.Addr().String(), "--slot", "p0=50001", "--slot", "p1=50002", "--parameter", "pdl_window_size=32", "--parameter", "pdl_receive_win=32",
		"--parameter", "tal_trans_window=32", "--parameter", "packets_per_transaction=32")
	mesh := connectSuperp(t, "a="+a, "--peer", "nic="+own.Addr().String(), "--connection", "unordered:0xb8")
	end := mesh.end(t, "nic", false)
	if end.TrafficClass != 0xb8 {
		t.Errorf("the peer's end is %+v", end)
	}
	peer, err := superppeer.Open(superppeer.Config{Local: own, Remote: other, CID: uint16(end.LocalCID), RemoteCID: uint16(end.RemoteCID), Key: end.LocalKey, RemoteKey: end.RemoteKey,
		Window: 32, Transactions: 32, Payload: 1024, TrafficClass: 0xb8})
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	region := &superppeer.Region{Address: 0x7f0000001000, Bytes: make([]byte, 1<<16), Read: true, Write: true}
	peer.Register(region)
	data := bytes.Repeat([]byte("of the peer "), 2000)
	memory, err := strconv.ParseUint(mesh.Nodes[0].Memory[0].Address, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := peer.Write(memory+100, data); err != nil {
		t.Fatalf("write of the peer: %v", err)
	}
	if got, err := peer.Read(memory+100, len(data)); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read of the peer: %d bytes, %v", len(got), err)
	}
	cid := fmt.Sprint(end.RemoteCID)
	for _, message := range []string{"short", string(data)} {
		if err := peer.Send([]byte(message)); err != nil {
			t.Fatalf("message of the peer: %v", err)
		}
		if got := command(t, "", "superp-agent", "receive", cid, "--agent", a); got != message {
			t.Errorf("a message of %d bytes of the peer arrives with %d", len(message), len(got))
		}
	}
	text := strings.Repeat("of the agent ", 2000)
	command(t, text, "superp-agent", "write", cid, "0x7f0000001000", "--agent", a)
	if got := peer.Memory(region, 0, len(text)); string(got) != text {
		t.Error("the memory differs from what the agent has written")
	}
	if got := command(t, "", "superp-agent", "read", cid, "0x7f0000001000", fmt.Sprint(len(text)), "--agent", a); got != text {
		t.Error("the agent reads other bytes than it has written")
	}
	command(t, text, "superp-agent", "send", cid, "--agent", a)
	if all := peer.Messages(); len(all) != 1 || string(all[0]) != text {
		t.Errorf("%d messages of the agent arrive, or another one", len(all))
	}
	for i, kind := range superppeer.Misbehaviors {
		if err := peer.Misbehave(kind, memory); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		var st struct {
			Connections []struct {
				ProtocolErrors int `json:"protocol_errors"`
			}
			ProtocolErrors []struct {
				Number        int
				Kind          string
				LocalCID      uint32 `json:"local_cid"`
				RemoteAddress string `json:"remote_address"`
			} `json:"protocol_errors"`
		}
		within(t, generous, func() error {
			shown := command(t, "", "superp-agent", "show", "--agent", a, "-o", "json")
			if err := json.Unmarshal([]byte(shown), &st); err != nil {
				t.Fatal(err)
			}
			n := len(st.ProtocolErrors)
			if n != i+1 || st.ProtocolErrors[i].Kind != "SUPERP_PROTOCOL_ERROR_KIND_"+strings.ToUpper(kind) || st.ProtocolErrors[i].Number != n ||
				fmt.Sprint(st.ProtocolErrors[i].LocalCID) != cid || st.ProtocolErrors[i].RemoteAddress != own.Addr().String() || st.Connections[0].ProtocolErrors != n {
				return fmt.Errorf("%s: the agent reports %+v", kind, st)
			}
			return nil
		})
		if got, err := peer.Read(memory, 8); err != nil || bytes.Contains(got, []byte{1}) {
			t.Errorf("%s: memory is %v, %v", kind, got, err)
		}
	}
	if table := command(t, "", "superp-agent", "show", "--agent", a); !strings.Contains(table, "ack_psn") || !strings.Contains(table, "VIOLATIONS") {
		t.Errorf("show has no protocol errors:\n%s", table)
	}
	over := make(chan error, 1)
	go func() { over <- peer.Shutdown() }()
	command(t, "", "superp-agent", "shutdown", a)
	select {
	case err := <-over:
		if err != nil {
			t.Errorf("shutdown of the peer: %v", err)
		}
	case <-time.After(generous):
		t.Error("the peer's shutdown does not end")
	}
	if err := peer.Violations(); err != nil {
		t.Errorf("packets that violate the description: %v", err)
	}
}

// TestSuperpSupervise breaks the connection between two agents by stopping one of them, with 'connect --supervise' as
// their connection manager: it restarts the connection, which has the same cids, and nothing is written twice.
func TestSuperpSupervise(t *testing.T) {
	a, _ := startSuperpAgent(t, "127.86.3.1", "--slot", "p0=50001", "--parameter", "pdl_max_rtx=3")
	b, agent := startSuperpAgent(t, "127.86.3.2", "--slot", "p0=50001", "--parameter", "pdl_max_rtx=3")
	manager := start(t, "superp-agent", "connect", "a="+a, "b="+b, "--supervise", "-o", "json")
	var mesh superpMesh
	within(t, generous, func() error {
		out := manager.Log.String()
		end := strings.LastIndex(out, "\n}")
		if begin := strings.Index(out, "{"); begin < 0 || end < begin {
			return fmt.Errorf("no output: %s", out)
		} else if err := json.Unmarshal([]byte(out[begin:end+2]), &mesh); err != nil {
			return err
		}
		return nil
	})
	cid, memory := fmt.Sprint(mesh.end(t, "a", false).LocalCID), mesh.Nodes[1].Memory[0].Address
	command(t, "before", "superp-agent", "write", cid, memory, "--agent", a)
	command(t, "kept", "superp-agent", "send", cid, "--agent", a)
	if err := agent.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	within(t, generous, func() error { // its threads stop one after the other
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", agent.Cmd.Process.Pid))
		if err != nil {
			return err
		}
		for _, task := range tasks {
			if text, err := os.ReadFile(task); err != nil || !strings.Contains(string(text), ") T ") {
				return fmt.Errorf("%s: %s, %v", task, text, err)
			}
		}
		return nil
	})
	e := refused(t, cli.ExitFailed, "superp-agent", "write", cid, memory, "--agent", a)
	if err := agent.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(e, "retry exceeded") {
		t.Errorf("a write to an agent that does not run: %s", e)
	}
	within(t, generous, func() error {
		if log := manager.Log.String(); !strings.Contains(log, "a connection has failed") || !strings.Contains(log, "a connection was restarted") {
			return fmt.Errorf("the manager has not restarted the connection: %s", log)
		}
		return nil
	})
	command(t, "after!", "superp-agent", "write", cid, memory, "--agent", a)
	if got := command(t, "", "superp-agent", "read", cid, memory, "6", "--agent", a); got != "after!" {
		t.Errorf("memory is %q", got)
	}
	peer := fmt.Sprint(mesh.end(t, "b", false).LocalCID)
	if got := command(t, "", "superp-agent", "receive", peer, "--agent", b); got != "kept" {
		t.Errorf("the message of before is %q", got)
	}
	if code := manager.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("the manager ends with %d", code)
	}
	command(t, "x", "superp-agent", "write", cid, memory, "--agent", a)
}

// TestSuperpLite connects two agents over a cable between two namespaces by SUPERp-lite, in a traffic class. Nothing
// shorter than its blocks is accepted.
func TestSuperpLite(t *testing.T) {
	netnstest.Require(t)
	const device = "lite0"
	spaces := [2]*netnstest.Namespace{netnstest.New(t), netnstest.New(t)}
	addresses := [2]string{"10.98.0.1", "10.98.0.2"}
	netnstest.Veth(t, spaces[0], device, spaces[1], device)
	var agents [2]string
	for i, n := range spaces {
		n.IP("addr", "add", addresses[i]+"/32", "dev", "lo")
		n.IP("link", "set", device, "up")
		n.IP("route", "add", addresses[1-i]+"/32", "dev", device)
		n.Must(func() error {
			agents[i], _ = startSuperpAgent(t, addresses[i], "--slot", "p0=50001@"+device, "--superp-encapsulation", "sunh", "--superp-lite")
			return nil
		})
	}
	mesh := connectSuperp(t, "a="+agents[0], "b="+agents[1], "--connection", "ordered:0x48")
	cid, memory := fmt.Sprint(mesh.end(t, "a", true).LocalCID), mesh.Nodes[1].Memory[0].Address
	text := strings.Repeat("lite ", 12_000)
	command(t, text, "superp-agent", "write", cid, memory, "--agent", agents[0])
	for _, n := range []int{len(text), 100, 1} {
		if got := command(t, "", "superp-agent", "read", cid, memory, fmt.Sprint(n), "--agent", agents[0]); got != text[:n] {
			t.Errorf("a read of %d bytes returns %d, or others", n, len(got))
		}
	}
	command(t, text, "superp-agent", "send", cid, "--agent", agents[0])
	if got := command(t, "", "superp-agent", "receive", fmt.Sprint(mesh.end(t, "b", true).LocalCID), "--agent", agents[1]); got != text {
		t.Errorf("a message of %d bytes arrives with %d", len(text), len(got))
	}
	for _, x := range []struct {
		verb []string
		want string
	}{{[]string{"write", cid, memory}, "carries 16 or more"}, {[]string{"send", cid}, "carries 26 or more"}} {
		if e := refused(t, cli.ExitUsage, append(append([]string{"superp-agent"}, x.verb...), "--agent", agents[0])...); !strings.Contains(e, x.want) {
			t.Errorf("%v of nothing: %s", x.verb, e)
		}
	}
	if shown := command(t, "", "superp-agent", "show", "--agent", agents[0]); !strings.Contains(shown, "0x48") {
		t.Errorf("show has no class:\n%s", shown)
	}
	command(t, "", "superp-agent", "shutdown", agents[0], agents[1])
}
