package rdma

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

// TestStripeIsExact checks after every piece that each channel has its share of the bytes, within the largest piece.
func TestStripeIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		n := 1 + r.IntN(12)
		shares := make([]int64, n)
		sum := int64(0)
		for i := range shares {
			if r.IntN(4) > 0 {
				shares[i] = int64(r.IntN(1e9))
			}
			sum += shares[i]
		}
		var s stripe
		s.set(shares)
		sent := make([]int64, n)
		total, largest := int64(0), 1<<r.IntN(20)
		for range 500 {
			size := 1 + r.IntN(largest)
			i := s.pick(size)
			if sum == 0 {
				if i != -1 {
					t.Fatalf("channel %d where none has a share", i)
				}
				break
			}
			s.take(i, size)
			sent[i] += int64(size)
			total += int64(size)
			for j := range shares {
				due := float64(total) * float64(shares[j]) / float64(sum)
				// Ahead by at most one piece; behind by at most one piece per other channel.
				if d := float64(sent[j]) - due; d > float64(largest)+1 || d < -float64(largest*(n-1))-1 {
					t.Fatalf("channel %d has %d of %d bytes, due %.0f (shares %v, pieces to %d)", j, sent[j], total, due, shares, largest)
				}
			}
		}
	}
}

func TestStripeForgetsWhatWasOwed(t *testing.T) {
	var s stripe
	s.set([]int64{1, 1})
	for range 10 {
		s.take(0, 1000) // as if the other channel never had its turn
	}
	s.set([]int64{1, 1})
	if a := s.pick(1); a != 0 {
		t.Errorf("channel %d is first after new shares, want the first", a)
	}
}

func FuzzHeader(f *testing.F) {
	var b [HeadSize]byte
	for _, h := range []header{{}, {kind: kindSendImmediate, length: 5, message: 7, immediate: 9, offset: 3, total: 8}, {kind: kindWrite, total: maxMessage}} {
		h.marshal(&b)
		f.Add(b[:])
	}
	f.Add([]byte("short"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var h, again header
		if h.unmarshal(in) != nil {
			return
		}
		var out [HeadSize]byte
		h.marshal(&out)
		if string(out[:]) != string(in) {
			t.Fatalf("%x became %x", in, out)
		}
		if err := again.unmarshal(out[:]); err != nil || again != h {
			t.Fatalf("%+v became %+v, %v", h, again, err)
		}
	})
}

// idle is a transport without peers.
type idle struct{ Host }

func (*idle) Name() string                           { return "idle" }
func (*idle) Limits() Limits                         { return Limits{MaxOp: 1 << 20, Ordered: true} }
func (i *idle) Start(h Host) error                   { i.Host = h; return nil }
func (*idle) Channel(ChannelConfig) (Channel, error) { return nil, errors.New("no channels here") }
func (*idle) Flush()                                 {}
func (*idle) Counters() map[string]uint64            { return nil }
func (*idle) Stop()                                  {}

func TestMemoryRegions(t *testing.T) {
	d, err := Open(Config{Address: netip.MustParseAddr("127.0.0.1"), Transports: []Transport{&idle{}}, Clock: func() time.Duration { return 0 }})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	pd, other := d.AllocPD(), d.AllocPD()
	b := make([]byte, 5000)
	m, err := pd.Register(b, RemoteWrite|RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	a := m.Address()
	for _, c := range []struct {
		name    string
		pd      *PD
		key     uint32
		address uint64
		n       int
		need    Access
		fine    bool
	}{
		{"all of it", pd, m.Key(), a, 5000, RemoteWrite, true},
		{"the last byte", pd, m.Key(), a + 4999, 1, RemoteRead, true},
		{"nothing", pd, m.Key(), a, 0, RemoteRead, true},
		{"nothing, elsewhere", pd, m.Key(), 1, 0, RemoteRead, true},
		{"one too many", pd, m.Key(), a, 5001, RemoteWrite, false},
		{"one before", pd, m.Key(), a - 1, 2, RemoteWrite, false},
		{"past the end", pd, m.Key(), a + 5000, 1, RemoteWrite, false},
		{"around the end of the address space", pd, m.Key(), ^uint64(0), 2, RemoteWrite, false},
		{"without the right", pd, m.Key(), a, 8, RemoteAtomic, false},
		{"another domain", other, m.Key(), a, 1, RemoteRead, false},
		{"another key", pd, m.Key() ^ 1, a, 1, RemoteRead, false},
		{"another key, high bit", pd, m.Key() ^ 1<<31, a, 1, RemoteRead, false},
		{"key 0", pd, 0, a, 1, RemoteRead, false},
	} {
		got, err := d.regions.find(c.pd, c.key, c.address, c.n, c.need)
		if fine := err == nil; fine != c.fine || fine && len(got) != c.n || !fine && !errors.Is(err, ErrRemoteAccess) {
			t.Errorf("%s: %d bytes, %v", c.name, len(got), err)
		}
	}
	flat := m.FlatAddress()
	for _, c := range []struct {
		name    string
		pd      *PD
		address uint64
		n       int
		need    Access
		fine    bool
	}{
		{"all of it", pd, flat, 5000, RemoteWrite, true},
		{"the last byte", pd, flat + 4999, 1, RemoteRead, true},
		{"nothing", pd, flat, 0, RemoteRead, true},
		{"nothing, elsewhere", pd, 1, 0, RemoteRead, false},
		{"one too many", pd, flat, 5001, RemoteWrite, false},
		{"one before", pd, flat - 1, 2, RemoteWrite, false},
		{"past the end", pd, flat + 5000, 1, RemoteWrite, false},
		{"around the end of the address space", pd, ^uint64(0), 2, RemoteWrite, false},
		{"without the right", pd, flat, 8, RemoteAtomic, false},
		{"another domain", other, flat, 1, RemoteRead, false},
		{"another key", pd, flat + 1<<32, 1, RemoteRead, false},
		{"without the key", pd, a, 1, RemoteRead, false},
	} {
		got, err := d.regions.findFlat(c.pd, c.address, c.n, c.need)
		if fine := err == nil; fine != c.fine || fine && len(got) != c.n || !fine && !errors.Is(err, ErrRemoteAccess) {
			t.Errorf("flat, %s: %d bytes, %v", c.name, len(got), err)
		}
	}
	key := m.Key()
	m.Deregister()
	m.Deregister()
	if _, err := d.regions.find(pd, key, a, 1, RemoteRead); err == nil {
		t.Error("a region that is gone is still there")
	}
	if _, err := d.regions.findFlat(pd, flat, 1, RemoteRead); err == nil || len(d.regions.flat) > 0 {
		t.Error("a region that is gone is still at its flat address")
	}
	again, err := pd.Register(b, RemoteRead)
	if err != nil || again.Key() == key {
		t.Errorf("key %#x is given again (%v)", key, err)
	}
}

// TestFlatAddressesAreApart checks that a key is refused with which flat addresses of two regions would overlap or wrap
// around, and that a region of more than 4 GiB is found at each of its flat addresses.
func TestFlatAddressesAreApart(t *testing.T) {
	const size = 5 << 30
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(b)
	r := regions{byKey: map[uint32]*MR{}, flat: map[uint32][]*MR{}}
	if !r.add(&MR{b: b, address: 100 << 32, key: 7}) {
		t.Fatal("the first region is refused")
	}
	for i, m := range []*MR{
		{b: b[:4096], address: 100 << 32, key: 0},         // not a key
		{b: b[:4096], address: 100<<32 + size, key: 7},    // in use
		{b: b[:4096], address: 99<<32 + 4096, key: 9},     // overlaps in the second block
		{b: b, address: 99 << 32, key: 7},                 // in use
		{b: b, address: 98 << 32, key: 8},                 // overlaps from below
		{b: b[:4096], address: 100 << 32, key: 1<<32 - 1}, // wraps around
		{b: b, address: 100 << 32, key: 1<<32 - 101},      // its end wraps around
	} {
		if r.add(m) {
			t.Errorf("region %d is added", i)
		}
	}
	for _, offset := range []uint64{0, 1<<32 - 1, 1 << 32, size - 1} {
		if got, err := r.findFlat(nil, 107<<32+offset, 1, 0); err != nil || &got[0] != &b[offset] {
			t.Errorf("offset %#x: %v", offset, err)
		}
	}
}

// pool is a transport that is an Allocator.
type pool struct {
	idle
	out int
}

func (p *pool) Alloc(n int) ([]byte, error) { p.out++; return make([]byte, n), nil }
func (p *pool) Free([]byte)                 { p.out-- }

// TestMemoryGoesBack checks that memory returns to its transport, also if it does not become a region.
func TestMemoryGoesBack(t *testing.T) {
	var own pool
	d, err := Open(Config{Address: netip.MustParseAddr("127.0.0.1"), Transports: []Transport{&own}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	pd := d.AllocPD()
	if _, err := pd.Alloc(100, RemoteAtomic<<1); err == nil || own.out != 0 {
		t.Errorf("a region with an unknown right: %v, and %d pieces of memory are out", err, own.out)
	}
	m, err := pd.Alloc(100, RemoteRead)
	if err != nil || own.out != 1 {
		t.Fatalf("%v, %d pieces of memory are out", err, own.out)
	}
	m.Deregister()
	m.Deregister()
	if own.out != 0 {
		t.Errorf("%d pieces of memory are out", own.out)
	}
}

// TestAddressesOfRegionsAreApart checks that the addresses of regions neither overlap nor touch.
func TestAddressesOfRegionsAreApart(t *testing.T) {
	d, err := Open(Config{Address: netip.MustParseAddr("127.0.0.1"), Transports: []Transport{&idle{}}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	r := rand.New(rand.NewPCG(3, 4))
	end := uint64(0)
	for range 300 {
		m, err := d.AllocPD().Register(make([]byte, r.IntN(3*pageSize)), 0)
		if err != nil {
			t.Fatal(err)
		}
		if m.Address() < end+pageSize {
			t.Fatalf("a region at %#x after one that ends at %#x", m.Address(), end)
		}
		end = m.Address() + uint64(len(m.Bytes()))
	}
}

func TestAtomics(t *testing.T) {
	d, err := Open(Config{Address: netip.MustParseAddr("127.0.0.1"), Transports: []Transport{&idle{}}})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	pd := d.AllocPD()
	m, err := pd.Register(make([]byte, 64), RemoteAtomic)
	if err != nil {
		t.Fatal(err)
	}
	base := (m.Address() + 7) &^ 7
	if was, err := d.regions.atomically(pd, OpFetchAdd, m.Key(), base, 0, 5); was != 0 || err != nil {
		t.Errorf("fetch and add: %d, %v", was, err)
	}
	if was, err := d.regions.atomically(pd, OpCompareSwap, m.Key(), base, 4, 9); was != 5 || err != nil {
		t.Errorf("compare and swap that does not: %d, %v", was, err)
	}
	if was, err := d.regions.atomically(pd, OpCompareSwap, m.Key(), base, 5, 9); was != 5 || err != nil {
		t.Errorf("compare and swap: %d, %v", was, err)
	}
	if was, err := d.regions.atomically(pd, OpFetchAdd, m.Key(), base, 0, ^uint64(0)); was != 9 || err != nil {
		t.Errorf("fetch and add of -1: %d, %v", was, err)
	}
	if got := Uint64(m.Bytes()[base-m.Address():]); got != 8 {
		t.Errorf("memory has %d", got)
	}
	for _, a := range []uint64{base + 1, base + 60} {
		if _, err := d.regions.atomically(pd, OpFetchAdd, m.Key(), a, 0, 1); !errors.Is(err, ErrRemoteAccess) {
			t.Errorf("atomic at %#x: %v", a, err)
		}
	}
}
