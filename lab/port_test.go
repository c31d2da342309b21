package lab

import (
	"fmt"
	"net"
	"os"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestFreePortIsFreeEverywhere checks that a port that another fabric's leaf uses at its address is not chosen. In the
// namespace the kernel has two ports to choose from, and prefers the odd one.
func TestFreePortIsFreeEverywhere(t *testing.T) {
	netnstest.Require(t)
	if err := netnstest.New(t).Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40001\n"), 0); err != nil {
			return err
		}
		leaf, err := net.Listen("tcp4", "127.0.1.1:40001")
		if err != nil {
			return err
		}
		defer leaf.Close()
		for range 20 {
			port, err := freePort()
			if err != nil {
				return err
			}
			if port != 40000 {
				return fmt.Errorf("port %d was chosen, but only 40000 is free at every address", port)
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
