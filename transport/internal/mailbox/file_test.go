package mailbox

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"
)

func TestOpenRefuses(t *testing.T) {
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "memory")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	taken := filepath.Join(t.TempDir(), "memory")
	f, err := Open(taken, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ path, want string }{
		{file("short"), "it has 5 bytes, not 2097152 or more"},
		{file(foreign + strings.Repeat("\x00", Size)), "the tables of NUPA"},
		{taken, "another process on this machine is end 1"},
		{"/dev/null", "of the kind \"mem\""},
		{t.TempDir(), "is a directory"},
	} {
		if _, err := Open(tc.path, 1); err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), tc.path) {
			t.Errorf("%s: got %v, want %q", tc.path, err, tc.want)
		}
	}
	f.Close()
	if f, err = Open(taken, 1); err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// pair opens both ends of a file and begins a session.
func pair(t *testing.T, path string) (ends [2]*File) {
	t.Helper()
	for i := range ends {
		f, err := Open(path, i)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(f.Close)
		ends[i] = f
	}
	for range 2 {
		_, _ = ends[0].Beat(), ends[1].Beat()
	}
	for i, e := range ends {
		if why := e.Beat(); why != nil {
			t.Fatalf("end %d: %v", i, why)
		}
	}
	return ends
}

// TestFile carries frames of all lengths in both directions at once, with each set of instructions that the processor
// has.
func TestFile(t *testing.T) {
	for _, fl := range flushers() {
		t.Run(fl.name, func(t *testing.T) {
			ends := pair(t, filepath.Join(t.TempDir(), "memory"))
			for _, e := range ends {
				e.End.mem = mapped{e.mem[:Size], fl}
			}
			const frames = 200
			length := func(n int) int { return 1 + n*n*31%MaxFrame }
			data := make([]byte, MaxFrame+256)
			rng := rand.NewChaCha8([32]byte{1})
			rng.Read(data)
			content := func(n int) []byte { return data[n%256:][:length(n)] }
			var wait sync.WaitGroup
			for i, e := range ends {
				wait.Go(func() {
					for n := 0; n < frames; {
						if sent, up := e.Send(content(n)); sent {
							n++
						} else if !up {
							t.Errorf("end %d has no session", i)
							return
						} else {
							runtime.Gosched()
						}
					}
				})
				wait.Go(func() {
					for n, deadline := 0, time.Now().Add(time.Minute); n < frames; {
						if e.Receive(func(b []byte) {
							if !bytes.Equal(b, content(n)) {
								t.Errorf("end %d: frame %d is wrong", i, n)
							}
							n++
						}) == 0 {
							runtime.Gosched()
						}
						if time.Now().After(deadline) {
							t.Errorf("end %d: only %d frames have arrived", i, n)
							return
						}
					}
				})
			}
			wait.Wait()
			for i, e := range ends {
				if e.Torn() > 0 {
					t.Errorf("end %d: %d torn frames", i, e.Torn())
				}
			}
		})
	}
}

// TestLeave has an end leave and return: the other one notices it at the next beat, and begins a session with the new
// end.
func TestLeave(t *testing.T) {
	ends := pair(t, filepath.Join(t.TempDir(), "memory"))
	ends[1].Leave()
	if why := ends[0].Beat(); why == nil {
		t.Error("the end has not noticed that its peer has left")
	}
	if sent, up := ends[0].Send([]byte{1}); sent || up {
		t.Errorf("sent %v, up %v without a peer", sent, up)
	}
	again := newEnd(ends[1].End.mem, 1, halfSize, ringLines, newRun)
	for range 2 {
		_, _ = again.Beat(), ends[0].Beat()
	}
	if sent, up := ends[0].Send([]byte{1}); !sent || !up {
		t.Errorf("sent %v, up %v to the new end", sent, up)
	}
	if n := again.Receive(func([]byte) {}); n != 1 {
		t.Errorf("the new end has received %d frames", n)
	}
}

// TestDeadPeer has a peer without a heartbeat, and one that reads nothing: each time the end begins another session
// after Beats beats, and not before. Counts of other sessions make no room.
func TestDeadPeer(t *testing.T) {
	ends := pair(t, filepath.Join(t.TempDir(), "memory"))
	e, peer := ends[0], ends[1]
	for _, n := range []int{0, MaxFrame + 1} {
		if sent, up := e.Send(make([]byte, n)); sent || up {
			t.Errorf("%d bytes: sent %v, up %v", n, sent, up)
		}
	}
	_ = e.Beat() // sees the last heartbeat of the peer
	for _, tc := range []struct {
		want  error
		peers func()
	}{
		{errSilent, func() {}},
		{errStuck, func() {
			e.Send([]byte{1})
			_ = peer.Beat()
		}},
	} {
		run := e.run
		for beat := range Beats {
			tc.peers()
			if why := e.Beat(); beat < Beats-1 && why != nil || beat == Beats-1 && why != tc.want {
				t.Errorf("beat %d: %v, want %v at beat %d", beat, why, tc.want, Beats-1)
			}
		}
		if e.run == run {
			t.Errorf("%v, and no new session", tc.want)
		}
		for range 2 {
			_, _ = peer.Beat(), e.Beat()
		}
		if n := peer.Receive(func([]byte) {}); n != 0 {
			t.Errorf("%d frames of the session that has ended", n)
		}
	}
	for sent := true; sent; {
		sent, _ = e.Send(make([]byte, MaxFrame))
	}
	other := state{run: peer.run, peer: e.run + 1, beat: peer.beat, read: e.head}.line()
	peer.End.mem.store(peer.mine, other[:])
	if sent, up := e.Send(make([]byte, MaxFrame)); sent || !up {
		t.Errorf("sent %v, up %v by the count of another session", sent, up)
	}
}

// BenchmarkInvalidate measures loads that depend on each other: after invalidate they come from memory, and take a
// multiple of the time from the cache. Only the time shows that invalidate drops lines of a cache that is coherent.
func BenchmarkInvalidate(b *testing.B) {
	const lines = 256
	mem := make([]uint64, (lines+1)*lineSize/8)
	first := unsafe.Pointer(&mem[0])
	if rest := uintptr(first) % lineSize; rest > 0 {
		mem = mem[(lineSize-rest)/8:]
		first = unsafe.Pointer(&mem[0])
	}
	order := rand.New(rand.NewPCG(1, 1)).Perm(lines)
	for i, at := range order {
		mem[at*lineSize/8] = uint64(order[(i+1)%lines] * lineSize / 8)
	}
	sink := uint64(0)
	walk := func() time.Duration {
		begin := time.Now()
		for range lines {
			sink = mem[sink]
		}
		return time.Since(begin)
	}
	for _, fl := range flushers() {
		b.Run(fl.name, func(b *testing.B) {
			var cold, warm time.Duration
			for b.Loop() {
				fl.invalidate(first, lines)
				cold += walk()
				warm += walk()
			}
			loads := float64(b.N * lines)
			b.ReportMetric(float64(cold.Nanoseconds())/loads, "ns/load-invalidated")
			b.ReportMetric(float64(warm.Nanoseconds())/loads, "ns/load-cached")
			b.ReportMetric(0, "ns/op")
		})
	}
}
