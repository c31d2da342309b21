package nupa_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
)

// Two devices of one kernel share a plane of memory. The example of package rdma connects two devices.
func ExampleNew() {
	dir, err := os.MkdirTemp("/dev/shm", "nupa-example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	for _, address := range []string{"10.255.0.1", "10.255.0.2"} {
		transport := nupa.New(nupa.Config{File: filepath.Join(dir, "plane"), Size: 32 << 20, Channels: 4})
		device, err := rdma.Open(rdma.Config{Address: netip.MustParseAddr(address), Transports: []rdma.Transport{transport}})
		if err != nil {
			fmt.Println(err)
			return
		}
		defer device.Close()
		fmt.Println(device.Address(), "joined", transport.Name())
	}
	// Output:
	// 10.255.0.1 joined nupa
	// 10.255.0.2 joined nupa
}
