package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/internal/testkit/testbed"
)

// agentProcess is a process of `fared dataplane`, and a connection to it.
type agentProcess struct {
	*clitest.Process
	socket string
	conn   *grpc.ClientConn
}

// startAgent starts an agent in a directory and waits until it answers.
func startAgent(t *testing.T, dir string, args ...string) *agentProcess {
	t.Helper()
	a := &agentProcess{socket: filepath.Join(dir, "dataplane.sock")}
	a.Process = start(t, append([]string{"dataplane", "--driver", "memory", "--socket", a.socket}, args...)...)
	a.conn = testbed.Dial(t, a.socket)
	testbed.Answers(t, a.conn, a.Running)
	return a
}

func (a *agentProcess) hello(t *testing.T, forwarding *farev1.Forwarding) {
	t.Helper()
	if _, err := farev1.NewDataplaneServiceClient(a.conn).Hello(t.Context(), &farev1.HelloRequest{Forwarding: forwarding}); err != nil {
		t.Fatal(err)
	}
}

// program sends operations and requires that all are in effect.
func (a *agentProcess) program(t *testing.T, operations ...*farev1.Operation) {
	t.Helper()
	stream := testbed.OpenStream(t, a.conn)
	stream.Request(operations...)
	if refused := stream.Finish(); len(refused) > 0 {
		t.Fatalf("refused: %v", refused)
	}
}

func (a *agentProcess) snapshot(t *testing.T) *farev1.SnapshotResponse {
	t.Helper()
	return testbed.Snapshot(t, a.conn, grpc.WaitForReady(true))
}

func setGroup(id uint32, members ...*farev1.VectorMember) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: id, Members: members}}}
}

func setDestination(prefix string, group uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix, Vector: group}}}
}

func someState() []*farev1.Operation {
	return []*farev1.Operation{
		setGroup(1, &farev1.VectorMember{Plane: "p0", Device: "dp0a", Weight: 2}, &farev1.VectorMember{Plane: "p1", Device: "dp1a", Weight: 1}),
		setGroup(2),
		setDestination("10.255.0.2/32", 1), setDestination("2001:db8::2/128", 1), setDestination("10.255.0.3/32", 2),
		{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "dp1a"}}},
	}
}

func TestDataplaneShow(t *testing.T) {
	a := startAgent(t, testbed.ShortDir(t))
	forwarding := dptest.DefaultForwarding()
	a.hello(t, forwarding)
	a.program(t, someState()...)
	table := must(t, "dataplane", "show", "--socket", a.socket)
	for _, want := range []string{
		"data plane    memory ", "health        SERVING\n", "capabilities  IPv6, per-packet, confirms in effect\n",
		"dp1a      down\n", "dp0a      up\n",
		"GROUP  DESTINATIONS  SLOTS  WEIGHTS\n1      2             0      dp0a 2, dp1a 1\n2      1             0      unreachable: packets are dropped\n",
		"10.255.0.2/32    1      0\n",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
	json := must(t, "dataplane", "show", "--socket", a.socket, "-o", "json")
	for _, want := range []string{"{\n  \"health\": \"SERVING\",\n  \"name\": \"memory\",", `"per_packet": true`, `"prefix": "2001:db8::2/128"`, `"weight": 2`} {
		if !strings.Contains(json, want) {
			t.Errorf("no %q in\n%s", want, json)
		}
	}
	must(t, "dataplane", "show", "--socket", a.socket, "-o", "yaml")
	if o := fared(t, "__complete", "dataplane", "counters", "--socket", a.socket, "--destination", ""); !strings.HasPrefix(o.Out, "10.255.0.2/32\n10.255.0.3/32\n2001:db8::2/128\n") {
		t.Errorf("completes %q", o.Out)
	}
	if text := refused(t, cli.ExitFailed, "dataplane", "counters", "--socket", a.socket); !strings.Contains(text, "has no counters") {
		t.Error(text)
	}
}

// counting is a data plane with counters.
type counting struct {
	farev1.UnimplementedDataplaneServiceServer
}

func (counting) Counters(r *farev1.CountersRequest, stream grpc.ServerStreamingServer[farev1.CountersResponse]) error {
	if err := stream.Send(&farev1.CountersResponse{SubPorts: []*farev1.SubPortCounters{{Plane: "p0", Device: "p0.0", Packets: 7, Bytes: 7000}}}); err != nil {
		return err
	}
	return stream.Send(&farev1.CountersResponse{Slots: []*farev1.SlotCounters{{Source: "10.255.0.1/32", Destination: r.Destination, Slot: 3, Packets: 5, Bytes: 5000, DivertedPackets: 1}}})
}

func TestDataplaneCounters(t *testing.T) {
	socket := filepath.Join(testbed.ShortDir(t), "s")
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) { farev1.RegisterDataplaneServiceServer(s, counting{}) })
	want := "SUB-PORT  PLANE  PACKETS  BYTES\np0.0      p0     7        7000\n\n" +
		"SOURCE         DESTINATION    SLOT  PACKETS  BYTES  DIVERTED\n10.255.0.1/32  10.255.0.2/32  3     5        5000   1\n"
	if got := must(t, "dataplane", "counters", "--socket", socket, "--destination", "10.255.0.2"); got != want {
		t.Errorf("prints\n%s, want\n%s", got, want)
	}
	if got := must(t, "dataplane", "counters", "--socket", socket, "-o", "json"); !strings.Contains(got, `"diverted_packets": 1`) {
		t.Errorf("prints %s", got)
	}
	if text := refused(t, cli.ExitFailed, "dataplane", "show", "--socket", socket); !strings.Contains(text, "not implemented") {
		t.Error(text)
	}
}

// attached is an agent with attachments.
type attached struct {
	farev1.UnimplementedAttachServiceServer
}

func (attached) ListAttachments(context.Context, *farev1.ListAttachmentsRequest) (*farev1.ListAttachmentsResponse, error) {
	return &farev1.ListAttachmentsResponse{Attachments: []*farev1.Attachment{
		{Id: "a", NetnsPath: "/run/netns/a", InEffect: true, Destinations: 2, Addresses: []string{"10.255.7.1/32"}, Devices: []*farev1.AttachDevice{{Device: "net1", SubPort: "eth0"}, {Device: "net2", SubPort: "eth1"}}},
		{Id: "b", NetnsPath: "/proc/7/ns/net"},
		{Id: "c", NetnsPath: "/run/netns/c", Error: "no device of the namespace has a sub-port of the host: name the devices"},
	}}, nil
}

func TestDataplanePods(t *testing.T) {
	socket := filepath.Join(testbed.ShortDir(t), "s")
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) { farev1.RegisterAttachServiceServer(s, attached{}) })
	want := "" +
		"POD  NAMESPACE       DEVICES                     ADDRESSES      DESTINATIONS  STATE\n" +
		"a    /run/netns/a    net1 as eth0, net2 as eth1  10.255.7.1/32  2             in effect\n" +
		"b    /proc/7/ns/net  -                           -              0             waiting\n" +
		"c    /run/netns/c    -                           -              0             no device of the namespace has a sub-port of the host: name the devices\n"
	if got := must(t, "dataplane", "pods", "--socket", socket); got != want {
		t.Errorf("prints\n%s, want\n%s", got, want)
	}
	if got := must(t, "dataplane", "pods", "--socket", socket, "-o", "json"); !strings.Contains(got, `"sub_port": "eth1"`) {
		t.Errorf("prints %s", got)
	}
}

func TestDataplaneUsage(t *testing.T) {
	dir := testbed.ShortDir(t)
	unserved := filepath.Join(dir, "unserved")
	for _, c := range []struct {
		code int
		want string
		args string
	}{
		{cli.ExitUsage, "--driver", "--driver ebpf"},
		{cli.ExitUsage, "--socket-mode", "--socket-mode 0999"},
		{cli.ExitUsage, "--socket-mode", "--socket-mode 17777"},
		{cli.ExitUsage, "--log-level", "--log-level loud"},
		{cli.ExitUsage, "--log-format", "--log-format xml"},
		{cli.ExitUsage, "--socket or --listen", "--socket="},
		{cli.ExitUsage, "together", "--tls-cert x"},
		{cli.ExitUsage, "--tls-client is given without TLS", "--listen 127.0.0.1:0 --tls-client fared"},
		{cli.ExitUsage, "PEM files", "--listen 127.0.0.1:0 --tls-cert x --tls-key y --tls-client-ca z"},
		{cli.ExitUsage, "takes no arguments", "now"},
		{cli.ExitUsage, "unknown flag", "--dirver bpf"},
		{cli.ExitFailed, "fared: --tls-cert, --tls-key, --tls-client-ca: missing, and 0.0.0.0:0 is reachable from other hosts", "--driver memory --listen 0.0.0.0:0"},
		{cli.ExitFailed, "fared: --listen: listen tcp", "--driver memory --listen 127.0.0.1:no-port"},
		{cli.ExitFailed, "fared: --metrics-listen: listen tcp", "--driver memory --metrics-listen 127.0.0.1:no-port"},
		{cli.ExitFailed, "fared: --socket: " + dir + " exists and is not a socket", "--driver memory --journal none --socket " + dir},
		{cli.ExitFailed, "fared: --socket: " + dir + " exists and is not a socket", "--driver memory --journal none --flush --socket " + dir},
		{cli.ExitFailed, "no-such-owner", "--driver memory --socket-owner no-such-owner"},
		{cli.ExitUnreachable, "no data plane answers at " + unserved, "show"},
		{cli.ExitUnreachable, "is the agent running", "counters"},
	} {
		args := append([]string{"dataplane", "--socket", unserved}, strings.Fields(c.args)...)
		if text := refused(t, c.code, args...); !strings.Contains(text, c.want) {
			t.Errorf("fared %v: no %q in\n%s", args, c.want, text)
		}
	}
}

// TestDataplaneFlags checks that each field of an agent.FieldError is translated into an existing flag, and that other
// errors stay.
func TestDataplaneFlags(t *testing.T) {
	flags := dataplaneCommand(&cli.Env{})
	for field, text := range dataplaneFlags {
		for _, flag := range strings.Split(text, ", ") {
			name := strings.TrimPrefix(flag, "--")
			if flags.Flags().Lookup(name) == nil && flags.PersistentFlags().Lookup(name) == nil {
				t.Errorf("%s: no flag %s", field, flag)
			}
		}
		err := fmt.Errorf("start: %w", &agent.FieldError{Field: field, Err: os.ErrExist})
		if got, want := nameFlags(err).Error(), "start: "+text+": file already exists"; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := nameFlags(os.ErrExist); got != os.ErrExist {
		t.Errorf("%v, want %v", got, os.ErrExist)
	}
}

// TestDataplaneKilled checks that an agent that is killed and started again keeps its promised state, and that an
// orderly end removes the socket.
func TestDataplaneKilled(t *testing.T) {
	dir := testbed.ShortDir(t)
	a := startAgent(t, dir)
	forwarding := dptest.DefaultForwarding()
	a.hello(t, forwarding)
	a.program(t, someState()...)
	want := a.snapshot(t)
	for range 3 {
		if code := a.End(t, syscall.SIGKILL); code != -1 {
			t.Fatalf("exit %d", code)
		}
		a = startAgent(t, dir)
		if got := a.snapshot(t); !proto.Equal(got, want) {
			t.Fatalf("after the restart %v, want %v", got, want)
		}
	}
	if code := a.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("exit %d, want 0", code)
	}
	if _, err := os.Stat(a.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	journal := filepath.Join(dir, "dataplane.journal")
	if info, err := os.Stat(journal); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("journal: %v, %v; want mode 0600", info, err)
	}

	// Damage is reported, and the file kept.
	if err := os.WriteFile(journal, []byte(strings.Repeat("damage", 10)), 0o600); err != nil {
		t.Fatal(err)
	}
	a = startAgent(t, dir)
	if got := a.snapshot(t); len(got.Vectors) > 0 {
		t.Errorf("restored %v", got)
	}
	aside, err := filepath.Glob(journal + ".damaged-*")
	if err != nil || len(aside) != 1 || !strings.Contains(a.Log.String(), aside[0]) {
		t.Errorf("set aside %v, %v; log\n%s", aside, err, &a.Log)
	}
}

// TestDataplaneAlone checks that a second agent, and a flush, do not disturb a running agent.
func TestDataplaneAlone(t *testing.T) {
	dir := testbed.ShortDir(t)
	a := startAgent(t, dir, "--socket-mode", "0600", "--socket-owner", fmt.Sprint(os.Getuid()))
	if info, err := os.Stat(a.socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v; want mode 0600", info, err)
	}
	other := filepath.Join(dir, "other.sock")
	for _, args := range [][]string{
		{"dataplane", "--driver", "memory", "--socket", a.socket},
		{"dataplane", "--driver", "memory", "--socket", "unix:" + a.socket},
		{"dataplane", "--driver", "memory", "--socket", other}, // the same journal
		{"dataplane", "--driver", "memory", "--socket", a.socket, "--flush"},
	} {
		if text := refused(t, cli.ExitFailed, args...); !strings.Contains(text, dir) || !strings.Contains(text, "describes the running agent") {
			t.Errorf("fared %v:\n%s", args, text)
		}
	}
	if err := a.Running(); err != nil {
		t.Error(err)
	}
	a.End(t, syscall.SIGTERM)
	journal := filepath.Join(dir, "dataplane.journal")
	out := must(t, "dataplane", "--driver", "memory", "--socket", a.socket, "--flush")
	if _, err := os.Stat(journal); !errors.Is(err, os.ErrNotExist) || !strings.Contains(out, "journal "+journal+"\n") {
		t.Errorf("after the flush: %v; printed\n%s", err, out)
	}
	if _, err := os.Stat(a.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the flush leaves a socket: %v", err)
	}
}

// TestDataplaneSocketFlag checks that the agent's default socket differs from the daemon's.
func TestDataplaneSocketFlag(t *testing.T) {
	for _, words := range []string{"dataplane", "dataplane show", "dataplane counters", "dataplane pods"} {
		help := must(t, append(strings.Fields(words), "--help")...)
		if strings.Count(help, "--socket ") != 1 || !strings.Contains(help, defaultDataplane) {
			t.Errorf("fared %s --help:\n%s", words, help)
		}
	}
	e := &cli.Env{Patience: time.Second}
	o := &dataplaneOptions{}
	o.config.Socket = defaultDataplane
	conn, err := dialDataplane(e, o)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if e.Socket != defaultDataplane {
		t.Errorf("dials %s", e.Socket)
	}
}
