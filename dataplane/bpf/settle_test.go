package bpf

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// chooser is the program without a device; it counts the packets of each place.
type chooser struct {
	testing.TB
	objects objects
	sent    [maxPlaces]uint64
}

func newChooser(t testing.TB) *chooser {
	t.Helper()
	netnstest.Require(t)
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	c := &chooser{TB: t}
	if err := spec.LoadAndAssign(&c.objects, nil); err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { _, _ = c.objects.FaredSteer.Close(), c.objects.steerMaps.Close() })
	c.put(c.objects.FaredPorts, uint32(roce>>6), uint64(1)<<(roce&63))
	c.put(c.objects.FaredDests, steerTarget{Destination: addressOf(families[0].destination.Addr())}, steerDestination{Group: 7})
	for i := range uint32(maxPlaces) {
		c.put(c.objects.FaredPlaces, i, steerPlace{Ifindex: 1000 + i, Flags: placeNextHop4})
	}
	return c
}

func (c *chooser) put(m *ebpf.Map, key, value any) {
	c.Helper()
	if err := m.Put(key, value); err != nil {
		c.Fatal(err)
	}
}

// place returns the place of a packet with a source port, -1 if it is dropped.
func (c *chooser) place(port uint16) int {
	c.Helper()
	packet := make([]byte, 64)
	copy(packet[12:], []byte{8, 0, 0x45, 0, 0, 50})
	packet[23] = 17
	copy(packet[26:], families[0].source.Addr().AsSlice())
	copy(packet[30:], families[0].destination.Addr().AsSlice())
	binary.BigEndian.PutUint16(packet[34:], port)
	binary.BigEndian.PutUint16(packet[36:], roce)
	if _, err := c.objects.FaredSteer.Run(&ebpf.RunOptions{Data: packet}); err != nil {
		c.Fatal(err)
	}
	found := -1
	for i := range c.sent {
		var each []steerCounter
		if err := c.objects.FaredSent.Lookup(uint32(i), &each); err != nil {
			c.Fatal(err)
		}
		n := uint64(0)
		for _, one := range each {
			n += one.Packets
		}
		if n != c.sent[i] {
			c.sent[i], found = n, i
		}
	}
	return found
}

// TestSettle checks that the program sends the flows of a group with members that are down to the places that they have
// once the group has been written without these members, for any weights: the flows move once.
func TestSettle(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	c := newChooser(t)
	r := rand.New(rand.NewPCG(5, 6))
	for round := range 12 {
		l := testLayout([]int{4, 8, 1 + r.IntN(maxPlaces), maxPlaces}[round%4], false)
		weights, left := make([]uint32, len(l.order)), make([]uint32, len(l.order))
		down := uint64(0)
		for i := range weights {
			weights[i] = []uint32{0, 1, 1, 1 + r.Uint32N(9), 1 + r.Uint32N(maxWeight)}[r.IntN(5)]
			if left[i] = weights[i]; r.IntN(3) == 0 {
				left[i], down = 0, down|1<<l.place[l.order[i]]
			}
		}
		for port := range uint16(6) {
			dark, live := down, ^uint64(0)
			if port%2 == 0 { // set down by the control plane
				dark, live = 0, ^down
			}
			c.put(c.objects.FaredGroups, uint32(7), l.value(weighted(l, weights)))
			c.put(c.objects.FaredLive, uint32(0), steerLive{V4: live})
			c.put(c.objects.FaredDark, uint32(0), dark)
			before := c.place(port)
			c.put(c.objects.FaredGroups, uint32(7), l.value(weighted(l, left)))
			if after := c.place(port); before != after || after >= 0 && down>>after&1 != 0 {
				t.Fatalf("weights %v, left %v: port %d is sent to place %d, and to %d with the group written", weights, left, port, before, after)
			}
		}
	}
}

// TestSettleWhileGroupIsWritten checks that a flow whose place is down gets another one from a group that is half
// written: the walk along its members ends without one.
func TestSettleWhileGroupIsWritten(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	c := newChooser(t)
	l := testLayout(4, false)
	v := l.value(weighted(l, []uint32{1, 1, 1, 1}))
	v.Count = 0
	c.put(c.objects.FaredGroups, uint32(7), v)
	c.put(c.objects.FaredLive, uint32(0), steerLive{V4: 1 << 2})
	for port := range uint16(4) {
		if place := c.place(port); place != 2 {
			t.Errorf("port %d is sent to place %d, not to the usable one", port, place)
		}
	}
}
