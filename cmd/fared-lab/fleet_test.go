package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/topo"
)

// TestFleet runs a worker, reports half a cable of a server without a carrier, and asks with every command.
func TestFleet(t *testing.T) {
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	t.Setenv("FARED_FLEET", address)
	if text := refused(t, cli.ExitUnreachable, "fleet", "status"); !strings.Contains(text, "fared fleet worker") {
		t.Errorf("without a worker: %s", text)
	}
	file := filepath.Join(t.TempDir(), "fabric.yaml")
	if err := os.WriteFile(file, []byte("planes: 2\nservers: 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, "fleet", "worker", file, "--listen", address)
	within(t, generous, func() error {
		if o := fared(t, "fleet", "status"); o.Code != 0 {
			return fmt.Errorf("exit %d: %s", o.Code, o.Err)
		}
		return nil
	})
	f, err := topo.New(topo.Spec{Planes: 2, Servers: 3})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := fleetv1.NewFleetServiceClient(conn).Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m := &fleetv1.ReportRequest{RouterId: f.Server[1].ID.String(), ConnectionNs: 1, Revision: 1, Ports: &fleetv1.Ports{}, Paths: &fleetv1.Paths{
		Planes: []string{"p0", "p1"}, Paths: []*fleetv1.Path{{Source: "10.255.0.2", Destinations: []*fleetv1.Range{{First: "10.255.0.1", Count: 1}}, BandwidthBps: []uint64{8e11, 4e11}}},
	}}
	for i, c := range f.At(f.Server[1]) {
		m.Ports.Ports = append(m.Ports.Ports, &fleetv1.Port{Device: c.Down.Device, State: []string{"up", "up", "up", "dark"}[i], SinceNs: 1e18})
	}
	if err := stream.Send(m); err != nil {
		t.Fatal(err)
	}
	var fleet struct {
		Faults []struct {
			Part, Kind, Fault string
		}
	}
	within(t, generous, func() error {
		if err := json.Unmarshal([]byte(must(t, "fleet", "faults", "-o", "json")), &fleet); err != nil {
			return err
		}
		if len(fleet.Faults) != 1 || fleet.Faults[0].Part != "server2/p1.1" || fleet.Faults[0].Kind != "half-cable" || fleet.Faults[0].Fault != "dark" {
			return fmt.Errorf("faults %+v", fleet.Faults)
		}
		return nil
	})
	for command, want := range map[string]string{
		"fleet faults":                "server2/p1.1  half-cable  dark   99 %",
		"fleet status":                "Without a report: server1 server3",
		"fleet top":                   "server2  server1  2       1.2T",
		"fleet whatif leaf0":          "leaf0   1: 6",
		"fleet whatif --all-single":   "server1/p1    1: 4, 2: 2       server2 83.33 %   0           2",
		"fleet whatif --all-double":   "leaf0 leaf1",
		"fleet whatif drain:leaf0":    "Present failures and drains: server2/p1.1",
		"fleet top --count 1 -o yaml": "bandwidth_bps",
	} {
		if out := must(t, strings.Fields(command)...); !strings.Contains(out, want) {
			t.Errorf("fared %s prints no %q:\n%s", command, want, out)
		}
	}
	for _, command := range []string{"fleet drain leaf0", "fleet undrain leaf0", "fleet drains"} {
		if text := refused(t, cli.ExitFailed, strings.Fields(command)...); !strings.Contains(text, "--etcd") {
			t.Errorf("fared %s without etcd: %s", command, text)
		}
	}
	for _, command := range []string{"fleet drain", "fleet drain leaf0 --until yesterday", "fleet worker " + file + " --keep-planes 3", "fleet worker " + file + " --keep-planes -1", "fleet worker " + file + " --keep-share NaN", "fleet worker " + file + " --etcd etcd1:2379",
		"fleet worker " + file + " --peer fleet2", "fleet status --worker fleet1", "fleet whatif leaf7", "fleet whatif", "fleet whatif leaf1 leaf0 leaf1", "fleet top --count 2000", "fleet fault", "fleet worker " + file + " --listen nonsense", "fleet worker " + file + " --listen 127.0.0.1:nonsense", "fleet worker " + file + " --metrics-listen nonsense", "fleet worker " + file + " --listen 0.0.0.0:0", "fleet worker " + file + " --configmap drains", "fleet worker " + file + " --configmap fared/drains", "fleet worker " + file + " --page 0.0.0.0:0"} {
		refused(t, cli.ExitUsage, strings.Fields(command)...)
	}
}

// TestFleetTLS asks a worker with certificates: without one it does not answer.
func TestFleetTLS(t *testing.T) {
	cert, key := clitest.Certificate(t)
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	refused(t, cli.ExitUsage, "fleet", "worker", "--listen", "0.0.0.0:0")
	secure := func(certificate string) {
		t.Setenv("FARED_TLS_CERT", certificate)
		t.Setenv("FARED_TLS_KEY", key)
		t.Setenv("FARED_TLS_CA", cert)
	}
	secure(cert)
	start(t, "fleet", "worker", "--planes", "2", "--servers", "2", "--listen", address)
	within(t, generous, func() error {
		if o := fared(t, "fleet", "status", "--worker", address); o.Code != 0 {
			return fmt.Errorf("exit %d: %s", o.Code, o.Err)
		}
		return nil
	})
	secure("")
	if text := refused(t, cli.ExitUnreachable, "fleet", "status", "--worker", address); !strings.Contains(text, "FARED_TLS_CERT") {
		t.Errorf("without a certificate: %s", text)
	}
}

// TestFleetDrains drains a leaf with the real etcd: a second leaf is refused, and the drain is listed until its end.
func TestFleetDrains(t *testing.T) {
	gate.Slow(t, gate.Models, "starts etcd")
	netnstest.Require(t, "etcd")
	folder := t.TempDir()
	etcd := exec.CommandContext(t.Context(), "etcd", "--data-dir", folder, "--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	if err := etcd.Start(); err != nil {
		t.Fatal(err)
	}
	defer etcd.Wait()
	defer etcd.Process.Kill()
	start(t, "fleet", "worker", "--planes", "3", "--servers", "2", "--listen", "127.0.0.1:4798", "--etcd", "http://127.0.0.1:2379")
	within(t, generous, func() error {
		if o := fared(t, "fleet", "drains"); o.Code != 0 {
			return fmt.Errorf("exit %d: %s", o.Code, o.Err)
		}
		return nil
	})
	must(t, "fleet", "drain", "leaf1", "--reason", "optics", "--until", "2h")
	if text := refused(t, cli.ExitFailed, "fleet", "drain", "leaf2"); !strings.Contains(text, "2 pairs would fall below 2 planes: ") || !strings.Contains(text, "whatif drain:PART") {
		t.Errorf("the second leaf: %s", text)
	}
	if out := must(t, "fleet", "drains"); !strings.Contains(out, "leaf1  0 of 4") || !strings.Contains(out, "optics") || !strings.Contains(out, caller()) {
		t.Errorf("drains:\n%s", out)
	}
	if out := must(t, "fleet", "drain", "leaf2", "--queue"); !strings.Contains(out, "leaf2: queued: 2 pairs") {
		t.Errorf("the queued leaf: %s", out)
	}
	if out := must(t, "fleet", "drain", "leaf2", "--queue", "-o", "json"); !strings.Contains(out, `"queued": true`) {
		t.Errorf("the queued leaf in JSON: %s", out)
	}
	must(t, "fleet", "undrain", "leaf1")
	refused(t, cli.ExitNotFound, "fleet", "undrain", "leaf1")
	within(t, generous, func() error {
		if out := must(t, "fleet", "drains"); !strings.Contains(out, "leaf2  0 of 4") {
			return fmt.Errorf("drains:\n%s", out)
		}
		return nil
	})
	etcd.Process.Kill()
	within(t, generous, func() error {
		o := fared(t, "fleet", "drain", "leaf0")
		if o.Code != cli.ExitFailed || !strings.Contains(o.Err, "granted drains stay in force") {
			return fmt.Errorf("without etcd: exit %d, %s", o.Code, o.Err)
		}
		return nil
	})
}
