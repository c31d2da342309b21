package interop

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/plainjson"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// fared is a running daemon of a server.
type fared struct {
	*netnstest.Process
	binary string
	socket string
	config string
}

// again starts the daemon another time with the files that the last process left.
func (d *fared) again(t *testing.T, s *server) {
	t.Helper()
	d.Process = s.ns.Start(t, d.binary, "run", "--config", d.config)
}

func startFared(t *testing.T, f *fabric, s *server) *fared {
	t.Helper()
	dir := testbed.ShortDir(t)
	d := &fared{binary: binary.Fared(t), socket: filepath.Join(dir, "fared.sock")}
	dataplane := `address: "memory:"`
	switch {
	case f.opt.inside:
		dataplane = fmt.Sprintf(`address: "inside:", flags: [--%s]`, strings.Join(insideFlags(t, f, s), ", --"))
	case f.opt.driver != "":
		dataplane = fmt.Sprintf("address: %q", "unix:"+startDataplane(t, f, s, dir))
	}
	for _, a := range f.opt.auth {
		for _, k := range a.keys {
			writeSecret(t, filepath.Join(dir, k.file()), k.secret)
		}
	}
	d.config = writeFile(t, dir, "fared.yaml", faredConfig(f, s, dataplane, d.socket))
	if out, err := exec.Command(d.binary, "check", "--config", d.config).CombinedOutput(); err != nil {
		t.Fatalf("fared check: %v\n%s", err, out)
	}
	d.again(t, s)
	return d
}

// startDataplane starts the server's data plane, and returns its socket.
func startDataplane(t *testing.T, f *fabric, s *server, dir string) string {
	t.Helper()
	socket := filepath.Join(dir, "dataplane.sock")
	args := []string{"dataplane", "--driver", f.opt.driver, "--socket", socket, "--pin-dir", "/sys/fs/bpf/" + s.ns.Name}
	s.ns.SetApart()
	p := s.ns.Start(t, binary.Fared(t), args...)
	t.Cleanup(func() {
		p.Stop()
		// Pinned objects outlive the namespace.
		testbed.Flush(t, s.ns, args[1:]...)
	})
	return socket
}

// insideFlags returns the flags of an agent in the daemon's process, without their dashes.
func insideFlags(t *testing.T, f *fabric, s *server) []string {
	t.Helper()
	first := s.dir == ""
	if first {
		s.dir = testbed.ShortDir(t)
		s.ns.SetApart()
	}
	flags := []string{"driver=" + f.opt.driver, "socket=" + filepath.Join(s.dir, "dataplane.sock"), "pin-dir=/sys/fs/bpf/" + s.ns.Name}
	if first {
		t.Cleanup(func() {
			s.fared.Stop()
			// Pinned objects outlive the namespace.
			var args []string
			for _, flag := range flags {
				args = append(args, "--"+flag)
			}
			testbed.Flush(t, s.ns, args...)
		})
	}
	return flags
}

func faredConfig(f *fabric, s *server, dataplane, socket string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("role: server\nas: %d\nrouter_id: %s", s.as, s.loopbacks[0].Addr())
	line("loopbacks: [%q, %q]", s.loopbacks[0], s.loopbacks[1])
	line(`accept: ["10.255.0.0/16", "fd00:255::/64"]`)
	line("bgp: {hold_time: %s, keepalive_interval: 1s, connect_retry: 200ms, restart_time: %s, allow_own_as: %d}%s", holdTime(f.opt.bfd), f.opt.restart, f.opt.allowOwnAS, faredBFD(f.opt.bfd, f.opt.auth[0]))
	var keys []string
	for _, k := range [][2]string{{"advertise", f.opt.advertise}, {"missing", f.opt.missing}} {
		if k[1] != "" {
			keys = append(keys, k[0]+": "+k[1])
		}
	}
	line("path_bandwidth: {%s}", cmp.Or(f.opt.pathBandwidth, strings.Join(keys, ", ")))
	if f.opt.metrics {
		line("metrics: {listen: 127.0.0.1:9469}")
	}
	line("weights: {slots: %d}", slots)
	line("proof: {services: false}") // tests count each packet of a slot's port
	line("dataplane: {%s}\napi: {socket: %q}\nstart: {deadline: %s}\ndrain_delay: 1s\nplanes:", dataplane, socket, f.opt.deadline)
	for p := range planes {
		l := f.leafOf(p, s.index)
		line("- name: p%d\n  sub_ports:", p)
		for _, peer := range l.peers {
			if peer.server != s {
				continue
			}
			line("  - device: %s\n    speed: %s\n    sessions:", peer.farDevice, cmp.Or(f.opt.speed, "4G"))
			format := f.opt.auth[p].session(f.opt.auth[0])
			if l.uint32 {
				format += ", format: uint32"
			}
			if !f.opt.anyAS[p] {
				format = fmt.Sprintf(", peer_as: %d%s", l.outsideAS(), format)
			}
			if peer.unnumbered {
				line("    - {unnumbered: true%s}", format)
				continue
			}
			for _, a := range peer.local {
				line("    - {peer: %q%s}", a, format)
			}
		}
	}
	return b.String()
}

// destination is a destination in `fared weights -o json`, with the fields that tests
// use.
type destination struct {
	Destination string
	Reachable   bool
	Planes      []struct {
		Plane        string
		Weight       uint32
		BandwidthBps uint64 `json:"bandwidth_bps"`
		InEffect     bool   `json:"in_effect"`
		SubPorts     []struct {
			Device string
			Weight uint32
		} `json:"sub_ports"`
	}
	BandwidthIgnored string `json:"bandwidth_ignored"`
	Pairs            []struct {
		Slots []struct {
			Plane    string
			SubPort  string `json:"device"`
			Port     uint16 `json:"source_port"`
			SharePpb uint64 `json:"share_ppb"`
		}
		Placement string `json:"port_placement"`
	}
	Explanation struct {
		Routes []struct {
			Session       string
			Plane         string
			Device        string
			AdvertisedBps uint64 `json:"advertised_bps"`
			HasBandwidth  bool   `json:"has_bandwidth"`
			Reason        string
			Communities   []struct{ Raw, Meaning, Reason string }
		}
	}
}

// weights formats the planes' weights as "2:1".
func (d *destination) weights() string {
	var w []string
	for _, p := range d.Planes {
		w = append(w, fmt.Sprint(p.Weight))
	}
	return strings.Join(w, ":")
}

// ask runs a command that prints JSON.
func (d *fared) ask(into any, args ...string) error {
	if err := d.Running(); err != nil {
		return err
	}
	var stderr strings.Builder
	cmd := exec.Command(d.binary, append(args, "--socket", d.socket, "-o", "json")...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("fared %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("fared %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// call is ask over the API. Checks that wait for a state use it: a process of the command line takes a hundred times as
// long as the call.
func (d *fared) call(into any, method func(context.Context, *grpc.ClientConn) (proto.Message, error)) error {
	if err := d.Running(); err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix:"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	answer, err := method(ctx, conn)
	if err != nil {
		return err
	}
	return json.Unmarshal(plainjson.Append(nil, answer.ProtoReflect()), into)
}

// sessions gets the daemon's sessions.
func (d *fared) sessions(into any) error {
	return d.call(into, func(ctx context.Context, conn *grpc.ClientConn) (proto.Message, error) {
		return farev1.NewFabricServiceClient(conn).ListSessions(ctx, &farev1.ListSessionsRequest{})
	})
}

// status gets the daemon's status.
func (d *fared) status(into any) error {
	return d.call(into, func(ctx context.Context, conn *grpc.ClientConn) (proto.Message, error) {
		return farev1.NewFabricServiceClient(conn).GetStatus(ctx, &farev1.GetStatusRequest{})
	})
}

// toward returns the present state of a destination.
func (d *fared) toward(dst netip.Prefix) (*destination, error) {
	var answer struct{ Weights []*destination }
	if err := d.call(&answer, func(ctx context.Context, conn *grpc.ClientConn) (proto.Message, error) {
		return farev1.NewWeightServiceClient(conn).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{Destinations: []string{dst.String()}}})
	}); err != nil {
		return nil, err
	}
	if len(answer.Weights) != 1 || answer.Weights[0].Destination != dst.String() {
		return nil, fmt.Errorf("fared knows %d destinations at %s", len(answer.Weights), dst)
	}
	return answer.Weights[0], nil
}

// explain returns a destination with its explanation.
func (d *fared) explain(dst netip.Prefix) (*destination, error) {
	var answer struct{ Weights []*destination }
	if err := d.ask(&answer, "weights", "--destination", dst.String(), "--explain"); err != nil {
		return nil, err
	}
	if len(answer.Weights) != 1 || answer.Weights[0].Destination != dst.String() {
		return nil, fmt.Errorf("fared explains %+v, not %s", answer.Weights, dst)
	}
	return answer.Weights[0], nil
}

// do runs a command that changes state.
func (d *fared) do(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(d.binary, append(args, "--socket", d.socket)...).CombinedOutput(); err != nil {
		t.Fatalf("fared %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// carrier reports whether a sub-port has its carrier.
func (d *fared) carrier(device string) (bool, error) {
	var answer struct {
		Planes []struct {
			SubPorts []struct {
				Device  string
				Carrier bool
			} `json:"sub_ports"`
		}
	}
	if err := d.call(&answer, func(ctx context.Context, conn *grpc.ClientConn) (proto.Message, error) {
		return farev1.NewFabricServiceClient(conn).ListPlanes(ctx, &farev1.ListPlanesRequest{})
	}); err != nil {
		return false, err
	}
	for _, p := range answer.Planes {
		for _, sp := range p.SubPorts {
			if sp.Device == device {
				return sp.Carrier, nil
			}
		}
	}
	return false, fmt.Errorf("fared knows no sub-port %s", device)
}

// converged reports whether the daemon's start is over.
func (d *fared) converged() (bool, error) {
	var answer struct{ Converged bool }
	err := d.status(&answer)
	return answer.Converged, err
}

// within is the time limit for convergence on a busy machine.
const within = time.Minute

// up waits until every session is established, at both ends.
func (f *fabric) up() {
	f.t.Helper()
	took := netnstest.Eventually(f.t, within, func() error {
		for p := range planes {
			for _, l := range f.leaves[p] {
				n, err := f.opt.daemons[p].established(l)
				if err != nil {
					return err
				}
				if n != l.expect() {
					return fmt.Errorf("%s has %d sessions up, want %d", l.name, n, l.expect())
				}
			}
		}
		return nil
	})
	f.t.Logf("all sessions up: %v", took.Round(time.Millisecond))
}

// weigh waits until both servers split their traffic to each other as wanted, in both
// families, and have no fault of dropped routes.
func (f *fabric) weigh(when, want string) {
	f.t.Helper()
	took := netnstest.Eventually(f.t, within, func() error {
		var errs []error
		for _, s := range f.servers {
			if dropped, err := s.fared.dropped(); err != nil || len(dropped) > 0 {
				errs = append(errs, fmt.Errorf("server %d: dropped routes %q (%v)", s.index, dropped, err))
			}
			for _, dst := range f.servers[1-s.index].loopbacks {
				d, err := s.fared.toward(dst)
				if err == nil && (d.weights() != want || !d.Reachable) {
					err = fmt.Errorf("server %d has %s toward %s (reachable %v), want %s: %+v", s.index, d.weights(), dst, d.Reachable, want, d.Planes)
				}
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
	f.t.Logf("%s: %s after %v", when, want, took.Round(time.Millisecond))
}

// describe logs the routes of the servers to each other, and those of the leaves to them, if the test has failed.
func (f *fabric) describe() {
	if !f.t.Failed() {
		return
	}
	for _, s := range f.servers {
		for _, dst := range f.servers[1-s.index].loopbacks {
			d, err := s.fared.explain(dst)
			if err != nil {
				f.t.Logf("server %d toward %s: %v", s.index, dst, err)
				continue
			}
			f.t.Logf("server %d toward %s: %s by %+v", s.index, dst, d.weights(), d.Explanation.Routes)
		}
		for p := range planes {
			for _, l := range f.leaves[p] {
				for _, loopback := range s.loopbacks {
					paths, err := f.opt.daemons[p].paths(l, loopback)
					f.t.Logf("%s toward %s of server %d: %+v, %v", l.name, loopback, s.index, paths, err)
				}
			}
		}
	}
}
