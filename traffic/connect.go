package traffic

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fared/fared/dataplane/rdma"
)

// connectPatience is how long queue pairs may take to be set up: a peer may wait for weights.
const connectPatience = 30 * time.Second

// ticket is the private data of a connection's offer: which end of which run the caller looks for.
type ticket struct {
	run  uint64
	pair uint32
}

// region is the private data of the answer: the memory that operations go to.
type region struct {
	address uint64
	key     uint32
}

// Both take 12 bytes, in network byte order.
const privateSize = 12

func (t ticket) marshal() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, t.run), t.pair)
}

func (t *ticket) unmarshal(b []byte) error {
	if len(b) != privateSize {
		return fmt.Errorf("%d bytes of private data, want %d: the caller is no traffic node of this version", len(b), privateSize)
	}
	*t = ticket{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
	return nil
}

func (r region) marshal() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, r.address), r.key)
}

func (r *region) unmarshal(b []byte) error {
	if len(b) != privateSize {
		return fmt.Errorf("%d bytes of private data, want %d: the peer is no traffic node of this version", len(b), privateSize)
	}
	*r = region{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
	return nil
}

// config is what an end's set is made of.
func (e *end) config() rdma.SetConfig {
	r := e.run
	// Notes, and room for what an end's tests put beside.
	depth := int(r.outstanding) + 4*noteDepth
	return rdma.SetConfig{PD: r.domains[e.device], SendCQ: e.cq, RecvCQ: e.cq, Ordering: r.ordering, SendDepth: depth, RecvDepth: depth}
}

// connect sets an initiator's queue pairs up.
func (e *end) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectPatience)
	defer cancel()
	conn, err := e.run.node.dial(e.device.Address(), e.peer)
	if err != nil {
		return err
	}
	set, reply, err := e.device.Connect(ctx, conn, e.peer, e.config(), ticket{e.run.id, e.pair.GetPair()}.marshal())
	if err != nil {
		conn.Close()
		return err
	}
	if err := e.remote.unmarshal(reply); err != nil {
		set.Close()
		conn.Close()
		return err
	}
	if err := e.attach(set, conn); err != nil {
		set.Close()
		conn.Close()
		return err
	}
	return nil
}

// attach gives an end its set. conn, when not nil, lives as long.
func (e *end) attach(set *rdma.Set, conn *grpc.ClientConn) error {
	r := e.run
	r.mu.Lock()
	defer r.mu.Unlock()
	if conn != nil {
		r.conns = append(r.conns, conn)
	}
	r.sets = append(r.sets, set)
	switch {
	case r.ended:
		return errors.New("the run has ended")
	case e.set != nil:
		return errors.New("connected twice")
	}
	e.set, e.qp = set, set
	if r.node.wrap != nil {
		e.qp = r.node.wrap(e)
	}
	return e.role.setUp()
}

// dial makes a client of the ConnectionService on a peer's loopback. It connects from a loopback, as everything else does.
func (n *Node) dial(from, to netip.Addr) (*grpc.ClientConn, error) {
	d := dialer(from)
	return grpc.NewClient("passthrough:///"+net.JoinHostPort(to.String(), strconv.Itoa(int(n.cfg.ConnectPort))),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", address)
		}))
}

// dialer dials from a loopback. The kernel may give a connection the port of a slot, where operators have not reserved those. So it is
// bound as an address in use, as TCP flows of slots are: else none could be dialled from that port.
func dialer(from netip.Addr) *net.Dialer {
	return &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		if e := raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) }); e != nil {
			return e
		}
		return err
	}}
}

// accept answers a peer's connection; it is the Listener's.
func (n *Node) accept(d *rdma.Device, request rdma.Request) (rdma.SetConfig, []byte, error) {
	e, err := n.sought(request)
	if err != nil {
		return rdma.SetConfig{}, nil, err
	}
	if e.device != d || e.run.ordering != request.Ordering {
		return rdma.SetConfig{}, nil, errors.New("the ends of the pair disagree about loopback or ordering")
	}
	var memory region
	if m := e.role.exposed(); m != nil {
		memory = region{m.Address(), m.Key()}
	}
	return e.config(), memory.marshal(), nil
}

// sought is the end that a peer looks for.
func (n *Node) sought(request rdma.Request) (*end, error) {
	var t ticket
	if err := t.unmarshal(request.Private); err != nil {
		return nil, err
	}
	r := n.current.Load()
	if r == nil || r.id != t.run {
		return nil, errors.New("the run is not known here, or has ended")
	}
	for _, e := range r.ends {
		if e.pair.GetPair() == t.pair && !e.initiator {
			return e, nil
		}
	}
	return nil, fmt.Errorf("pair %d of the run has no end here that waits for a connection", t.pair)
}

// accepted takes the set over before the peer can use it.
func (n *Node) accepted(set *rdma.Set, request rdma.Request) {
	e, err := n.sought(request)
	if err == nil {
		err = e.attach(set, nil)
	}
	if err != nil {
		n.cfg.Log.Warn("a peer's queue pairs are not used", "peer", request.Remote, "error", err)
		set.Close()
	}
}
