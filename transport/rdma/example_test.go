package rdma_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/tcpqp"
)

// Two devices connect a queue pair set with a slot in each of two planes, and one writes to the memory of the other.
// With Config.Weights the slots would come from fared.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	addresses := []netip.Addr{netip.MustParseAddr("127.77.4.1"), netip.MustParseAddr("127.77.4.2")}
	slots := []rdma.Slot{{Slot: 0, Plane: "p0", Port: 49152, Share: 666_666_667}, {Slot: 1, Plane: "p1", Port: 49153, Share: 333_333_333}}

	var devices []*rdma.Device
	var configs []rdma.SetConfig
	var regions []*rdma.MR
	for _, address := range addresses {
		device, err := rdma.Open(rdma.Config{Address: address, Transports: []rdma.Transport{tcpqp.New(tcpqp.Config{})}})
		if err != nil {
			fmt.Println(err)
			return
		}
		defer device.Close()
		pd, cq := device.AllocPD(), device.CreateCQ()
		region, err := pd.Alloc(32, rdma.LocalWrite|rdma.RemoteWrite)
		if err != nil {
			fmt.Println(err)
			return
		}
		devices, regions = append(devices, device), append(regions, region)
		configs = append(configs, rdma.SetConfig{PD: pd, SendCQ: cq, RecvCQ: cq})
	}
	// Offer and answer are messages; an application carries them to its peer, or uses Connect and Listener.
	set, offer, err := devices[0].Offer(addresses[1], configs[0], slots)
	if err != nil {
		fmt.Println(err)
		return
	}
	peer, answer, err := devices[1].Answer(offer, configs[1], slots)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := set.Finish(answer); err != nil {
		fmt.Println(err)
		return
	}

	if _, err := peer.PostRecv(rdma.RecvWR{ID: 1}); err != nil { // for the immediate
		fmt.Println(err)
		return
	}
	n := copy(regions[0].Bytes(), "over both planes")
	if _, err := set.PostSend(rdma.SendWR{
		ID: 2, Opcode: rdma.WriteImmediate, Immediate: uint32(n),
		Local: rdma.SGE{MR: regions[0], Length: n}, RemoteAddress: regions[1].Address(), RemoteKey: regions[1].Key(),
	}); err != nil {
		fmt.Println(err)
		return
	}
	for _, end := range []int{1, 0} {
		completions := make([]rdma.Completion, 1)
		if _, err := configs[end].RecvCQ.Wait(ctx, completions); err != nil {
			fmt.Println(err)
			return
		}
		c := completions[0]
		if end == 1 {
			fmt.Printf("received %q, error %v\n", regions[1].Bytes()[:c.Immediate], c.Err)
		} else {
			fmt.Printf("work request %d is complete, error %v\n", c.ID, c.Err)
		}
	}
	// Output:
	// received "over both planes", error <nil>
	// work request 2 is complete, error <nil>
}
