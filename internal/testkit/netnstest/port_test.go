package netnstest

import (
	"fmt"
	"net"
	"testing"
)

// TestFreePortsDiffer checks that ports are not given twice, that one can listen at them, and that the kernel gives
// none of them to others meanwhile.
func TestFreePortsDiffer(t *testing.T) {
	given := make(map[int]bool)
	for range 500 {
		p := FreePort(t)
		if given[p] {
			t.Fatalf("port %d is given twice", p)
		}
		given[p] = true
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if other := l.Addr().(*net.TCPAddr).Port; given[other] {
			t.Fatalf("the kernel gives port %d too", other)
		}
	}
	for p := range given {
		l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			t.Errorf("port %d: %v", p, err)
			continue
		}
		l.Close()
	}
}
