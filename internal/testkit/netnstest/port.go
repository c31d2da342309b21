package netnstest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
)

var (
	portMu   sync.Mutex
	lastPort = -1
)

// FreePort returns a TCP port of 127.0.0.1 on which nobody listens, for a process that the test starts next. No two
// calls of a test process return the same port. It is below the range from which the kernel gives ports to
// connections and to listeners without a port, so that none of them takes it before the process listens.
func FreePort(t testing.TB) int {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Fatal(err)
	}
	var end int
	if _, err := fmt.Sscan(string(text), &end); err != nil {
		t.Fatalf("ip_local_port_range %q: %v", text, err)
	}
	const ports = 10000
	if end <= 1024+ports {
		t.Fatalf("ip_local_port_range begins at %d: no room for the ports of tests below it", end)
	}
	portMu.Lock()
	defer portMu.Unlock()
	if lastPort < 0 {
		lastPort = rand.IntN(ports)
	}
	for range ports {
		lastPort = (lastPort + 1) % ports
		port := end - ports + lastPort
		if l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no free port on 127.0.0.1")
	return 0
}
