package status

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
)

// registered returns the full names of every method of every service of a server.
func registered(s *Server) []string {
	var all []string
	for name, service := range s.endpoints[0].grpc.GetServiceInfo() {
		for _, m := range service.Methods {
			all = append(all, "/"+name+"/"+m.Name)
		}
	}
	slices.Sort(all)
	return all
}

// TestEveryMethodIsClassified checks that the table has exactly the served methods, and classifies only methods with
// the name of a read as reads.
func TestEveryMethodIsClassified(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	served := registered(srv.server)
	if classified := slices.Sorted(maps.Keys(methods)); !slices.Equal(classified, served) {
		t.Errorf("classified are\n%s\nserved are\n%s", strings.Join(classified, "\n"), strings.Join(served, "\n"))
	}
	reads := regexp.MustCompile(`/(Get|List|Watch|Check|ServerReflectionInfo)[A-Za-z]*$`)
	for _, m := range served {
		if want := reads.MatchString(m); (methods[m] == accessRead) != want {
			t.Errorf("%s: reading suffices: %t, want %t by its name", m, methods[m] == accessRead, want)
		}
	}
}

// TestReadOnlySocket checks that on a read-only socket a method that changes state is rejected before its handler runs,
// with the socket to use instead.
func TestReadOnlySocket(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, func(c *ServiceConfig) {
		c.Drain = func(_ context.Context, req DrainRequest) (DrainTarget, []string, error) {
			return req.Target, nil, nil
		}
		c.Reload = func(context.Context, bool) ([]string, error) { return nil, nil }
	})
	readOnly := filepath.Join(t.TempDir(), "ro")
	srv := serve(t, s, func(c *ServerConfig) { c.ReadOnlySocket, c.Listen = readOnly, "127.0.0.1:0" })
	if info, err := os.Stat(readOnly); err != nil || info.Mode().Perm() != 0o666 {
		t.Fatalf("%v, %v, want mode 0666", info.Mode(), err)
	}
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	for _, e := range []struct {
		name    string
		conn    *grpc.ClientConn
		operate bool
	}{
		{"socket", srv.conn, true},
		{"read-only socket", dial(t, "unix:"+readOnly, plain), false},
		{"TCP without TLS", dial(t, srv.address(), plain), false},
	} {
		fabric, target := farev1.NewFabricServiceClient(e.conn), &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p0"}}
		_, drain := fabric.Drain(t.Context(), &farev1.DrainRequest{Target: target})
		_, undrain := fabric.Undrain(t.Context(), &farev1.UndrainRequest{Target: target})
		_, reload := fabric.Reload(t.Context(), &farev1.ReloadRequest{DryRun: true})
		for m, err := range map[string]error{"Drain": drain, "Undrain": undrain, "Reload": reload} {
			switch code := grpcstatus.Code(err); {
			case e.operate && err != nil:
				t.Errorf("%s on %s: %v", m, e.name, err)
			case !e.operate && (code != codes.PermissionDenied || !strings.Contains(err.Error(), "use "+srv.socket+", as root or as a member of its group")):
				t.Errorf("%s on %s: %v, want PERMISSION_DENIED and the remedy", m, e.name, err)
			}
		}
		if _, err := fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
			t.Errorf("GetStatus on %s: %v", e.name, err)
		}
		stream, err := farev1.NewWeightServiceClient(e.conn).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Errorf("WatchWeights on %s: %v", e.name, err)
		}
	}
}

// TestReadersLeaveWatchesToOperators checks that readers and operators have separate watches, of which a client may
// have half.
func TestReadersLeaveWatchesToOperators(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, func(c *ServiceConfig) { c.MaxWatches = 4 })
	readOnly := filepath.Join(t.TempDir(), "ro")
	srv := serve(t, s, func(c *ServerConfig) { c.ReadOnlySocket = readOnly })
	readers := dial(t, "unix:"+readOnly, grpc.WithTransportCredentials(insecure.NewCredentials()))
	watch := func(conn *grpc.ClientConn) error {
		stream, err := farev1.NewWeightServiceClient(conn).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}
	for _, conn := range []*grpc.ClientConn{readers, srv.conn} {
		for i, want := range []codes.Code{codes.OK, codes.OK, codes.ResourceExhausted} {
			err := watch(conn)
			if grpcstatus.Code(err) != want {
				t.Errorf("watch %d on %s: %v, want %v", i, conn.Target(), err, want)
			}
			if client := fmt.Sprintf("watches of uid %d,", os.Getuid()); err != nil && !strings.Contains(err.Error(), client) {
				t.Errorf("%v does not name the client", err)
			}
		}
	}
	if n := s.watching(); n != 4 {
		t.Errorf("%d watches, want 4", n)
	}
}

// TestUnknownMethodIsRefused checks that the read right does not grant a method that the table lacks.
func TestUnknownMethodIsRefused(t *testing.T) {
	e := &endpoint{name: "ro", access: accessRead, operate: "rw"}
	if err := e.allow(grpcserve.Caller{}, "/fare.v1.FabricService/New"); grpcstatus.Code(err) != codes.PermissionDenied {
		t.Errorf("an unknown method on a read-only endpoint: %v", err)
	}
	if err := e.allowStream(nil, contextStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: "/fare.v1.FabricService/New"}, func(any, grpc.ServerStream) error { return nil }); grpcstatus.Code(err) != codes.PermissionDenied {
		t.Errorf("an unknown stream on a read-only endpoint: %v", err)
	}
}

// contextStream is a stream with a context alone.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s contextStream) Context() context.Context { return s.ctx }

// TestCaller checks that a handler receives the process at the other end of a unix socket, and the address over TCP.
func TestCaller(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	callers := make(chan string, 1)
	s := l.service(t, func(c *ServiceConfig) {
		c.Reload = func(ctx context.Context, _ bool) ([]string, error) {
			callers <- grpcserve.CallerOf(ctx).String()
			return nil, nil
		}
	})
	srv := serve(t, s, nil)
	if _, err := srv.fabric.Reload(t.Context(), &farev1.ReloadRequest{}); err != nil {
		t.Fatal(err)
	}
	got := <-callers
	if want := regexp.MustCompile(fmt.Sprintf(`^uid %d( \(\S+\))? pid %d$`, os.Getuid(), os.Getpid())); !want.MatchString(got) {
		t.Errorf("caller %q, want %s", got, want)
	}
	if got := grpcserve.CallerOf(context.Background()).String(); got != "" {
		t.Errorf("inside the process: %q", got)
	}
}

// TestReadersAreBounded checks that one user's connections to the read-only socket beyond the user's share end, and
// that the end of one makes room.
func TestReadersAreBounded(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	readOnly := filepath.Join(t.TempDir(), "ro")
	serve(t, l.service(t, nil), func(c *ServerConfig) { c.ReadOnlySocket = readOnly })
	// served reports whether a new connection is accepted: its first byte is one of the server's settings frame.
	served := func() (net.Conn, bool) {
		conn, err := net.Dial("unix", readOnly)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_, err = conn.Read(make([]byte, 1))
		return conn, err == nil
	}
	var first net.Conn
	for i := range grpcserve.MaxClientConnections {
		conn, ok := served()
		if !ok {
			t.Fatalf("connection %d is not served", i)
		}
		first = conn
	}
	if _, ok := served(); ok {
		t.Fatalf("a connection beyond %d is served", grpcserve.MaxClientConnections)
	}
	first.Close()
	eventually(t, "a connection after the end of another", func() bool { _, ok := served(); return ok })
}

// TestOneClientLeavesWatchesToOthers checks that a client with half of the watches gets no further one while another
// client does, and that all clients together have MaxWatches.
func TestOneClientLeavesWatchesToOthers(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	s := l.service(t, func(c *ServiceConfig) { c.MaxWatches = 4 })
	srv := serve(t, s, func(c *ServerConfig) { c.Listen = "127.0.0.1:0" })
	for _, w := range []struct {
		host byte
		want string
	}{{2, ""}, {2, ""}, {2, "watches of address 127.0.0.2, which may have half of all: end one"}, {3, ""}, {3, ""}, {4, "too many concurrent watches: end one"}} {
		from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, w.host)}}
		conn := dial(t, srv.address(), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) { return from.DialContext(ctx, "tcp", to) }))
		stream, err := farev1.NewWeightServiceClient(conn).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		if (err == nil) != (w.want == "") || err != nil && !strings.Contains(err.Error(), w.want) {
			t.Errorf("a watch from 127.0.0.%d: %v, want %q", w.host, err, w.want)
		}
	}
}
