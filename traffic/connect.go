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

	"github.com/fared/fared/transport/rdma"
)

// connectPatience limits the time to connect queue pairs: a peer may wait for weights.
const connectPatience = 30 * time.Second

// ticket is the private data of a connection's offer: it identifies the requested end.
type ticket struct {
	run  uint64
	pair uint32
}

// region is the private data of the answer: the memory region for the caller's operations.
type region struct {
	address uint64
	key     uint32
}

// privateSize is the size of both in bytes; they are in network byte order.
const privateSize = 12

func (t ticket) marshal() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, t.run), t.pair)
}

func (t *ticket) unmarshal(b []byte) error {
	if len(b) != privateSize {
		return fmt.Errorf("%d bytes of private data, want %d: the caller is not a traffic node of this version", len(b), privateSize)
	}
	*t = ticket{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
	return nil
}

func (r region) marshal() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, r.address), r.key)
}

func (r *region) unmarshal(b []byte) error {
	if len(b) != privateSize {
		return fmt.Errorf("%d bytes of private data, want %d: the peer is not a traffic node of this version", len(b), privateSize)
	}
	*r = region{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:])}
	return nil
}

// config returns the configuration of an end's set.
func (e *end) config() rdma.SetConfig {
	r := e.run
	// notes, and room for the additional requests of tests
	depth := int(r.outstanding) + 4*noteDepth
	return rdma.SetConfig{PD: r.domains[e.device], SendCQ: e.cq, RecvCQ: e.cq, Ordering: r.ordering, SendDepth: depth, RecvDepth: depth}
}

// connect connects an initiator's queue pairs.
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

// attach gives an end its set. conn, if not nil, is closed with the run.
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

// dial returns a client of the ConnectionService on a peer's loopback. Like all traffic, the connection starts at a
// loopback.
func (n *Node) dial(from, to netip.Addr) (*grpc.ClientConn, error) {
	d := dialer(from)
	return grpc.NewClient("passthrough:///"+net.JoinHostPort(to.String(), strconv.Itoa(int(n.cfg.ConnectPort))),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", address)
		}))
}

// dialer dials from a loopback. If operators have not reserved the ports of slots, the kernel may assign one to a
// connection. So the address is bound as reusable, like those of the slots' TCP flows; otherwise none of these could be
// dialed from that port.
func dialer(from netip.Addr) *net.Dialer {
	return &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		if e := raw.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) }); e != nil {
			return e
		}
		return err
	}}
}

// accept answers a peer's connection request; the Listener calls it.
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

// sought returns the end that a peer requests.
func (n *Node) sought(request rdma.Request) (*end, error) {
	var t ticket
	if err := t.unmarshal(request.Private); err != nil {
		return nil, err
	}
	r := n.current.Load()
	if r == nil || r.id != t.run {
		return nil, errors.New("the run is unknown to this node, or has ended")
	}
	for _, e := range r.ends {
		if e.pair.GetPair() == t.pair && !e.initiator {
			return e, nil
		}
	}
	return nil, fmt.Errorf("pair %d of the run has no end on this node that waits for a connection", t.pair)
}

// accepted attaches the set before the peer can use it.
func (n *Node) accepted(set *rdma.Set, request rdma.Request) {
	e, err := n.sought(request)
	if err == nil {
		err = e.attach(set, nil)
	}
	if err != nil {
		n.cfg.Log.Warn("rejecting a peer's queue pairs", "peer", request.Remote, "error", err)
		set.Close()
	}
}
