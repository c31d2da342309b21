package endpoint

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

// posts are the operations in progress.
type posts struct {
	done map[*rdma.Op]chan<- error // with room for the result
	room chan struct{}             // closed and replaced when a connection that was full accepts operations
}

// wake wakes the calls that wait to post an operation.
func (p *posts) wake() {
	close(p.room)
	p.room = make(chan struct{})
}

func describe(ch rdma.Channel) string {
	c := ch.(*superp.Connection)
	return fmt.Sprintf("cid %d with %v", c.CID(), c.Remote())
}

// find returns the connection with a local cid.
func (e *Endpoint) find(cid uint32) (*superp.Connection, error) {
	if cid <= 0xffff {
		if c := e.Connection(uint16(cid)); c != nil {
			return c, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "no connection has the local cid %d", cid)
}

// OperateSuperp implements fare.v1.SuperpService.
func (e *Endpoint) OperateSuperp(ctx context.Context, r *farev1.OperateSuperpRequest) (*farev1.OperateSuperpResponse, error) {
	op, limit := new(rdma.Op), e.transport.Limits().MaxOp
	n := 0
	switch x := r.Operation.(type) {
	case *farev1.OperateSuperpRequest_Write:
		*op = rdma.Op{Kind: rdma.OpWrite, Remote: x.Write.GetAddress(), Local: x.Write.GetData()}
		n = len(op.Local)
	case *farev1.OperateSuperpRequest_Read:
		n = int(x.Read.GetBytes())
		*op = rdma.Op{Kind: rdma.OpRead, Remote: x.Read.GetAddress()}
	case *farev1.OperateSuperpRequest_Send:
		*op = rdma.Op{Kind: rdma.OpSend, Local: x.Send.GetData()}
		n = len(op.Local)
	default:
		return nil, status.Error(codes.InvalidArgument, "operation: set write, read or send")
	}
	if least := e.cfg.Superp.SUNH.MinMessage(); op.Kind == rdma.OpSend && n < least {
		return nil, status.Errorf(codes.InvalidArgument, "a message of %d bytes: SUNH carries %d or more, since Ethernet pads shorter frames", n, least)
	}
	if least := e.cfg.Superp.SUNH.MinWrite(); op.Kind == rdma.OpWrite && n < least {
		return nil, status.Errorf(codes.InvalidArgument, "a write of %d bytes: SUPERp-lite carries %d or more", n, least)
	}
	if n > limit {
		return nil, status.Errorf(codes.InvalidArgument, "an operation of %d bytes: at most %d are possible, which follows from payload_bytes and packets_per_transaction", n, limit)
	}
	if op.Kind == rdma.OpRead {
		op.Local = make([]byte, n)
	}
	done := make(chan error, 1)
	for posted := false; !posted; {
		var room chan struct{}
		var err error
		e.Do(func() {
			var c *superp.Connection
			if c, err = e.find(r.LocalCid); err != nil {
				return
			}
			room, e.posts.done[op] = e.posts.room, done // before the call, which may complete the operation
			if posted = c.Post(op); !posted {
				delete(e.posts.done, op)
			}
		})
		switch {
		case err != nil:
			return nil, err
		case posted:
		default:
			select {
			case <-room:
			case <-ctx.Done():
				return nil, status.FromContextError(ctx.Err()).Err()
			}
		}
	}
	select {
	case err := <-done:
		if err != nil {
			return nil, status.Error(codes.Aborted, err.Error())
		}
	case <-ctx.Done(): // the operation continues, and its buffer is its own
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	answer := new(farev1.OperateSuperpResponse)
	if op.Kind == rdma.OpRead {
		answer.Data = op.Local
	}
	return answer, nil
}

// ReceiveSuperp implements fare.v1.SuperpService.
func (e *Endpoint) ReceiveSuperp(ctx context.Context, r *farev1.ReceiveSuperpRequest) (*farev1.ReceiveSuperpResponse, error) {
	for {
		var message []byte
		var have bool
		var changed chan struct{}
		var err error
		e.Do(func() {
			var c *superp.Connection
			if c, err = e.find(r.LocalCid); err != nil {
				return
			}
			b := e.inboxOf(c)
			if have = len(b.messages) > 0; have {
				message, b.messages = b.messages[0], b.messages[1:]
				e.ready(c, b)
				return
			}
			if changed = b.changed; c.Err() != nil {
				err = status.Error(codes.Aborted, c.Err().Error())
			}
		})
		if err != nil || have {
			return &farev1.ReceiveSuperpResponse{Data: message}, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// ShutdownSuperp implements fare.v1.SuperpService.
func (e *Endpoint) ShutdownSuperp(ctx context.Context, r *farev1.ShutdownSuperpRequest) (*farev1.ShutdownSuperpResponse, error) {
	answer, err := e.Agent.ShutdownSuperp(ctx, r)
	e.Do(e.forget)
	return answer, err
}

// forget drops the messages of connections that have ended with their configuration, and wakes the calls that wait for
// one.
func (e *Endpoint) forget() {
	known := map[rdma.Channel]bool{}
	for _, c := range e.Connections() {
		known[c] = true
	}
	for ch, b := range e.inbox {
		if !known[ch] {
			b.notify()
			delete(e.inbox, ch)
		}
	}
	e.posts.wake()
}
