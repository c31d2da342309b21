package linux

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/internal/rtnl"
)

// TestUnreadIsReadAgain: whichever dump fails, the failure is reported, the kernel is read again, and the repair is reported.
func TestUnreadIsReadAgain(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	p := h.open()
	var received reports
	c := &client{t: t, server: newServer(p)}
	p.Guard(received.report) // in place of the server
	c.hello(h.forwarding)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := p.Settle(); err != nil {
		t.Fatal(err)
	}
	before := h.state()
	var names []string
	refusing(p, nil, func(what string) unix.Errno { names = append(names, what); return 0 }, p.audit)
	reads := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, "dump buckets") })
	if reads != 8 { // links, nexthops, and of both families routes, addresses and rules
		t.Fatalf("an audit reads %q", names)
	}
	for k := range reads {
		n := 0
		received.take()
		refusing(p, nil, func(string) unix.Errno {
			if n++; n == k+1 {
				return unix.EPERM
			}
			return 0
		}, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if read, due := p.readBack(), p.repair.Stop(); read || !p.unread || !due {
				t.Errorf("%s is refused: read is %v, unread is %v, another attempt is due is %v", names[k], read, p.unread, due)
			}
		})
		all := received.take()
		if len(all) != 1 || all[0].Intact || !strings.Contains(all[0].Message, names[k]) {
			t.Errorf("%s is refused: %v", names[k], all)
		}
		p.mu.Lock()
		if k < reads-1 {
			p.mend()
		} else { // the last one is left to the timer
			p.repair.Reset(0)
		}
		p.mu.Unlock()
		received.settled(t)
		p.mu.Lock()
		unread := p.unread
		p.mu.Unlock()
		if unread {
			t.Errorf("%s: read, and still unread", names[k])
		}
	}
	if lines := log.lines("cannot read the kernel's objects back"); len(lines) != reads {
		t.Errorf("logged %q, want %d lines", lines, reads)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}

	// Groups whose buckets cannot be read are replaced.
	rest(t, p)
	groups, differences := p.Stats().Groups, p.Stats().Differences
	refusing(p, nil, beginning(unix.EPERM, "dump buckets"), p.audit)
	if s := p.Stats(); s.Groups != groups+2 || s.Differences != differences+2 || len(log.lines("cannot read the buckets of a group")) != 2 {
		t.Errorf("no buckets: %+v; %q", s, log.lines("buckets"))
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	p.mu.Lock()
	p.auditGroup(&group{key: groupKey{1, v4}, exists: true, id: 1}) // one that is none of the Plane's by now
	p.groups[groupKey{9, v4}] = &group{key: groupKey{9, v4}, id: 1}
	p.auditGroup(p.groups[groupKey{9, v4}]) // one that is not there yet
	delete(p.groups, groupKey{9, v4})
	p.mu.Unlock()
	if s := p.Stats(); s.Differences != differences+2 {
		t.Errorf("groups that cannot differ: %+v", s)
	}

	// News that are lost.
	for _, c := range []struct {
		err                       error
		overruns, resyncs, logged int
	}{{os.ErrClosed, 0, 0, 0}, {rtnl.ErrOverrun, 1, 1, 0}, {errors.New("a broken socket"), 1, 1, 1}} {
		p.mu.Lock()
		stats, lines := p.stats, len(log.lines("cannot receive link events"))
		p.heard(nil, c.err)
		overruns, resyncs := int(p.stats.Overruns-stats.Overruns), int(p.stats.Resyncs-stats.Resyncs)
		p.mu.Unlock()
		if n := len(log.lines("cannot receive link events")) - lines; overruns != c.overruns || resyncs != c.resyncs || n != c.logged {
			t.Errorf("%v: %d overruns, %d resyncs, %d lines; want %+v", c.err, overruns, resyncs, n, c)
		}
	}
	lines := len(log.lines("cannot read the kernel's objects back"))
	refusing(p, nil, beginning(unix.EPERM, "dump"), func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.heard(nil, rtnl.ErrOverrun)
		if !p.unread {
			t.Error("nothing was read, and it counts as read")
		}
	})
	// The same while a refused change is tried again.
	refusing(p, beginning(unix.EPERM, "add route"), beginning(unix.EPERM, "dump"), func() {
		if refused := s.try(destination(target4(1), 1)); len(refused) != 1 {
			t.Errorf("refused: %v", refused)
		}
	})
	if n := len(log.lines("cannot read the kernel's objects back")) - lines; n < 1+tries-1 {
		t.Errorf("%d lines, want one each time", n)
	}
	p.audit()
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
}

// TestLostNewsOfObjects: lost events of objects make the Plane read the kernel back.
func TestLostNewsOfObjects(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	h.config.watchBuffer = 1
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	p.mu.Lock()
	p.disturbed()
	overruns := p.stats.Overruns
	h.batch(slices.Repeat([]string{"route add 10.99.0.1/32 via 10.1.0.2 proto 11", "route del 10.99.0.1/32"}, 200))
	concerned := p.disturbed()
	if !concerned || p.stats.Overruns != overruns+1 {
		t.Errorf("concerned is %v, %d overruns", concerned, p.stats.Overruns-overruns)
	}
	p.mu.Unlock()
}

// TestStraysThatCannotBeRead: reading back fails if the buckets of a group of an earlier run cannot be read.
func TestStraysThatCannotBeRead(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	crash(t, p)
	p = h.open()
	for errno, fails := range map[unix.Errno]bool{unix.EPERM: true, unix.ENOENT: false} {
		refusing(p, nil, beginning(errno, "dump buckets"), func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if err := p.reread(false); errors.Is(err, errno) != fails || (err != nil) != fails || p.unread != fails {
				t.Errorf("%v: %v, unread is %v", errno, err, p.unread)
			}
		})
	}
	p.mu.Lock()
	if err := p.reread(false); err != nil || len(p.strays) != 2 {
		t.Errorf("%v, %v", err, p.strays)
	}
	for id, stray := range p.strays {
		if n := len(stray.segments); n != 2 {
			t.Errorf("group %d has %d segments, want one for each sub-port", id, n)
		}
	}
	p.mu.Unlock()
	h.counted(p)
	// Ids in use are those of the kernel, whoever's. What was given up, and is there, is not what an earlier run left.
	b := h.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 5000, Protocol: DefaultProtocol, Family: unix.AF_INET, Blackhole: true, Device: 0}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 5001, Protocol: DefaultProtocol, Family: unix.AF_INET, Device: 1}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 5002, Protocol: 11, Family: unix.AF_INET, Device: 1}, rtnl.Create)
	p.mu.Lock()
	if err := errors.Join(h.conn.Do(b)...); err != nil {
		t.Error(err)
	}
	p.used[99], p.retired, p.hole[v4].ids = true, []uint32{4711, 5001}, nil
	if err := p.reread(false); err != nil {
		t.Error(err)
	}
	all, err := h.conn.Nexthops()
	if err != nil {
		t.Fatal(err)
	}
	used := map[uint32]bool{}
	for _, n := range all {
		used[n.ID] = true
	}
	if _, loose := p.loose[5001]; !maps.Equal(p.used, used) || !slices.Equal(p.retired, []uint32{5001}) || loose || !slices.Contains(p.hole[v4].ids, 5000) {
		t.Errorf("used %v, the kernel has %v; retired %v, loose %v, holes %v", p.used, used, p.retired, p.loose, p.hole[v4].ids)
	}
	p.mu.Unlock()
	h.IP("nexthop", "del", "id", "5002")
	// Settle returns the refusals of removals.
	refusing(p, beginning(unix.EPERM, "delete"), nil, func() {
		if err := p.Settle(); !errors.Is(err, unix.EPERM) {
			t.Errorf("Settle: %v", err)
		}
	})
	if err := p.Settle(); err != nil {
		t.Error(err)
	}
	if got := h.state(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	h.counted(p)
	// What cannot be removed is logged.
	log := h.captured()
	p.mu.Lock()
	p.log = h.config.Logger
	p.loose = map[uint32]rtnl.Nexthop{4711: {ID: 4711}}
	p.mu.Unlock()
	refusing(p, beginning(unix.EPERM, "delete"), nil, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.removeStrays()
	})
	if lines := log.lines("cannot remove the objects of an earlier run"); len(lines) != 1 {
		t.Errorf("logged %q", lines)
	}
}

// TestAuditsInTime: an audit runs in every interval.
func TestAuditsInTime(t *testing.T) {
	h := newHost(t, 1)
	h.config.AuditInterval = 5 * time.Millisecond
	p := h.open()
	netnstest.Eventually(t, time.Minute, func() error {
		if n := p.Stats().Audits; n < 3 {
			return fmt.Errorf("%d audits", n)
		}
		return nil
	})
}

// TestFlushCounts: Flush counts the removed objects, and returns an error if it cannot begin.
func TestFlushCounts(t *testing.T) {
	h := gpus(t)
	h.captured()
	h.config.Logger = slog.New(slog.DiscardHandler)
	p, c := h.start()
	h.someSources(program(t, c.server))
	if got := p.Stats().Rules; got != 6 {
		t.Errorf("%d rules were sent, want one for each loopback", got)
	}
	want := Removed{Routes: p.Stats().RouteObjects, Groups: p.Stats().GroupObjects, Nexthops: p.Stats().NexthopObjects, Rules: 6}
	h.counted(p)
	crash(t, p)
	flush := func(config Config) (removed Removed, err error) {
		err = h.Do(func() (err error) {
			removed, err = Flush(config)
			return err
		})
		return removed, err
	}
	if _, err := flush(Config{Protocol: 2}); err == nil || !strings.Contains(err.Error(), "protocol 2") {
		t.Errorf("the mark of the kernel: %v", err)
	}
	before := descriptors(t)
	var err error
	_ = h.Do(func() error {
		release := exhaustDescriptors(t)
		defer release()
		_, err = Flush(h.config)
		return nil
	})
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: %v", err)
	}
	if removed, err := flush(h.config); err != nil || removed != want {
		t.Errorf("%+v, %v; want %+v", removed, err, want)
	}
	if removed, err := flush(h.config); err != nil || removed != (Removed{}) {
		t.Errorf("again: %+v, %v", removed, err)
	}
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors, before %d", n, before)
	}
}
