package nupa

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// TestOpenRefuses checks that every wrong word of the header is refused with an error that contains its offset.
func TestOpenRefuses(t *testing.T) {
	fresh := func() []byte {
		b := make([]byte, ringsAt+ringSize+16*pageSize)
		if _, err := format(b, 1, 42); err != nil {
			t.Fatal(err)
		}
		return b
	}
	if _, err := open(fresh(), false); err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	set := func(at int, v uint32) func([]byte) []byte { // with a correct checksum
		return func(b []byte) []byte {
			le.PutUint32(b[at:], v)
			le.PutUint32(b[12:], headerSum(b))
			return b
		}
	}
	for _, tc := range []struct {
		name   string
		damage func([]byte) []byte
		want   string
	}{
		{"something else", func(b []byte) []byte { copy(b, "\x7fELF"); return b }, "magic"},
		{"another version", func(b []byte) []byte { le.PutUint32(b[8:], 1); return b }, "version 1 at byte 8 instead of 2"},
		{"a flipped bit", func(b []byte) []byte { b[40] ^= 1; return b }, "checksum"},
		{"cut", func(b []byte) []byte { return b[:len(b)-pageSize] }, "size"},
		{"cut in the header", func(b []byte) []byte { return b[:100] }, "less than a header"},
		{"other slots", set(36, 64), "64 at byte 36, where version 2 has 128"},
		{"too many rings", set(32, 1<<31), "rings"},
		{"of several kernels", set(kernelsAt, 1), "made for endpoints on several kernels"},
		{"rings beyond the end", set(32, 1000), "1000 channels need more"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := open(tc.damage(fresh()), false)
			if !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// TestHeaderBytes checks the bytes of the header against the layout: other builds map the same file.
func TestHeaderBytes(t *testing.T) {
	b := make([]byte, 1<<20)
	if _, err := format(b, 1, 0x1122334455667788); err != nil {
		t.Fatal(err)
	}
	want := "4e55504166617265" + "02000000" + "9fcc0d80" + "0000100000000000" + "8877665544332211" +
		"01000000" + "80000000" + "00000400" + "40000000" + "00100000" + "00000000" + "0000090000000000"
	if got := fmt.Sprintf("%x", b[:64]); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestGeometry checks for many sizes that no parts overlap and all are inside the file.
func TestGeometry(t *testing.T) {
	for i := range 10000 {
		size, rings := rand.Int64N(1<<28), rand.IntN(maxRings)
		if i == 0 {
			size, rings = 138227713, 126 // the table ends at the end of a page
		}
		a, err := geometry(size, rings)
		if err != nil {
			if rings > 0 && size > int64(ringsAt+rings*ringSize+4*pageSize) {
				t.Fatalf("%d bytes, %d rings: %v", size, rings, err)
			}
			continue
		}
		if a.pagesAt < ringsAt+rings*ringSize || a.heapAt < a.pagesAt+4*a.pages || int64(a.heapEnd()) > size || a.heapAt%pageSize != 0 {
			t.Fatalf("%d bytes, %d rings: %+v", size, rings, a)
		}
		if waste := size - int64(a.heapEnd()); waste > 3*pageSize+size/1000 {
			t.Fatalf("%d bytes, %d rings: %d bytes are for nothing", size, rings, waste)
		}
	}
}

func TestMapFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	const size = ringsAt + 2*ringSize + 16*pageSize
	config := func(path string, size int64, rings int) Config {
		return Config{File: path, Size: size, Channels: rings, Timing: rdma.Timing{GiveUp: time.Second}}
	}
	f, a, err := mapFile(config(path, size, 2))
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	g, b, err := mapFile(config(path, 1<<30, 7)) // exists already: its size applies
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	if a.id != b.id || b.rings != 2 || len(b.mem) != size {
		t.Errorf("%+v", b)
	}
	a.u64(regionsAt).Store(77)
	if b.u64(regionsAt).Load() != 77 {
		t.Error("two mappings, two memories")
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if ok, err := f.claim(3); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := g.claim(3); ok || err != nil {
		t.Errorf("claimed twice: %v, %v", ok, err)
	}
	if !f.alive(3) || !g.alive(3) || g.alive(4) {
		t.Error("who lives is not who has claimed")
	}
	f.release(3)
	if g.alive(3) {
		t.Error("alive after release")
	}
	other := filepath.Join(t.TempDir(), "other")
	text := bytes.Repeat([]byte("not a plane\n"), 1000)
	if err := os.WriteFile(other, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := mapFile(config(other, size, 2)); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadFile(other); !bytes.Equal(left, text) {
		t.Error("the file of another program was changed")
	}
	if _, _, err := mapFile(config(filepath.Join(t.TempDir(), "small"), 1000, 2)); !errors.Is(err, ErrFile) {
		t.Errorf("got %v", err)
	}
}

// TestHeap compares the allocator with a reference model, a list of allocations.
func TestHeap(t *testing.T) {
	for seed := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, 2))
		bed := newBed(t, 1, 60)
		a := bed.area
		type allocation struct {
			owner int
			b     []byte
		}
		var live []allocation
		used := make([]int, a.pages) // owner+1
		for range 3000 {
			owner := rng.IntN(3)
			switch rng.IntN(10) {
			default:
				n := rng.IntN(6 * pageSize)
				want := max(1, (n+pageSize-1)/pageSize)
				fits, run := false, 0
				for _, u := range used {
					if run++; u != 0 {
						run = 0
					}
					fits = fits || run >= want
				}
				b, err := a.alloc(owner, n)
				if (err == nil) != fits {
					t.Fatalf("%d bytes: %v, but the dumb twin says %v", n, err, fits)
				}
				if err != nil {
					continue
				}
				at, ok := a.offset(b[:1])
				if !ok || at%pageSize != 0 || len(b) != n {
					t.Fatalf("at %d, %d bytes", at, len(b))
				}
				for p := range want {
					if i := (at-a.heapAt)/pageSize + p; used[i] != 0 {
						t.Fatalf("page %d is %d's", i, used[i]-1)
					} else {
						used[i] = owner + 1
					}
				}
				for i, x := range b[:cap(b)] {
					if x != 0 {
						t.Fatalf("byte %d is not zero", i)
					}
				}
				for i := range b {
					b[i] = 0xff
				}
				live = append(live, allocation{owner, b})
			case 5, 6, 7, 8:
				if len(live) == 0 {
					continue
				}
				i := rng.IntN(len(live))
				l := live[i]
				if a.free((l.owner+1)%3, l.b) || len(l.b) > pageSize && a.free(l.owner, l.b[pageSize:]) {
					t.Fatal("freed what is another's, or only a part")
				}
				if !a.free(l.owner, l.b) || a.free(l.owner, l.b) {
					t.Fatal("free")
				}
				at, _ := a.offset(l.b[:1])
				clear(used[(at-a.heapAt)/pageSize:][:max(1, (len(l.b)+pageSize-1)/pageSize)])
				live = append(live[:i], live[i+1:]...)
			case 9:
				if rng.IntN(50) != 0 {
					continue
				}
				a.freeAll(owner)
				kept := live[:0]
				for _, l := range live {
					if l.owner != owner {
						kept = append(kept, l)
					}
				}
				live = kept
				for i := range used {
					if used[i] == owner+1 {
						used[i] = 0
					}
				}
			}
			for i, u := range used {
				if got := int(a.page(i).Load() & ownerMask); got != u {
					t.Fatalf("seed %d: page %d is %d's, not %d's", seed, i, got-1, u-1)
				}
			}
		}
	}
}
