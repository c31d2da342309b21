package rdma

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// ConnectPort is the default TCP port of fare.v1.ConnectionService at endpoints.
const ConnectPort = 4794

// Connect makes a set with a peer's loopback; the peer's Listener, reached through conn, answers. private goes to the
// peer's application, reply comes from it. With Config.Weights, Connect waits until fared provides live slots.
func (d *Device) Connect(ctx context.Context, conn grpc.ClientConnInterface, remote netip.Addr, cfg SetConfig, private []byte) (_ *Set, reply []byte, err error) {
	if d.weights != nil {
		if err := d.weights.await(ctx, remote); err != nil {
			return nil, nil, fmt.Errorf("waiting for slots from %v to %v: %w", d.address, remote, err)
		}
	}
	s, offer, err := d.Offer(remote, cfg, nil)
	if err != nil {
		return nil, nil, err
	}
	// The stream ends with the set, not with ctx.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, end)
	defer func() {
		if err != nil {
			stop()
			end()
			s.Close()
		}
	}()
	stream, err := farev1.NewConnectionServiceClient(conn).Connect(life)
	if err != nil {
		return nil, nil, err
	}
	offer.PrivateData = private
	// If Send fails, Recv returns the reason.
	if err := stream.Send(&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: offer}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, nil, fmt.Errorf("%v does not connect: %w", remote, err)
	}
	if first.GetAnswer() == nil {
		return nil, nil, fmt.Errorf("%v closed the connection immediately: %s", remote, first.GetGoodbye().GetReason())
	}
	if err := s.Finish(first.GetAnswer()); err != nil {
		return nil, nil, err
	}
	if !stop() {
		return nil, nil, ctx.Err()
	}
	go func() {
		defer end()
		awaitGoodbye(s, func() (*farev1.Goodbye, error) {
			r, err := stream.Recv()
			return r.GetGoodbye(), err
		}, func(g *farev1.Goodbye) error {
			return errors.Join(stream.Send(&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Goodbye{Goodbye: g}}), stream.CloseSend())
		})
	}()
	return s, first.GetAnswer().GetPrivateData(), nil
}

// awaitGoodbye ends a set when the peer says goodbye, and says goodbye when the set ends. It returns once the set has
// ended.
//
// A broken stream alone does not end the set, since its channels may still work. If no channel has received anything
// from the peer within Patience, the set ends: the peer gave up before it received the answer or while handling it. Any
// other set checks once per Patience that its peer is alive, so that a set that only receives does not outlast a killed
// peer.
func awaitGoodbye(s *Set, recv func() (*farev1.Goodbye, error), send func(*farev1.Goodbye) error) {
	received := make(chan struct{})
	go func() {
		defer close(received)
		for {
			g, err := recv()
			if err != nil {
				return
			}
			if g != nil {
				s.device.Do(func() { s.fail(fmt.Errorf("%w: %v closed the connection: %s", ErrFlushed, s.remote, g.GetReason())) })
			}
		}
	}()
	select {
	case <-s.done:
	case <-received:
		ask := time.NewTicker(s.cfg.Patience)
		defer ask.Stop()
		for ended := false; !ended; {
			select {
			case <-s.done:
				ended = true
			case <-ask.C:
				s.device.Do(func() {
					if s.peerReady {
						s.receiver.ask()
						return
					}
					s.fail(fmt.Errorf("%w: the connection to %v is not complete, and its stream has broken", ErrFlushed, s.remote))
				})
			}
		}
	}
	reason := "closed"
	if err := s.Err(); err != nil {
		reason = err.Error()
	}
	if send(&farev1.Goodbye{Reason: reason}) == nil {
		<-received // recv fails once the peer ends its stream
	}
}

// Request is a peer's request to a Listener.
type Request struct {
	Remote   netip.Addr
	Ordering wecmp.Ordering
	Private  []byte
}

// Listener answers Connect requests of peers for any number of devices. It implements fare.v1.ConnectionService:
// register it with a gRPC server that listens at ConnectPort on an address that peers reach.
type Listener struct {
	farev1.UnimplementedConnectionServiceServer
	// Devices are the devices that accept connections; the peer's request names one by its loopback.
	Devices []*Device
	// Accept returns the configuration of the new set and private data for the peer's application; an error refuses the
	// request. The peer's request determines SetConfig.Ordering.
	Accept func(*Device, Request) (SetConfig, []byte, error)
	// Accepted receives the set before the peer can use it, so that the application can post receives.
	Accepted func(*Set, Request)
}

// Connect implements fare.v1.ConnectionService.
func (l *Listener) Connect(stream grpc.BidiStreamingServer[farev1.ConnectRequest, farev1.ConnectResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	offer := first.GetOffer()
	if offer == nil {
		return status.Error(codes.InvalidArgument, "the first message of a connection must be an offer")
	}
	destination, err := netip.ParseAddr(offer.GetDestination())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "destination: %v", err)
	}
	source, err := netip.ParseAddr(offer.GetSource())
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "source: %v", err)
	}
	if o := offer.GetOrdering(); o < farev1.MemoryOrdering_MEMORY_ORDERING_WEAK || o > farev1.MemoryOrdering_MEMORY_ORDERING_STRONG {
		return status.Errorf(codes.InvalidArgument, "unknown ordering %v", o)
	}
	var device *Device
	for _, d := range l.Devices {
		if d.address == destination.Unmap() {
			device = d
		}
	}
	if device == nil {
		return status.Errorf(codes.NotFound, "loopback %v is not on this host", destination)
	}
	if device.weights != nil {
		if err := device.weights.await(stream.Context(), source); err != nil {
			return status.Errorf(codes.Unavailable, "no slots from %v to %v yet: %v", destination, source, err)
		}
	}
	request := Request{Remote: source.Unmap(), Ordering: wecmp.Ordering(offer.GetOrdering() - farev1.MemoryOrdering_MEMORY_ORDERING_WEAK), Private: offer.GetPrivateData()}
	cfg, private, err := l.Accept(device, request)
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "%v refuses: %v", destination, err)
	}
	s, answer, err := device.Answer(offer, cfg, nil)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if l.Accepted != nil {
		l.Accepted(s, request)
	}
	answer.PrivateData = private
	if err := stream.Send(&farev1.ConnectResponse{Message: &farev1.ConnectResponse_Answer{Answer: answer}}); err != nil {
		s.Close()
		return err
	}
	awaitGoodbye(s, func() (*farev1.Goodbye, error) {
		r, err := stream.Recv()
		return r.GetGoodbye(), err
	}, func(g *farev1.Goodbye) error {
		return stream.Send(&farev1.ConnectResponse{Message: &farev1.ConnectResponse_Goodbye{Goodbye: g}})
	})
	return nil
}
