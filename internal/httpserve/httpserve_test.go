package httpserve

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serve serves handler until the test ends, and returns the address.
func serve(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := New(handler)
	served := make(chan error, 1)
	go func() { served <- h.Serve(l) }()
	t.Cleanup(func() {
		h.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// get sends a request on a connection and returns its body.
func get(t *testing.T, conn net.Conn) string {
	t.Helper()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// open counts the connections that the server has not closed: those with nothing to read, neither data nor an end.
func open(t *testing.T, conns []net.Conn) (n int) {
	t.Helper()
	for _, c := range conns {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) {
			if _, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
				n++
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// TestIdleConnectionsGiveWay opens several thousand connections, some silent, some after a request: the newest client
// is served at once, and no more than MaxConnections stay open. A connection whose handler runs is not replaced.
func TestIdleConnectionsGiveWay(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/long" {
			close(started)
			<-release
		}
		fmt.Fprint(w, "ok")
	})
	long := dial(t, address)
	fmt.Fprint(long, "GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
	<-started
	var strangers []net.Conn
	for i := range 2000 {
		conn := dial(t, address)
		switch i % 3 {
		case 0:
			get(t, conn)
		case 1:
			fmt.Fprint(conn, "G")
		}
		strangers = append(strangers, conn)
	}
	if got := get(t, dial(t, address)); got != "ok" {
		t.Errorf("a client after %d connections: %q", len(strangers), got)
	}
	if n := open(t, strangers); n > MaxConnections || n < MaxConnections/2 {
		t.Errorf("%d of %d connections are open, want at most %d", n, len(strangers), MaxConnections)
	}
	close(release)
	resp, err := http.ReadResponse(bufio.NewReader(long), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("the request that began first: %v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
}

// TestHandlersAreBounded checks that a connection is closed while handlers run for all others, and that the next one is
// served after their end.
func TestHandlersAreBounded(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		started <- struct{}{}
		<-release
	})
	for range MaxConnections {
		fmt.Fprint(dial(t, address), "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		<-started
	}
	if _, err := dial(t, address).Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection beyond %d handlers: %v, want the end", MaxConnections, err)
	}
	close(release)
	go func() { // of requests from now on
		for range started {
		}
	}()
	for deadline := time.Now().Add(time.Minute); ; {
		conn := dial(t, address) // closed while as many handlers still end
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err == nil {
			resp.Body.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("no connection is served after the end of the handlers: %v", err)
		}
	}
}

// TestLongHeader checks that a header without end is rejected.
func TestLongHeader(t *testing.T) {
	conn := dial(t, serve(t, func(http.ResponseWriter, *http.Request) {}))
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nX: ")
	go func() { _, _ = io.Copy(conn, strings.NewReader(strings.Repeat("x", 64<<10))) }()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
}
