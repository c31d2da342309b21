package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
	verbs "github.com/fared/fared/traffic"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
)

// Transports lists the valid values of Options.Transport.
var Transports = []string{"none", "roce", "superp", "tcp"}

// steeredPorts holds the destination ports that servers steer for each transport. Source ports are chosen for the first
// steered port, so it must be the transport's.
var steeredPorts = map[string]struct{ udp, tcp []uint16 }{
	"roce":   {[]uint16{roce.DefaultPort}, nil},
	"superp": {[]uint16{superp.DefaultPort}, nil},
	"tcp":    {[]uint16{}, []uint16{tcpqp.Port}},
}

// steer makes servers steer a transport's port.
func steer(site *topo.Site, transport string) {
	if ports, ok := steeredPorts[transport]; ok {
		site.UDPPorts, site.TCPPorts = ports.udp, ports.tcp
	}
}

// validateTransport rejects a transport that this kind of lab does not support.
func (o Options) validateTransport() error {
	switch {
	case o.MemoryPlane != "" && (o.Transport == "" || o.Netns == nil):
		return backend.NewOptionError("{MemoryPlane} %s needs a fabric of network namespaces with a {Transport} for the other planes", o.MemoryPlane)
	case o.Transport == "":
		return nil
	case !slices.Contains(Transports, o.Transport):
		return backend.NewOptionError("{Transport} %q is not known: use %s", o.Transport, strings.Join(Transports, ", "))
	case !o.real():
		return backend.NewOptionError("{Transport} %s: a fabric in one process has no links to send over, use {Netns} or {Containerlab}", o.Transport)
	case o.MemoryPlane != "" && !o.hasPlane(o.MemoryPlane):
		return backend.NewOptionError("{MemoryPlane} %s: planes are p0 to p%d", o.MemoryPlane, o.Planes-1)
	case o.Containerlab != nil && o.Transport != "roce":
		return backend.NewOptionError("{Transport} %s: the servers of a fabric of containers steer only the port of roce, use {Netns}", o.Transport)
	}
	return nil
}

func (o Options) hasPlane(name string) bool {
	for p := range o.Planes {
		if name == fmt.Sprintf("p%d", p) {
			return true
		}
	}
	return false
}

// transfer is the queue pair traffic of a fabric: verified WRITEs from every loopback to every other.
type transfer struct {
	*topo.Fabric
	servers []verbs.Server
	conns   []*grpc.ClientConn
	before  uint64 // goodput of the last step with a transfer, and the rate that the cables allowed then, bit/s
	allowed uint64
}

// startTransfer starts every server's traffic node and waits until it responds. The transfer is valid with an error,
// too.
func startTransfer(ctx context.Context, f *topo.Fabric, h backend.Hosts) (*transfer, error) {
	t := &transfer{Fabric: f}
	for _, n := range f.Server {
		if err := h.StartTraffic(n); err != nil {
			return t, err
		}
		conn, err := grpc.NewClient("unix:"+h.TrafficSocket(n), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), grpc.WithConnectParams(backend.Impatient()), grpc.WithIdleTimeout(0))
		if err != nil {
			return t, err
		}
		t.conns = append(t.conns, conn)
		t.servers = append(t.servers, verbs.Server{Name: n.Name, Client: farev1.NewTrafficServiceClient(conn)})
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, s := range t.servers {
		if _, err := s.Client.DescribeTraffic(ctx, &farev1.DescribeTrafficRequest{}); err != nil {
			return t, errors.Join(ctx.Err(), fmt.Errorf("%s: its traffic node: %w", s.Name, err))
		}
	}
	return t, nil
}

func (t *transfer) close() {
	for _, c := range t.conns {
		c.Close()
	}
}

// Parameters of a run of a step's transfer. A pair has at most 512 KiB in transit, less than the queues of a slow cable
// hold when every server sends to one of them.
const (
	transferMessage  = 64 << 10
	transferDepth    = 8
	transferInterval = 50 * time.Millisecond
	// runTime is the duration of a run. A step whose weights take longer has several runs.
	runTime = 2 * time.Second
	// steadyTime is the minimum duration of the last run after all weights are in effect.
	steadyTime = time.Second
	// followTime is the time that transports have after that to find their rates.
	followTime = 100 * time.Millisecond
)

// config returns the configuration of a run of size bytes per pair, or of duration d.
func (t *transfer) config(size uint64, d time.Duration) verbs.Config {
	return verbs.Config{Op: "write", Message: transferMessage, Outstanding: transferDepth, Size: size, Duration: d, Interval: transferInterval, Seed: 1}
}

// transferRun is a completed run.
type transferRun struct {
	report *farev1.TrafficReport
	began  time.Time
}

// play plays a run; flowing, if not nil, is called once, when the first bytes have arrived.
func (t *transfer) play(ctx context.Context, cfg verbs.Config, flowing func()) (transferRun, error) {
	var r transferRun
	var err error
	r.report, err = verbs.Coordinate(ctx, cfg, t.servers, func(i *farev1.TrafficInterval) {
		// Nodes measure from their start and report later. The report with the least delay gives the best estimate of
		// the start.
		if at := time.Now().Add(-time.Duration(i.GetToNs())); r.began.IsZero() || at.Before(r.began) {
			r.began = at
		}
		if i.GetGoodputBps() > 0 && flowing != nil {
			flowing()
			flowing = nil
		}
	})
	return r, err
}

// between returns the goodputs, bit/s, of a run's intervals that lie between two moments.
func (r transferRun) between(from, to time.Time) (bps []uint64) {
	for _, i := range r.report.GetSeries() {
		if !r.began.Add(time.Duration(i.GetFromNs())).Before(from) && !r.began.Add(time.Duration(i.GetToNs())).After(to) {
			bps = append(bps, i.GetGoodputBps())
		}
	}
	return bps
}

// flight is the transfer of one step: one run, and more until the last one has covered steadyTime of the step's final
// state.
type flight struct {
	*transfer
	cancel  context.CancelFunc
	settled chan time.Time // when all weights were in effect; has capacity for one value
	done    chan struct{}
	// The fields below may be read once done is closed.
	runs   []transferRun
	steady time.Time // zero if it was not reached
	err    error
}

// begin starts a step's transfer and returns once the first bytes have arrived.
func (t *transfer) begin(ctx context.Context) *flight {
	ctx, cancel := context.WithCancel(ctx)
	f := &flight{transfer: t, cancel: cancel, settled: make(chan time.Time, 1), done: make(chan struct{})}
	flowing := make(chan struct{})
	go func() { // end waits for it
		defer close(f.done)
		// A run may be valid without any interval with bytes, if all of them arrive at its very end.
		first := sync.OnceFunc(func() { close(flowing) })
		for f.err == nil {
			var r transferRun
			if r, f.err = t.play(ctx, t.config(0, runTime), first); f.err != nil {
				return
			}
			f.runs = append(f.runs, r)
			if f.steady.IsZero() {
				select {
				case f.steady = <-f.settled:
				default:
				}
			}
			if !r.report.GetOk() || !f.steady.IsZero() && r.began.Add(runTime-steadyTime).After(f.steady) {
				return
			}
		}
	}()
	select {
	case <-flowing:
	case <-f.done:
	case <-ctx.Done():
	}
	return f
}

// end stops a step's transfer (start: time of its first action) and returns its result and any failures, or nothing if
// a pair has become unreachable: severed. allowed is the rate that the cables allow, bit/s; 0 means any.
func (f *flight) end(start time.Time, severed bool, allowed uint64) (*Transfer, []string) {
	if f == nil {
		return nil, nil
	}
	if severed {
		f.cancel()
	}
	f.settled <- time.Now()
	<-f.done
	f.cancel()
	if severed {
		return nil, nil
	}
	r := f.report(start, allowed)
	var wrong []string
	if f.err != nil {
		wrong = append(wrong, "the transfer: "+f.err.Error())
	}
	for _, run := range f.runs {
		for _, text := range run.report.GetErrors() {
			wrong = append(wrong, "the transfer: "+text)
		}
	}
	return r, append(wrong, r.offWeights()...)
}

// abandon stops the transfer of a step that is not played to its end.
func (f *flight) abandon() {
	if f != nil {
		f.cancel()
		<-f.done
	}
}
