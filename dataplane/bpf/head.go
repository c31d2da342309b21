package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Other programs may be attached to the egress of the anchor too. The kernel runs them in order until one does not
// return TCX_NEXT, so the steering program has to be the first: a program in front of it that returns TCX_PASS ends the
// chain, and the anchor drops the packet. Programs behind it get no packet, as do those of a qdisc clsact, which the
// kernel runs after TCX.

// mostReturns is the number of returns to the head of the chain within returnsIn, above which another program is
// considered to fight for that place.
const (
	mostReturns = 5
	returnsIn   = time.Minute
)

// contest limits the returns of the program to the head of the chain.
type contest struct {
	ousted  string      // describes the program that keeps the place in front of the agent's; "" if there is none
	returns []time.Time // in the last returnsIn, at most mostReturns, in order
}

// enter records a return at a time, or returns false if there were mostReturns within returnsIn, and then forgets
// those.
func (c *contest) enter(now time.Time) bool {
	c.returns = slices.DeleteFunc(c.returns, func(at time.Time) bool { return now.Sub(at) > returnsIn })
	if len(c.returns) >= mostReturns {
		c.returns = nil
		return false
	}
	c.returns = append(c.returns, now)
	return true
}

// compareHead moves the program back to the head of the chain if another one is in front of it. If others take that
// place too often, compareHead sets ousted, until no program is in front.
func (s *Steering) compareHead(f *findings) error {
	c := &s.guard.head
	if !s.have.pinned.switched {
		return nil // an older program is attached; Settle replaces it
	}
	var first ebpf.ProgramID
	err := s.kernel.netns.Do(func() (err error) {
		first, err = s.have.pinned.front(s.cfg, s.have.routes.anchor)
		return err
	})
	if err != nil {
		return err
	}
	if first == 0 {
		c.ousted = ""
		return nil
	}
	if c.ousted != "" {
		return nil
	}
	name := programName(first)
	if !c.enter(time.Now()) {
		c.ousted = fmt.Sprintf("%s runs in front of the agent's program at the egress of %s, and has been attached there %d times within a minute: packets of slots may be dropped until it is gone; "+
			"end its process, or exclude %s from its devices", name, s.cfg.Device, mostReturns+1, s.cfg.Device)
		s.cfg.Log.Error("steering: another program keeps the place of the agent's", "what", c.ousted)
		return nil
	}
	f.differs("%s was attached in front of the agent's program at the egress of %s", name, s.cfg.Device)
	s.done.Go(func() { // reading /proc takes long on a large machine
		s.cfg.Log.Warn("steering: another program was attached in front of the agent's", "device", s.cfg.Device, "program", name, "process", holder(first, s.quit))
	})
	return s.kernel.netns.Do(func() error { return s.have.pinned.lead(s.cfg, s.have.routes.anchor) })
}

// front returns the first program at the egress of the anchor, or 0 if it is the agent's. The caller is in the network
// namespace of the anchor.
func (p *pinned) front(cfg Config, anchor int) (ebpf.ProgramID, error) {
	all, err := link.QueryPrograms(link.QueryOptions{Target: anchor, Attach: ebpf.AttachTCXEgress})
	if errors.Is(err, unix.ENOSPC) {
		return 0, nil // programs were attached meanwhile; the next look sees them
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: the programs at %s: %w", cfg.Device, err)
	}
	if !slices.ContainsFunc(all.Programs, func(a link.AttachedProgram) bool { return a.ID == p.id }) || all.Programs[0].ID == p.id {
		return 0, nil // compareProgram restores a missing program
	}
	return all.Programs[0].ID, nil
}

// lead attaches a second instance of the program, with the same maps, at the head of the chain, and then detaches the
// first one: the kernel cannot move a program. A packet finds at least one instance at any time, and an end of the
// process between two steps leaves one attached and pinned. The caller is in the network namespace of the anchor.
func (p *pinned) lead(cfg Config, anchor int) (err error) {
	spec, err := steeringSpec(cfg)
	if err != nil {
		return err
	}
	var next struct {
		FaredSteer *ebpf.Program `ebpf:"fared_steer"`
	}
	if err := spec.LoadAndAssign(&next, &ebpf.CollectionOptions{MapReplacements: p.maps()}); err != nil {
		return fmt.Errorf("bpf: load the steering program: %w", err)
	}
	linkPath, programPath := filepath.Join(cfg.PinDir, linkPin), filepath.Join(p.dir, programPin)
	var first link.Link
	defer func() {
		if err == nil {
			return
		}
		err = errors.Join(err, next.FaredSteer.Unpin(), next.FaredSteer.Close())
		if first != nil {
			err = errors.Join(err, first.Unpin(), first.Close())
		}
	}()
	info, err := next.FaredSteer.Info()
	if err != nil {
		return fmt.Errorf("bpf: the steering program: %w", err)
	}
	if err := next.FaredSteer.Pin(programPath + nextPin); err != nil {
		return fmt.Errorf("bpf: pin the steering program: %w", err)
	}
	if first, err = link.AttachTCX(link.TCXOptions{Interface: anchor, Program: next.FaredSteer, Attach: ebpf.AttachTCXEgress, Anchor: link.Head()}); err != nil {
		return fmt.Errorf("bpf: attach the steering program in front: %w", err)
	}
	if err := first.Pin(linkPath + nextPin); err != nil {
		return fmt.Errorf("bpf: pin the link: %w", err)
	}
	if err := os.Rename(linkPath+nextPin, linkPath); err != nil {
		return fmt.Errorf("bpf: pin the link: %w", err)
	}
	// From here on the second instance stays.
	old, oldLink := p.objects.FaredSteer, p.link
	p.objects.FaredSteer, p.link = next.FaredSteer, first
	p.id, _ = info.ID()
	failed := errors.Join(oldLink.Detach(), oldLink.Close(), old.Close(), os.Rename(programPath+nextPin, programPath))
	if failed != nil {
		cfg.Log.Error("steering: cannot remove the program that was attached before", "error", failed)
	}
	return nil
}

// programName returns the kernel's id of a program and, if the process may read it, the name.
func programName(id ebpf.ProgramID) string {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil { // it needs CAP_SYS_ADMIN, or the program is gone
		return fmt.Sprintf("BPF program %d", id)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil || info.Name == "" {
		return fmt.Sprintf("BPF program %d", id)
	}
	return fmt.Sprintf("BPF program %d (%s)", id, info.Name)
}

// holder returns the id and name of a process that has a descriptor of a program or of a link to it, or "unknown":
// another user's descriptors can be read with CAP_SYS_PTRACE only, and pins need no process. quit ends the search.
func holder(id ebpf.ProgramID, quit <-chan struct{}) string {
	descriptors, _ := filepath.Glob("/proc/[0-9]*/fd/*") // the pattern is valid
	for _, fd := range descriptors {
		select {
		case <-quit:
			return "unknown"
		default:
		}
		if target, err := os.Readlink(fd); err != nil || !strings.HasPrefix(target, "anon_inode:bpf") {
			continue
		}
		process := filepath.Dir(filepath.Dir(fd))
		info, err := os.ReadFile(filepath.Join(process, "fdinfo", filepath.Base(fd)))
		if err != nil || !slices.Contains(strings.Fields(string(info)), "prog_id:") {
			continue
		}
		if fields := strings.Fields(string(info)); fields[slices.Index(fields, "prog_id:")+1] == fmt.Sprint(id) {
			name, _ := os.ReadFile(filepath.Join(process, "comm")) // the process may have ended
			return fmt.Sprintf("%s (%s)", filepath.Base(process), strings.TrimSpace(string(name)))
		}
	}
	return "unknown"
}
