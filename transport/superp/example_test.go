package superp_test

import (
	"fmt"
	"net/netip"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

// A device on a loopback sends and receives by SUPERp. The example of package rdma connects two devices.
func ExampleNew() {
	device, err := rdma.Open(rdma.Config{Address: netip.MustParseAddr("127.77.5.1"), Transports: []rdma.Transport{superp.New(superp.Config{Payload: 4096})}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer device.Close()
	fmt.Println(device.Address(), device.Counters()["superp"]["packets_sent"])
	// Output: 127.77.5.1 0
}
