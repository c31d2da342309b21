package bpf

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// observer is another program that is attached in front of all programs at the anchor, and ends the chain.
type observer struct {
	link link.Link
	id   ebpf.ProgramID
}

func (b *bed) observe() (o observer) {
	b.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "observer", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}, // TCX_PASS
	})
	if err != nil {
		b.Fatal(err)
	}
	defer program.Close() // the link has it
	info, err := program.Info()
	if err != nil {
		b.Fatal(err)
	}
	o.id, _ = info.ID()
	b.Server.Must(func() error {
		anchor, err := net.InterfaceByName(DefaultDevice)
		if err != nil {
			return err
		}
		o.link, err = link.AttachTCX(link.TCXOptions{Interface: anchor.Index, Program: program, Attach: ebpf.AttachTCXEgress, Anchor: link.Head()})
		return err
	})
	b.Cleanup(func() { o.link.Close() })
	return o
}

// chain returns the ids of the programs at the anchor, in the order in which the kernel runs them.
func (b *bed) chain() (ids []ebpf.ProgramID) {
	b.Helper()
	b.Server.Must(func() error {
		anchor, err := net.InterfaceByName(DefaultDevice)
		if err != nil {
			return err
		}
		all, err := link.QueryPrograms(link.QueryOptions{Target: anchor.Index, Attach: ebpf.AttachTCXEgress})
		for _, p := range all.Programs {
			ids = append(ids, p.ID)
		}
		return err
	})
	return ids
}

// slotsLeave checks that the packets of every slot leave by its sub-port.
func (b *bed) slotsLeave(ports []uint32) {
	b.Helper()
	var want []int
	for slot, port := range ports {
		p, s := place(slot)
		want = append(want, b.at(testbed.Device(p, s), port)+2)
		f := b.flow(port)
		if err := f.send(2); err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
	netnstest.Eventually(b, patience, func() error {
		for slot, port := range ports {
			p, s := place(slot)
			if got := b.at(testbed.Device(p, s), port); got != want[slot] {
				return fmt.Errorf("slot %d: %d packets at %s, want %d", slot, got, testbed.Device(p, s), want[slot])
			}
		}
		return nil
	})
}

// newFrontBed returns a bed with the steering of one pair, its reports, and the source ports of its slots.
// log has its messages.
func newFrontBed(t *testing.T) (b *bed, _ *reports, ports []uint32, log *logged) {
	t.Helper()
	b, log = newBed(t, families[0]), &logged{}
	b.cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(t.Output(), log), nil))
	b.cfg.AuditInterval = time.Hour
	b.Resolve()
	b.open()
	r := &reports{}
	b.s.Guard(r.take)
	b.greet(farev1.Mode_MODE_PER_FLOW)
	ports = sequence(8, 5, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	return b, r, ports, log
}

// logged is a log that a test can read.
type logged struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// count returns the number of lines with a text.
func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// TestProgramInFront checks that the steering returns to the head of the chain when another program is attached in
// front of it, without a second instance that stays, that its state is adopted by the next agent, and that the report
// names the other program. The kernel runs programs until one ends the chain, so no packet of a slot leaves behind the
// other program.
func TestProgramInFront(t *testing.T) {
	b, r, ports, _ := newFrontBed(t)
	b.slotsLeave(ports)
	o := b.observe()
	netnstest.Eventually(t, patience, func() error {
		if all := r.since(0); len(all) == 0 || !all[len(all)-1].Intact {
			return fmt.Errorf("reports %v", all)
		}
		return nil
	})
	b.slotsLeave(ports)
	if first := r.since(0)[0]; first.Intact || !strings.Contains(first.Message, fmt.Sprintf("BPF program %d (observer) was attached in front", o.id)) {
		t.Errorf("the first report: %v", first)
	}
	if ids := b.chain(); len(ids) != 2 || ids[0] == o.id {
		t.Errorf("programs %v, want the agent's and then %d", ids, o.id)
	}
	if pins, err := filepath.Glob(b.cfg.PinDir + "/*" + nextPin); err != nil || len(pins) != 0 {
		t.Errorf("pins %v, %v", pins, err)
	}
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	b.slotsLeave(ports) // by the pins
	b.open()
	if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Pairs != 1 {
		t.Errorf("stats of the next agent %+v, %v", stats, err)
	}
	b.slotsLeave(ports)
}

// TestProgramKeepsFront checks that the agent gives up when another program is attached in front again and again, names
// it until it is gone, and repairs other objects meanwhile, and logs these repairs.
func TestProgramKeepsFront(t *testing.T) {
	b, r, ports, log := newFrontBed(t)
	var all []observer
	for range mostReturns {
		all = append(all, b.observe())
		netnstest.Eventually(t, patience, func() error {
			b.s.Audit()
			if ids := b.chain(); ids[0] == all[len(all)-1].id {
				return fmt.Errorf("programs %v", ids)
			}
			return nil
		})
	}
	last := b.observe()
	b.s.Audit()
	b.s.Audit()
	report := func() *farev1.Integrity { all := r.since(0); return all[len(all)-1] }
	want := fmt.Sprintf("BPF program %d (observer) runs in front of the agent's program at the egress of fared0", last.id)
	if ids, now := b.chain(), report(); ids[0] != last.id || now.Intact || !strings.Contains(now.Message, want) {
		t.Errorf("programs %v, the last report %v, want %q", ids, now, want)
	}
	logs := log.count("they are repaired")
	b.ip("rule flush table 179")
	netnstest.Eventually(t, patience, func() error {
		if out := b.Server.IP("rule", "show", "table", "179"); !strings.Contains(out, "4791") {
			return fmt.Errorf("rules %q", out)
		}
		if now := report(); now.Intact || !strings.Contains(now.Message, want) {
			return fmt.Errorf("after the repair of a rule: %v", now)
		}
		if n := log.count("they are repaired"); n == logs {
			return fmt.Errorf("%d lines of repairs, and none of the rules", n)
		}
		return nil
	})
	for _, o := range append(all, last) {
		if err := o.link.Close(); err != nil {
			t.Fatal(err)
		}
	}
	netnstest.Eventually(t, patience, func() error {
		if now := report(); !now.Intact {
			return fmt.Errorf("without the others: %v", now)
		}
		return nil
	})
	b.slotsLeave(ports)
}

// TestEndWhileReturning checks that packets follow the slots, and the next agent adopts all state, when the agent has
// ended between two steps of the return to the head: with the second instance attached, and the pins of either.
func TestEndWhileReturning(t *testing.T) {
	for _, renamed := range []bool{false, true} {
		t.Run(fmt.Sprintf("renamed=%v", renamed), func(t *testing.T) {
			b := newBed(t, families[0])
			b.cfg.AuditInterval = time.Hour
			b.Resolve()
			b.open()
			b.greet(farev1.Mode_MODE_PER_FLOW)
			ports := sequence(8, 5, 10127)
			b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
			dir := b.s.have.pinned.dir
			first, err := b.s.have.pinned.objects.FaredSteer.Clone() // without the pin's path
			if err != nil {
				t.Fatal(err)
			}
			defer first.Close()
			b.observe()
			netnstest.Eventually(t, patience, func() error {
				if ids := b.chain(); ids[0] != b.pinnedID(filepath.Join(dir, programPin)) {
					return fmt.Errorf("programs %v", ids)
				}
				return nil
			})
			if err := b.s.Close(); err != nil {
				t.Fatal(err)
			}
			// The steps that the process would not have done.
			if err := os.Rename(filepath.Join(dir, programPin), filepath.Join(dir, programPin+nextPin)); err != nil {
				t.Fatal(err)
			}
			if err := first.Pin(filepath.Join(dir, programPin)); err != nil {
				t.Fatal(err)
			}
			if !renamed {
				b.unrename(filepath.Join(b.cfg.PinDir, linkPin), first)
			}
			b.slotsLeave(ports)
			b.open()
			if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Pairs != 1 {
				t.Errorf("stats of the next agent %+v, %v", stats, err)
			}
			b.slotsLeave(ports)
			if pins, err := filepath.Glob(b.cfg.PinDir + "/*" + nextPin); err != nil || len(pins) != 0 {
				t.Errorf("pins %v, %v", pins, err)
			}
		})
	}
}

// pinnedID returns the kernel's id of a pinned program.
func (b *bed) pinnedID(path string) ebpf.ProgramID {
	b.Helper()
	id, err := pinnedProgram(path)
	if err != nil {
		b.Fatal(err)
	}
	return id
}

// unrename gives the link at path the name of a second instance, and attaches the program behind all others with a link
// in its place.
func (b *bed) unrename(path string, program *ebpf.Program) {
	b.Helper()
	if err := os.Rename(path, path+nextPin); err != nil {
		b.Fatal(err)
	}
	b.Server.Must(func() error {
		anchor, err := net.InterfaceByName(DefaultDevice)
		if err != nil {
			return err
		}
		l, err := link.AttachTCX(link.TCXOptions{Interface: anchor.Index, Program: program, Attach: ebpf.AttachTCXEgress})
		if err != nil {
			return err
		}
		defer l.Close()
		return l.Pin(path)
	})
}
