package dpclient_test

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/internal/grpcserve"
)

// pingCounter is a server's listener that counts the PINGs of its connections, and their messages, in both directions.
// Answers to PINGs do not count.
type pingCounter struct {
	net.Listener
	pings, messages atomic.Int64
}

func (l *pingCounter) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &countedConn{Conn: c, counter: l}, err
}

type countedConn struct {
	net.Conn
	counter  *pingCounter
	in, out  bytes.Buffer // incomplete frames
	mu       sync.Mutex   // guards out
	prefaced bool
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.in.Write(b[:n])
	if preface := len(http2.ClientPreface); !c.prefaced && c.in.Len() >= preface {
		c.in.Next(preface)
		c.prefaced = true
	}
	if c.prefaced {
		c.counter.count(&c.in)
	}
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.out.Write(b)
	c.counter.count(&c.out)
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// count counts and removes the complete frames of a buffer.
func (l *pingCounter) count(b *bytes.Buffer) {
	const header = 9 // RFC 9113, Section 4.1
	for b.Len() >= header {
		h, err := http2.ReadFrameHeader(bytes.NewReader(b.Bytes()))
		if err != nil || b.Len() < header+int(h.Length) {
			return
		}
		b.Next(header + int(h.Length))
		switch {
		case h.Type == http2.FramePing && !h.Flags.Has(http2.FlagPingAck):
			l.pings.Add(1)
		case h.Type == http2.FrameData:
			l.messages.Add(1)
		}
	}
}

// TestNoPings checks that neither end of a connection to an agent sends PINGs with its messages.
func TestNoPings(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	plain, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	l := &pingCounter{Listener: plain}
	server := grpcserve.New(1<<20, grpcserve.Window, health.NewServer())
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		<-served
	}()
	conn, err := dpclient.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const calls = 50
	for range calls {
		if _, err := healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if n := l.messages.Load(); n < 2*calls {
		t.Fatalf("%d messages were counted, want at least %d", n, 2*calls)
	}
	if n := l.pings.Load(); n > 0 {
		t.Errorf("%d PINGs for %d calls", n, calls)
	}
}
