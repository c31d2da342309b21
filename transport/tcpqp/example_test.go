package tcpqp_test

import (
	"fmt"
	"net/netip"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/tcpqp"
)

// A device on a loopback has queue pairs that are TCP connections. The example of package rdma connects two devices.
func ExampleNew() {
	transport := tcpqp.New(tcpqp.Config{})
	device, err := rdma.Open(rdma.Config{Address: netip.MustParseAddr("127.77.5.2"), Transports: []rdma.Transport{transport}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer device.Close()
	fmt.Println(transport.Name(), "on", device.Address())
	// Output: tcp on 127.77.5.2
}
