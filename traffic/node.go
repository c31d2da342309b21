package traffic

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// NodeConfig is the configuration of a node.
type NodeConfig struct {
	// Sources are its loopbacks, at least one. Each becomes a device with separate transports.
	Sources []netip.Addr
	// Transport is the transport of every plane that is not in Planes.
	Transport string
	Planes    map[string]string
	Options   TransportOptions
	// Weights is the fared that provides slots; if nil, every pair has Slots.
	Weights farev1.WeightServiceClient
	Slots   []Slot
	// ConnectPort is the TCP port on which the node and its peers serve fare.v1.ConnectionService; 0 means
	// rdma.ConnectPort.
	ConnectPort uint16
	// Log receives messages for operators; nil discards them.
	Log *slog.Logger
}

// Node is one server's part in traffic. It implements fare.v1.TrafficService; the caller serves it.
type Node struct {
	farev1.UnimplementedTrafficServiceServer
	cfg     NodeConfig
	devices []*rdma.Device
	server  *grpc.Server
	serving sync.WaitGroup
	busy    chan struct{}       // holds an element during a run
	current atomic.Pointer[run] // run to which peers may connect
	static  *static             // nil if Weights provides the slots
	wrap    func(*end) posting  // tests: wraps the set of an end
	wire    *wire
}

var _ farev1.TrafficServiceServer = (*Node)(nil)

// NewNode opens a device and listens for peers on every loopback.
func NewNode(cfg NodeConfig) (*Node, error) { return newNode(cfg, newTransport) }

func newNode(cfg NodeConfig, open func(string, TransportOptions) (rdma.Transport, error)) (_ *Node, err error) {
	if len(cfg.Sources) == 0 {
		return nil, errors.New("a traffic node needs a loopback")
	}
	if cfg.ConnectPort == 0 {
		cfg.ConnectPort = rdma.ConnectPort
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	n := &Node{cfg: cfg, server: grpc.NewServer(), busy: make(chan struct{}, 1)}
	if cfg.Weights == nil {
		if n.static, err = newStatic(cfg.Sources, cfg.Slots); err != nil {
			return nil, err
		}
		cfg.Weights = n.static
	}
	if n.wire, err = openWire(); err != nil {
		return nil, fmt.Errorf("counters of network devices: %w", err)
	}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	for _, source := range cfg.Sources {
		names := []string{cfg.Transport}
		for _, name := range slices.Sorted(maps.Values(cfg.Planes)) {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		c := rdma.Config{Address: source, Planes: cfg.Planes, Weights: cfg.Weights, Log: cfg.Log}
		for _, name := range names {
			t, err := open(name, cfg.Options)
			if err != nil {
				return nil, err
			}
			c.Transports = append(c.Transports, t)
		}
		d, err := rdma.Open(c)
		if err != nil {
			return nil, err
		}
		n.devices = append(n.devices, d)
	}
	farev1.RegisterConnectionServiceServer(n.server, &rdma.Listener{Devices: n.devices, Accept: n.accept, Accepted: n.accepted})
	for _, d := range n.devices {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(d.Address(), cfg.ConnectPort)))
		if err != nil {
			return nil, fmt.Errorf("listening for peers: %w", err)
		}
		n.serving.Go(func() { n.server.Serve(l) })
	}
	return n, nil
}

// Close closes the node. Runs must have ended: stop the node's server first.
func (n *Node) Close() {
	n.server.Stop()
	n.serving.Wait()
	for _, d := range n.devices {
		d.Close()
	}
	n.wire.close()
}

// DescribeTraffic implements fare.v1.TrafficService.
func (n *Node) DescribeTraffic(context.Context, *farev1.DescribeTrafficRequest) (*farev1.DescribeTrafficResponse, error) {
	out := &farev1.DescribeTrafficResponse{Transport: n.cfg.Transport}
	for _, d := range n.devices {
		out.Loopbacks = append(out.Loopbacks, d.Address().String())
	}
	return out, nil
}

// busyPatience is the time that a run waits for the previous one to end.
const busyPatience = 3 * time.Second

// RunTraffic implements fare.v1.TrafficService.
func (n *Node) RunTraffic(stream grpc.BidiStreamingServer[farev1.RunTrafficRequest, farev1.RunTrafficResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if first.GetPrepare() == nil {
		return status.Error(codes.InvalidArgument, "the first message of a run must be prepare")
	}
	// A run whose coordinator has disconnected takes a moment to end.
	patience := time.NewTimer(busyPatience)
	defer patience.Stop()
	select {
	case n.busy <- struct{}{}:
	case <-patience.C:
		return status.Error(codes.FailedPrecondition, "this node is busy with another run")
	case <-stream.Context().Done():
		return status.FromContextError(stream.Context().Err()).Err()
	}
	defer func() { <-n.busy }()
	r, err := n.newRun(first.GetPrepare())
	defer r.close()
	if err != nil {
		code := codes.FailedPrecondition
		if wrong := new(invalid); errors.As(err, &wrong) {
			code = codes.InvalidArgument
		}
		return status.Error(code, err.Error())
	}
	n.current.Store(r)
	defer n.current.Store(nil)
	ctx, cancel := context.WithCancel(stream.Context())
	c := &conversation{stream: stream, run: r, requests: make(chan *farev1.RunTrafficRequest), over: make(chan error, 1)}
	go c.receive(ctx) // ends with the stream, which ends when Run returns
	defer r.wait()
	defer cancel()
	return c.play(ctx)
}

// wait waits for the ends' goroutines, if they were started.
func (r *run) wait() {
	if r.started.IsZero() {
		return
	}
	for _, e := range r.ends {
		<-e.done
	}
}

// conversation is a run with its coordinator.
type conversation struct {
	stream   grpc.BidiStreamingServer[farev1.RunTrafficRequest, farev1.RunTrafficResponse]
	run      *run
	requests chan *farev1.RunTrafficRequest
	over     chan error // the coordinator has ended the stream, or has disconnected
}

func (c *conversation) receive(ctx context.Context) {
	for {
		m, err := c.stream.Recv()
		if err != nil {
			c.over <- err
			return
		}
		select {
		case c.requests <- m:
		case <-ctx.Done():
			return
		}
	}
}

// next returns the coordinator's next message.
func (c *conversation) next(ctx context.Context) (*farev1.RunTrafficRequest, error) {
	select {
	case m := <-c.requests:
		return m, nil
	case <-c.over:
		return nil, status.Error(codes.Canceled, "the coordinator has ended the run")
	case <-ctx.Done(): // receive may have exited with a message that it could not deliver
		return nil, status.FromContextError(ctx.Err()).Err()
	}
}

func (c *conversation) play(ctx context.Context) error {
	r := c.run
	if err := c.stream.Send(&farev1.RunTrafficResponse{Message: &farev1.RunTrafficResponse_Prepared{Prepared: &farev1.TrafficPrepared{}}}); err != nil {
		return err
	}
	m, err := c.next(ctx)
	if err != nil {
		return err
	}
	if m.GetConnect() == nil {
		return status.Error(codes.InvalidArgument, "want connect after prepare")
	}
	if err := r.connect(ctx); err != nil {
		return status.Error(codes.FailedPrecondition, err.Error())
	}
	if err := c.stream.Send(&farev1.RunTrafficResponse{Message: &farev1.RunTrafficResponse_Connected{Connected: &farev1.TrafficConnected{}}}); err != nil {
		return err
	}
	if m, err = c.next(ctx); err != nil {
		return err
	}
	if m.GetStart() == nil {
		return status.Error(codes.InvalidArgument, "want start after connect")
	}
	if missing := r.unconnected(); missing != nil {
		return status.Errorf(codes.FailedPrecondition, "pair %d has not been connected by its other end", missing.pair.GetPair())
	}
	r.findDevices()
	r.wireBefore = r.node.wire.read()
	r.started = time.Now()
	for _, e := range r.ends {
		go e.serve(ctx) // Run waits for it
	}
	if err := c.sampled(ctx); err != nil {
		return err
	}
	result := &farev1.TrafficResult{Counters: r.counters(), Loopback: r.node.devices[0].Address().String(), Wire: r.wireBytes()}
	for _, e := range r.ends {
		result.Ends = append(result.Ends, e.result())
	}
	if err := c.stream.Send(&farev1.RunTrafficResponse{Message: &farev1.RunTrafficResponse_Result{Result: result}}); err != nil {
		return err
	}
	// Peers may still need memory of this node: the coordinator ends the stream once it has all results.
	select {
	case <-c.over:
		return nil
	case <-c.requests:
		return status.Error(codes.InvalidArgument, "want no message after finish")
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// sampled sends samples until every end is done.
func (c *conversation) sampled(ctx context.Context) error {
	r := c.run
	s := &sampler{run: r}
	send := func() error {
		return c.stream.Send(&farev1.RunTrafficResponse{Message: &farev1.RunTrafficResponse_Sample{Sample: s.sample()}})
	}
	tick := time.NewTicker(r.interval)
	defer tick.Stop()
	started, ended := make(chan struct{}), make(chan struct{})
	var served <-chan struct{} // becomes ended once the coordinator has sent the numbers of messages
	go func() {                // ends with the ends, at the latest when ctx does
		defer close(ended)
		for _, e := range r.ends {
			if e.initiator {
				<-e.done
			}
		}
		close(started)
		for _, e := range r.ends {
			<-e.done
		}
	}()
	for {
		select {
		case <-tick.C:
			if err := send(); err != nil {
				return err
			}
		case <-started:
			started = nil
			sent := &farev1.TrafficSent{}
			for _, e := range r.ends {
				if e.initiator {
					sent.Posted = append(sent.Posted, &farev1.TrafficPosted{Pair: e.pair.GetPair(), Messages: e.result().GetPosted()})
				}
			}
			if err := c.stream.Send(&farev1.RunTrafficResponse{Message: &farev1.RunTrafficResponse_Sent{Sent: sent}}); err != nil {
				return err
			}
		case m := <-c.requests:
			if m.GetFinish() == nil || started != nil {
				return status.Error(codes.InvalidArgument, "want finish after start, once every node has sent")
			}
			served = ended
			posted := map[uint32]uint64{}
			for _, p := range m.GetFinish().GetPosted() {
				posted[p.GetPair()] = p.GetMessages()
			}
			for _, e := range r.ends {
				if !e.initiator {
					select {
					case e.finish <- posted[e.pair.GetPair()]:
					default: // already sent
					}
				}
			}
		case <-served:
			return send() // the bytes since the previous sample
		case <-c.over:
			return status.Error(codes.Canceled, "the coordinator has ended the run")
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
	}
}
