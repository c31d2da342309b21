package endpoint

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

// MaxMemory is the maximum of Config.Memory: the flat addresses of a region have one key.
const MaxMemory = 1 << 31

// Config is the configuration of an endpoint. Address is required.
type Config struct {
	// Address is the loopback.
	Address netip.Addr
	// Superp is the configuration of the transport. HeadSize has no effect: messages have no head.
	Superp superp.Config
	// Memory is the number of bytes that peers may read and write.
	Memory int
	// Weights is a connection to the fared that provides slots; nil means that every destination has Slots. Without
	// both, each connection has one path, whose source port follows from its cid.
	Weights grpc.ClientConnInterface
	Slots   []rdma.Slot
	// Log receives messages for operators; nil discards them.
	Log *slog.Logger
}

// Endpoint is a SUPERp instance. It implements fare.v1.SuperpService.
type Endpoint struct {
	*superp.Agent
	cfg       Config
	start     time.Time
	transport *superp.Transport
	memory    []byte
	first     uint64 // flat address of memory

	// mu is the device's lock of the transport. It guards the remaining fields.
	mu    sync.Mutex
	later []func() // calls to channels, which the transport's calls to this host must not make
	posts posts
	inbox map[rdma.Channel]*inbox
	slots slots
	// Protocol errors that were not logged since the latest one that was, and its time.
	unlogged int
	logged   time.Duration
}

var _ farev1.SuperpServiceServer = (*Endpoint)(nil)

// Open opens the transport, in the network namespace of the calling thread.
func Open(cfg Config) (*Endpoint, error) {
	if cfg.Memory < 0 || cfg.Memory > MaxMemory {
		return nil, fmt.Errorf("%d bytes of memory: 0 to %d are possible", cfg.Memory, MaxMemory)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Superp.HeadSize = -1
	var err error
	if cfg.Superp, err = cfg.Superp.Resolve(); err != nil {
		return nil, err
	}
	e := &Endpoint{cfg: cfg, start: time.Now(), transport: superp.New(cfg.Superp), memory: make([]byte, cfg.Memory), first: randomAddress(),
		posts: posts{done: map[*rdma.Op]chan<- error{}, room: make(chan struct{})}, inbox: map[rdma.Channel]*inbox{}}
	e.slots = newSlots(cfg.Slots, cfg.Superp.SUNH.Lite)
	if err := e.transport.Start(e); err != nil {
		return nil, err
	}
	agent := superp.AgentConfig{Host: e, Core: e.transport.Core, Paths: e.slots.pathsTo, Violated: e.violated, Replaced: e.replaced}
	if cfg.Memory > 0 {
		agent.Memory = []*farev1.SuperpMemory{{Address: e.first, Bytes: uint64(cfg.Memory)}}
	}
	e.Agent = superp.NewAgent(agent)
	return e, nil
}

// randomAddress returns a flat address that other hosts cannot guess (rdma.FlatAddress), whose lower 32 bits are 0.
func randomAddress() uint64 {
	var b [4]byte
	rand.Read(b[:])
	return rdma.FlatAddress(max(1, binary.NativeEndian.Uint32(b[:])), 0)
}

// Serve serves the agent's API on a listener, and follows the weights, until ctx ends; then the error is nil.
func (e *Endpoint) Serve(ctx context.Context, l net.Listener, options ...grpc.ServerOption) error {
	ctx, cancel := context.WithCancelCause(ctx)
	// A manager that disappears silently is noticed after 20 s.
	options = append(options, grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}), grpc.WaitForHandlers(true))
	s := grpc.NewServer(options...)
	farev1.RegisterSuperpServiceServer(s, e)
	stop := context.AfterFunc(ctx, s.Stop)
	defer stop()
	var following sync.WaitGroup
	defer following.Wait()
	if e.cfg.Weights != nil {
		following.Go(func() {
			if err := e.follow(ctx); err != nil {
				cancel(err)
			}
		})
	}
	defer cancel(nil)
	defer s.Stop()
	err := s.Serve(l)
	if ctx.Err() == nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// Close ends all connections at once, and the transport. Serve must have returned.
func (e *Endpoint) Close() {
	_, _ = e.ShutdownSuperp(context.Background(), &farev1.ShutdownSuperpRequest{Hard: true}) // hard does not fail
	e.transport.Stop()
}
