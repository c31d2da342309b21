package grpcserve

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// TestCallsAreBounded checks that calls beyond maxCalls fail, over all connections, that their reason is
// RESOURCE_EXHAUSTED, and that the end of a call makes room for another.
func TestCallsAreBounded(t *testing.T) {
	dial := serveLocal(t)
	var ends []context.CancelFunc
	for i := range 4 {
		c := dial(2 + i)
		for range maxCalls / 4 {
			end, err := watch(t, c)
			if err != nil {
				t.Fatalf("call %d: %v", len(ends), err)
			}
			ends = append(ends, end)
		}
	}
	c := dial(6)
	end, err := watch(t, c)
	if end(); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("call %d: %v, want RESOURCE_EXHAUSTED", len(ends), err)
	}
	ends[0]()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		end, err := watch(t, c)
		if end(); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the end of a call: %v", err)
		}
	}
	for _, end := range ends {
		end()
	}
}

// serveLocal starts a server and returns a function that connects to it from 127.0.0.n.
func serveLocal(t *testing.T) func(n int) healthpb.HealthClient {
	t.Helper()
	l, options, err := Listen("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := New(1<<10, Window, health.NewServer(), options...)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return func(n int) healthpb.HealthClient {
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, to string) (net.Conn, error) { return from(n).DialContext(ctx, "tcp", to) }))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return healthpb.NewHealthClient(conn)
	}
}

// from returns a dialer that connects from 127.0.0.n.
func from(n int) *net.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(n))}}
}

// watch makes a call that lasts until end.
func watch(t *testing.T, c healthpb.HealthClient) (end context.CancelFunc, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.Watch(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
	if err == nil {
		_, err = stream.Recv()
	}
	return cancel, err
}

// TestOneClientLeavesCallsToOthers checks that a client with its share of the calls, over two connections, gets no
// further one, with the reason, while another client does.
func TestOneClientLeavesCallsToOthers(t *testing.T) {
	dial := serveLocal(t)
	first, second := dial(2), dial(2)
	for i := range maxClientCalls {
		c := first
		if i%2 > 0 {
			c = second
		}
		end, err := watch(t, c)
		if err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		defer end()
	}
	for _, c := range []healthpb.HealthClient{first, second, dial(2)} {
		end, err := watch(t, c)
		end()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "address 127.0.0.2 has 64 calls open already: end some") {
			t.Errorf("a call beyond the share: %v", err)
		}
	}
	end, err := watch(t, dial(3))
	end()
	if err != nil {
		t.Errorf("a call of another client: %v", err)
	}
}

// TestOneClientLeavesConnectionsToOthers checks that connections of a client beyond its share are closed, so that those
// of another client are accepted, and that the end of a connection makes room for another. Clients are addresses over
// TCP, users on a unix socket.
func TestOneClientLeavesConnectionsToOthers(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := Limit(inner)
	defer l.Close()
	accepted := make(chan net.Conn, 2*MaxConnections)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	dial := func(n int) net.Conn {
		conn, err := from(n).Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	var first net.Conn
	for range MaxClientConnections {
		dial(2)
		first = <-accepted
	}
	for range MaxConnections {
		if _, err := dial(2).Read(make([]byte, 1)); err == nil {
			t.Fatal("data of a server that sends none")
		} // returns at the end of the connection alone
	}
	if n := len(accepted); n != 0 {
		t.Fatalf("%d connections beyond the share are accepted", n)
	}
	dial(3)
	if conn := <-accepted; !strings.HasPrefix(conn.RemoteAddr().String(), "127.0.0.3:") {
		t.Errorf("accepted %s", conn.RemoteAddr())
	}
	first.Close()
	dial(2)
	if conn := <-accepted; !strings.HasPrefix(conn.RemoteAddr().String(), "127.0.0.2:") {
		t.Errorf("accepted %s", conn.RemoteAddr())
	}
	socket, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := net.Dial("unix", socket.Addr().String()); err != nil {
		t.Fatal(err)
	}
	conn, err := socket.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, want := clientOf(conn), fmt.Sprintf("uid %d", os.Getuid()); got != want {
		t.Errorf("the client of a unix socket is %q, want %q", got, want)
	}
}
