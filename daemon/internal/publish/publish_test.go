package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/testkit/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// loop is a loop that changes its state at random. The mutex takes the place of its goroutine.
type loop struct {
	mu           sync.Mutex
	r            *rand.Rand
	vectors      map[uint32]status.Vector
	destinations map[status.Key]status.Destination
	layout       status.Layout
	first        uint16         // port
	answer       *atomic.Uint32 // of the data plane, which is asked for ports: added to first
	builder      *status.Builder
	stopped      bool
}

func newLoop(seed uint64) *loop {
	l := &loop{
		r: rand.New(rand.NewPCG(seed, 1)), vectors: map[uint32]status.Vector{}, destinations: map[status.Key]status.Destination{}, first: 50000,
	}
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, text := range texts {
			out = append(out, netip.MustParsePrefix(text))
		}
		return out
	}
	l.layout = status.Layout{Groups: []status.LayoutGroup{
		{Sources: prefixes("10.255.0.1/32", "10.255.0.9/32", "fd00::1/128"), Planes: []status.LayoutPlane{{Name: "p0", SubPorts: []string{"a", "b"}}, {Name: "p1", SubPorts: []string{"c"}}}},
		{Sources: prefixes("10.255.0.5/32"), Planes: []status.LayoutPlane{{Name: "p1", SubPorts: []string{"d"}}, {Name: "p2", SubPorts: []string{"e", "f"}}}},
	}}
	l.layout.Planes = []string{"p0", "p1", "p2"}
	for i, device := range []string{"a", "b", "c", "d", "e", "f"} {
		l.layout.SubPorts = append(l.layout.SubPorts, status.LayoutSubPort{Device: device, Plane: i / 2})
	}
	l.layout.SubPorts[5].Netns = "other"
	l.layout.Services = []status.ServiceRange{{Protocol: 17, First: 4791, Last: 4791}, {Protocol: 6, First: 4800, Last: 5055}}
	l.setPorts()
	l.builder = status.NewBuilder(l, l.layout, "run 1")
	return l
}

// setPorts makes ports of the present first port. Views keep the function of their layout.
func (l *loop) setPorts() {
	base, answer := l.first, new(atomic.Uint32)
	l.answer = answer
	l.layout.Ports = func(_ status.FlowService, src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, string) {
		first := base + uint16(answer.Load())
		s, d := src.AsSlice(), dst.AsSlice()
		for i, slot := range v.Slots {
			buf = append(buf, first+uint16(s[len(s)-1])<<4+uint16(d[len(d)-1])+uint16(i)+uint16(slot.Plane+slot.SubPort)*1000)
		}
		return buf, []string{"uniform", "hash", "asked"}[first%3]
	}
}

func (l *loop) Vector(id uint32) (status.Vector, bool) { v, ok := l.vectors[id]; return v, ok }
func (l *loop) Destination(key status.Key) (status.Destination, bool) {
	d, ok := l.destinations[key]
	return d, ok
}
func (l *loop) Planes() []status.Plane     { return nil }
func (l *loop) Sessions() []status.Session { return nil }
func (l *loop) Process() status.Process    { return status.Process{} }

// do implements status.Do.
func (l *loop) do(_ context.Context, fn func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return errors.New("stopped")
	}
	fn()
	return nil
}

// destination returns the n-th destination of a source group.
func destination(n, group int) status.Key {
	key := status.Key{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(1 + n>>8), byte(n)}), 32), Source: group}
	if n%3 == 0 && group == 0 {
		key.Prefix = netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(n >> 8), 15: byte(n)}), 128)
	}
	return key
}

// group returns the source group of a vector, as the core numbers them.
func (l *loop) group(id uint32) int { return int(id-1) % len(l.layout.Groups) }

// change makes a few random changes among n destinations, and commits them as one step or several.
func (l *loop) change(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	const vectors = 8
	flip := func(n int) bool { return l.r.IntN(n) == 0 }
	for id := uint32(1); id <= vectors; id++ {
		old, had := l.vectors[id]
		if had && flip(3) || !had {
			g := &l.layout.Groups[l.group(id)]
			v := status.Vector{Reachable: !flip(5), Planes: make([]status.VectorPlane, len(g.Planes)), Slots: make([]status.Slot, 4)}
			for i := range v.Planes {
				v.Planes[i].InEffect = flip(2)
			}
			for i := range v.Slots {
				v.Slots[i] = status.Slot{Plane: l.r.IntN(len(g.Planes)), Drain: flip(5)}
				v.Slots[i].SubPort = l.r.IntN(len(g.Planes[v.Slots[i].Plane].SubPorts)+1) - 1
				if had && flip(2) { // most changes keep the places
					v.Slots[i].Plane, v.Slots[i].SubPort = old.Slots[i].Plane, old.Slots[i].SubPort
				}
				if !flip(4) {
					v.Slots[i].Share = l.r.Uint32N(1e9)
				}
			}
			l.vectors[id] = v
			l.builder.MarkVector(id)
		}
	}
	for range l.r.IntN(10) {
		group := l.r.IntN(2)
		key := destination(l.r.IntN(n), group)
		if flip(3) {
			delete(l.destinations, key)
		} else {
			d := status.Destination{InEffect: flip(2)}
			if !flip(9) {
				d.Vector = 1 + uint32(group) + 2*l.r.Uint32N(vectors/2)
			}
			if flip(4) {
				d.Drain = []uint16{uint16(l.r.IntN(4))}
			}
			l.destinations[key] = d
		}
		l.builder.MarkDestination(key)
	}
	if flip(10) { // a vector goes, with its users
		id := 1 + l.r.Uint32N(vectors)
		delete(l.vectors, id)
		l.builder.MarkVector(id)
		for key, d := range l.destinations {
			if d.Vector == id {
				d.Vector = 0
				l.destinations[key] = d
				l.builder.MarkDestination(key)
			}
		}
	}
	if flip(20) { // the hash changes
		l.first++
		l.layout.AskedPorts = flip(2)
		l.setPorts()
		l.builder.SetLayout(l.layout)
	}
	if l.layout.AskedPorts && flip(5) { // the data plane has another answer
		l.answer.Add(1)
		for key := range l.destinations {
			l.builder.MarkDestination(key)
		}
	}
	if flip(25) { // the data plane begins or ceases to steer by source port
		l.layout.SamePorts = !l.layout.SamePorts
		l.builder.SetLayout(l.layout)
	}
	if flip(25) { // a loopback comes or goes
		groups := slices.Clone(l.layout.Groups)
		groups[1].Sources = groups[1].Sources[:1:1]
		if flip(2) {
			groups[1].Sources = append(groups[1].Sources, netip.MustParsePrefix("10.255.0.6/32"))
		}
		l.layout.Groups = groups
		l.builder.SetLayout(l.layout)
	}
	l.builder.Commit()
}

// want describes every pair of the loop's state.
func (l *loop) want() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]bool{}
	for key, d := range l.destinations {
		g := &l.layout.Groups[key.Source]
		for _, src := range g.Sources {
			if src.Addr().Is4() != key.Addr().Is4() || src == key.Prefix {
				continue
			}
			var b strings.Builder
			fmt.Fprintf(&b, "%s %s", src.Addr(), key.Addr())
			v, ok := l.vectors[d.Vector]
			if !ok {
				out[b.String()+" 0 uniform"] = true
				continue
			}
			ports, placement := l.layout.Ports(status.FlowService{}, src.Addr(), key.Addr(), &v, nil)
			fmt.Fprintf(&b, " %d %s", d.Vector, placement)
			all := true
			for _, p := range v.Planes {
				all = all && p.InEffect
			}
			if v.Reachable {
				b.WriteString(" reachable")
			}
			if d.InEffect && all {
				b.WriteString(" in-effect")
			}
			for i, s := range v.Slots {
				device := "-"
				if s.SubPort >= 0 {
					device = g.Planes[s.Plane].SubPorts[s.SubPort]
				}
				fmt.Fprintf(&b, "; %s %s %d %d %t %t %t", g.Planes[s.Plane].Name, device, s.Share, ports[i], s.Share == 0,
					s.Drain || slices.Contains(d.Drain, uint16(i)), d.InEffect && v.Planes[s.Plane].InEffect)
			}
			out[b.String()] = true
		}
	}
	return out
}

// have describes every pair of a table in the same way.
func have(t testing.TB, table *slots.Table) map[string]bool {
	t.Helper()
	subPorts, err := table.SubPorts()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for p, err := range table.Pairs() {
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		fmt.Fprintf(&b, "%s %s %d %s", p.Source, p.Destination, p.Vector, p.Placement)
		if p.Reachable {
			b.WriteString(" reachable")
		}
		if p.InEffect {
			b.WriteString(" in-effect")
		}
		for _, s := range p.Slots {
			device := "-"
			if s.SubPort >= 0 {
				device = subPorts[s.SubPort].Device
			}
			fmt.Fprintf(&b, "; %s %s %d %d %t %t %t", table.Planes()[s.Plane], device, s.Share, s.SourcePort, s.Parked, s.Drain, s.InEffect)
		}
		out[b.String()] = true
	}
	return out
}

// start runs a publisher until the test ends or stop is called.
func start(t *testing.T, l *loop, path string) (stop func()) {
	t.Helper()
	_, stop = startAt(t, l, path, t.TempDir())
	return stop
}

// startAt is start with a root of sysfs. It also returns the publisher.
func startAt(t *testing.T, l *loop, path, sysfs string, change ...func(*Config)) (p *Publisher, stop func()) {
	t.Helper()
	c := Config{Reader: l.builder.Reader(l.do), Path: path, Log: slog.New(slog.DiscardHandler), Sysfs: sysfs}
	for _, change := range change {
		change(&c)
	}
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return p, stop
}

// opened opens the table at a path as soon as there is one.
func opened(t *testing.T, path string) *slots.Table {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		table, err := slots.Open(path)
		if err == nil {
			t.Cleanup(func() { table.Close() })
			return table
		}
		if !errors.Is(err, slots.ErrNoTable) || time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

// until waits until the table shows a revision.
func until(t *testing.T, table *slots.Table, revision uint64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for mark := table.Mark(); table.Status().StatusRevision < revision || !table.Status().Live; {
		var err error
		if mark, err = table.Wait(ctx, mark); err != nil {
			t.Fatalf("revision %d, want %d: %v", table.Status().StatusRevision, revision, err)
		}
	}
}

// TestFollows compares the table with the state of the loop after random changes, of which the publisher sees some
// merged. Meanwhile the file is truncated, removed, and written by another run.
func TestFollows(t *testing.T) {
	steps := gate.Count(t, gate.Models, 160, 1000)
	for seed := range uint64(2) {
		l := newLoop(seed)
		l.builder.Started()
		path := filepath.Join(t.TempDir(), "slots")
		stop := start(t, l, path)
		table := opened(t, path)
		for n := range steps {
			for range 1 + l.r.IntN(4) {
				l.change(40 + n)
			}
			switch n {
			case 100:
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
			case 150:
				stop()
				if s := table.Status(); s.Live || s.Pairs == 0 {
					t.Errorf("after the end of the publisher: %+v", s)
				}
				stop = start(t, l, path)
			}
			l.mu.Lock()
			revision := l.builder.Revision()
			l.mu.Unlock()
			until(t, table, revision)
			if want := l.layout.SamePorts; slices.Equal(table.Steered(), []slots.ServiceRange{{Protocol: 17, First: 4791, Last: 4791}, {Protocol: 6, First: 4800, Last: 5055}}) != want ||
				!want && len(table.Steered()) > 0 {
				t.Fatalf("seed %d, step %d: the services with the ports of the first one are %v, want those steered: %t", seed, n, table.Steered(), want)
			}
			if got, want := have(t, table), l.want(); !maps.Equal(got, want) {
				for line := range want {
					if !got[line] {
						t.Errorf("missing: %s", line)
					}
				}
				for line := range got {
					if !want[line] {
						t.Errorf("too many: %s", line)
					}
				}
				t.Fatalf("seed %d, step %d", seed, n)
			}
		}
		stop()
	}
}

// TestStart checks that nothing is published before the start is complete, so that the table of an earlier run stays as
// it is.
func TestStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slots")
	l := newLoop(1)
	l.builder.Started()
	stop := start(t, l, path)
	table := opened(t, path)
	for range 20 {
		l.change(40)
	}
	until(t, table, l.builder.Revision())
	before := have(t, table)
	stop()

	next := newLoop(2)
	stop = start(t, next, path)
	next.change(40)
	if s := table.Status(); s.Live || s.Instance != "run 1" || !maps.Equal(have(t, table), before) {
		t.Errorf("before the end of the start: %+v", s)
	}
	next.mu.Lock()
	next.builder.Started()
	next.builder.Commit()
	next.mu.Unlock()
	mark := table.Mark()
	for !table.Status().Live {
		var err error
		if mark, err = table.Wait(t.Context(), mark); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := have(t, table), next.want(); !maps.Equal(got, want) {
		t.Errorf("%d pairs, want %d", len(got), len(want))
	}
	stop()
}

// TestManyRemovals removes more destinations at once than the status records.
func TestManyRemovals(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slots")
	l := newLoop(1)
	l.builder.Started()
	for n := range 6000 {
		key := destination(n, 1)
		l.destinations[key] = status.Destination{}
		l.builder.MarkDestination(key)
	}
	l.builder.Commit()
	start(t, l, path)
	table := opened(t, path)
	until(t, table, l.builder.Revision())
	if n := table.Status().Pairs; n != 6000 {
		t.Fatalf("%d pairs, want 6000", n)
	}
	l.mu.Lock()
	for key := range l.destinations {
		if key != destination(7, 1) {
			delete(l.destinations, key)
			l.builder.MarkDestination(key)
		}
	}
	revision := l.builder.Commit()
	l.mu.Unlock()
	until(t, table, revision)
	if got := have(t, table); !maps.Equal(got, l.want()) {
		t.Errorf("%d pairs, want 1", len(got))
	}
}

// TestOccupied checks the error for a path that another process uses.
func TestOccupied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slots")
	start(t, newLoop(1), path)
	_, err := New(Config{Path: path})
	var used *slotfile.InUseError
	if !errors.As(err, &used) || !strings.Contains(err.Error(), "slots.file") {
		t.Errorf("a second publisher: %v", err)
	}
}

// TestRDMA checks the RDMA devices and GID indexes of the sub-ports: of a device with an address of a loopback, one
// without, and one of another namespace.
func TestRDMA(t *testing.T) {
	sysfs := t.TempDir()
	for file, text := range map[string]string{
		"mlx5_0/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0aff:0001", "mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2", "mlx5_0/ports/1/gid_attrs/ndevs/3": "a",
		"mlx5_0/ports/1/gids/2": "0000:0000:0000:0000:0000:ffff:0aff:0001", "mlx5_0/ports/1/gid_attrs/types/2": "IB/RoCE v1", "mlx5_0/ports/1/gid_attrs/ndevs/2": "a",
		"mlx5_1/ports/1/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001", "mlx5_1/ports/1/gid_attrs/types/0": "RoCE v2", "mlx5_1/ports/1/gid_attrs/ndevs/0": "b",
		"mlx5_2/ports/1/gids/0": "0000:0000:0000:0000:0000:ffff:0aff:0005", "mlx5_2/ports/1/gid_attrs/types/0": "RoCE v2", "mlx5_2/ports/1/gid_attrs/ndevs/0": "f",
	} {
		file = filepath.Join(sysfs, "class/infiniband", file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text+"\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "slots")
	l := newLoop(1)
	l.builder.Started()
	startAt(t, l, path, sysfs)
	table := opened(t, path)
	got, err := table.SubPorts()
	if err != nil {
		t.Fatal(err)
	}
	none := []int{-1, -1, -1, -1} // sources 10.255.0.1, 10.255.0.9, fd00::1, 10.255.0.5
	want := []slots.SubPort{
		{Device: "a", RDMADevice: "mlx5_0", RDMAPort: 1, GIDs: []int{3, -1, -1, -1}}, {Device: "b", RDMADevice: "mlx5_1", RDMAPort: 1, GIDs: none},
		{Device: "c", Plane: 1, GIDs: none}, {Device: "d", Plane: 1, GIDs: none}, {Device: "e", Plane: 2, GIDs: none}, {Device: "f", Plane: 2, GIDs: none},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("sub-ports\n%+v, want\n%+v", got, want)
	}
}

// TestWrong marks the slots of sub-ports by which packets go wrong, in a table that changes meanwhile.
func TestWrong(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slots")
	l := newLoop(1)
	l.builder.Started()
	p, _ := startAt(t, l, path, t.TempDir())
	table := opened(t, path)
	// marks returns the devices of marked slots, and whether another slot of theirs is not marked.
	marks := func() (marked map[string]bool, mixed bool) {
		marked = map[string]bool{}
		all, err := table.SubPorts()
		if err != nil {
			t.Fatal(err)
		}
		for round := range 2 {
			for pair := range table.Pairs() {
				for _, s := range pair.Slots {
					switch {
					case s.SubPort < 0:
						mixed = mixed || s.Wrong
					case s.Wrong && round == 0:
						marked[all[s.SubPort].Device] = true
					case round == 1 && marked[all[s.SubPort].Device] != s.Wrong:
						mixed = true
					}
				}
			}
		}
		return marked, mixed
	}
	for n, wrong := range [][]string{{"b"}, {"b", "d"}, {"d", "e"}, {}} {
		p.SetWrong(wrong)
		for range 20 {
			l.change(40)
		}
		mark := table.Mark()
		for {
			got, mixed := marks()
			if !mixed && slices.Equal(slices.Sorted(maps.Keys(got)), wrong) {
				break
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			var err error
			if mark, err = table.Wait(ctx, mark); err != nil {
				t.Fatalf("step %d: slots of %v are marked, mixed %t, want those of %v", n, got, mixed, wrong)
			}
			cancel()
		}
	}
}

// TestHealth checks that failed publications are counted, and the present failure is known, until the table is
// published again: the directory of the table is away for some time.
func TestHealth(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	path := filepath.Join(dir, "slots")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l := newLoop(1)
	l.builder.Started()
	p, _ := startAt(t, l, path, t.TempDir())
	opened(t, path)
	if got := p.Health(); got != (status.SlotTable{}) {
		t.Errorf("a published table: %+v", got)
	}
	await := func(what string, ok func(status.SlotTable) bool) status.SlotTable {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			if got := p.Health(); ok(got) {
				return got
			} else if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, got)
			}
		}
	}
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	failed := await("without the directory", func(s status.SlotTable) bool { return s.Failures >= 2 && strings.Contains(s.Failure, "no such file") })
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	if got := await("with the directory", func(s status.SlotTable) bool { return s.Failure == "" }); got.Failures < failed.Failures {
		t.Errorf("after a success %d failures, before %d", got.Failures, failed.Failures)
	}
	if table := opened(t, path); !table.Status().Live {
		t.Error("the table is not live")
	}
}

// TestFormer publishes where an earlier version has left its table at the former path: a reader of that table continues
// with the new one, after another start too, whether it waits or only looks up.
func TestFormer(t *testing.T) {
	dir := t.TempDir()
	former, path := filepath.Join(dir, "slots"), filepath.Join(dir, "table", "slots")
	l := newLoop(1)
	l.builder.Started()
	_, stop := startAt(t, l, former, t.TempDir())
	before, looks := opened(t, former), opened(t, former)
	stop()
	if err := os.WriteFile(former+".new", nil, 0o600); err != nil { // of a killed process
		t.Fatal(err)
	}
	link := func(c *Config) { c.Former = former }
	for range 2 {
		_, stop = startAt(t, l, path, t.TempDir(), link)
		table := opened(t, path)
		mark := before.Mark()
		for ctx := t.Context(); before.Status().Run != table.Status().Run; {
			var err error
			if mark, err = before.Wait(ctx, mark); err != nil {
				t.Fatal(err)
			}
		}
		if target, err := os.Readlink(former); err != nil || target != "table/slots" {
			t.Errorf("the former path leads to %q, %v; want a relative link", target, err)
		}
		stop() // the call that published has ended, and has marked the table before
		if looks.Lookup(netip.IPv6Loopback(), netip.IPv6Loopback(), nil); looks.Status().Run != opened(t, path).Status().Run {
			t.Error("a program that only looks up stays on the former table")
		}
	}
}
