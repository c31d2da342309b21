package nupa

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/transport/rdma"
)

// FuzzFile checks arbitrary contents of the shared file while two endpoints work. No access panics or leaves the file,
// every operation ends once, and read-only regions in private memory stay unchanged.
func FuzzFile(f *testing.F) {
	add := func(n int, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 5))
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Add([]byte{0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0})
	for seed := range uint64(30) {
		add(600, seed)
	}
	f.Fuzz(func(t *testing.T, actions []byte) {
		bed := newBed(t, 4, 12)
		hosts := []*host{bed.join(addressA), bed.join(addressB)}
		a, b := hosts[0], hosts[1]
		ca, cb := connect(t, a, b)
		channels := []rdma.Channel{ca, cb}
		region, private := b.shared(4096), make([]byte, 4096)
		b.register(1, region, everything)
		b.register(2, private, rdma.RemoteRead)
		for ; len(actions) >= 6; actions = actions[6:] {
			what, i, x := actions[0]%16, int(actions[1])&1, binary.LittleEndian.Uint32(actions[2:])
			h, c := hosts[i], channels[i]
			switch what {
			case 0, 1, 2, 3, 4:
				op := &rdma.Op{Kind: rdma.OpKind(what), Key: x & 3, Remote: addressOf(region) + uint64(x>>2)%5000, Local: make([]byte, x%3000)}
				if what >= 3 {
					op.Local = make([]byte, 8)
				}
				if x&3 == 2 {
					op.Remote = addressOf(private) + uint64(x>>2)%5000
				}
				h.tryPost(c, op)
			case 5:
				h.Do(func() { c.SetPaths([]rdma.Path{{}}) })
			case 6:
				h.Do(func() { c.SetPaths(live()) })
			case 7:
				h.Do(func() { h.receives += int(x % 4); c.Ready() })
			case 8, 9:
				h.Do(h.tr.serve)
			case 10:
				h.Do(h.tr.check)
			case 11: // a word of a table
				bed.area.u64((int(x) % (ringsAt / 8)) * 8 &^ 7).Store(uint64(x) * 0x9e3779b97f4a7c15)
			case 12: // a byte of a ring's header or its first slots
				bed.area.mem[ringsAt+(int(x>>8)&3)*ringSize+int(x>>10)%(ringHeader+4*slotSize)] = byte(x)
			case 13: // a plausible word of a slot
				r := bed.area.ring(int(x>>8) & 3)
				seq := r.first().Load() + uint64(x>>16)%8
				r.state(seq).Store(word(seq, uint64(x)%8))
			case 14: // the table of pages
				bed.area.page(int(x>>16) % bed.area.pages).Store(x)
			case 15:
				if n := int(x % 20000); n > 0 {
					if m, err := h.tr.Alloc(n); err == nil {
						h.tr.Registered(x, 0, m, everything)
						if x&1<<20 != 0 {
							h.tr.Deregistered(x)
						}
						h.tr.Free(m)
					}
				}
			}
		}
		for i, h := range hosts {
			h.Do(channels[i].Close)
			if len(h.posted) != 0 {
				t.Errorf("%d operations have not ended", len(h.posted))
			}
		}
		for _, x := range private {
			if x != 0 {
				t.Fatal("written to memory that may only be read")
			}
		}
		for _, h := range hosts {
			h.tr.detach()
		}
		bed.area.clearEnded(bed)
	})
}

// FuzzOpen checks that all parts of a file that opens are inside the file.
func FuzzOpen(f *testing.F) {
	b := make([]byte, 1<<20)
	if _, err := format(b, 1, 42); err != nil {
		f.Fatal(err)
	}
	f.Add(b[:64])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, header []byte) {
		mem := make([]byte, 1<<20)
		copy(mem[:64], header)
		if len(header) >= 64 && header[63] != 1 { // give the fuzzer a correct checksum
			binary.LittleEndian.PutUint32(mem[12:], headerSum(mem))
		}
		a, err := open(mem, false)
		if err != nil {
			return
		}
		if a.heapEnd() > len(mem) || ringsAt+a.rings*ringSize > a.pagesAt || a.pages < 1 {
			t.Fatalf("%+v", a)
		}
	})
}
