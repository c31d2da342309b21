package rdmatest

import (
	"testing"

	"github.com/fared/fared/transport/rdma"
)

// Ends is what belongs to the two devices of a connected set.
type Ends struct {
	Sets   [2]*rdma.Set
	CQs    [2]*rdma.CQ // of sends and receives
	Memory [2]*rdma.MR
}

// Connect connects a set between two devices: each has a protection domain, a completion queue, and memory with the
// given length in bytes and access, which the end of the test deregisters. config is the remaining configuration of
// both sets.
func Connect(t testing.TB, devices [2]*rdma.Device, config rdma.SetConfig, access rdma.Access, lengths [2]int, slots [2][]rdma.Slot) (e Ends) {
	t.Helper()
	var configs [2]rdma.SetConfig
	for i, d := range devices {
		pd := d.AllocPD()
		var err error
		if e.Memory[i], err = pd.Alloc(lengths[i], access); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Memory[i].Deregister)
		e.CQs[i] = d.CreateCQ()
		configs[i] = config
		configs[i].PD, configs[i].SendCQ, configs[i].RecvCQ = pd, e.CQs[i], e.CQs[i]
	}
	var err error
	if e.Sets[0], e.Sets[1], err = connect(devices, configs, slots); err != nil {
		t.Fatal(err)
	}
	return e
}

func connect(devices [2]*rdma.Device, configs [2]rdma.SetConfig, slots [2][]rdma.Slot) (a, b *rdma.Set, err error) {
	a, offer, err := devices[0].Offer(devices[1].Address(), configs[0], slots[0])
	if err != nil {
		return nil, nil, err
	}
	b, answer, err := devices[1].Answer(offer, configs[1], slots[1])
	if err != nil {
		return nil, nil, err
	}
	return a, b, a.Finish(answer)
}
