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

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestUnreadIsReadAgain: whichever dump fails, the failure is reported, the kernel is read again, and the repair is
// reported.
func TestUnreadIsReadAgain(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	d := h.open()
	var received reports
	c := &client{t: t, server: newServer(d)}
	d.Guard(received.report) // in place of the server
	c.hello(h.forwarding)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	before := h.state()
	var names []string
	refusing(d, nil, func(what string) unix.Errno { names = append(names, what); return 0 }, d.audit)
	reads := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, "dump buckets") })
	if reads != 8 { // links, nexthops, and of both families routes, addresses and rules
		t.Fatalf("an audit reads %q", names)
	}
	for k := range reads {
		n := 0
		received.take()
		refusing(d, nil, func(string) unix.Errno {
			if n++; n == k+1 {
				return unix.EPERM
			}
			return 0
		}, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if read, due := d.readBack(false), d.repair.Stop(); read || !d.integrity.unread || !due {
				t.Errorf("%s is refused: read is %v, unread is %v, another attempt is due is %v", names[k], read, d.integrity.unread, due)
			}
		})
		all := received.take()
		if len(all) != 1 || all[0].Intact || !strings.Contains(all[0].Message, names[k]) {
			t.Errorf("%s is refused: %v", names[k], all)
		}
		d.mu.Lock()
		if k < reads-1 {
			d.mend()
		} else { // the last one is left to the timer
			d.repair.Reset(0)
		}
		d.mu.Unlock()
		received.settled(t)
		d.mu.Lock()
		unread := d.integrity.unread
		d.mu.Unlock()
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
	rest(t, d)
	groups, differences := d.Stats().Groups, d.Stats().Differences
	refusing(d, nil, beginning(unix.EPERM, "dump buckets"), d.audit)
	if s := d.Stats(); s.Groups != groups+2 || s.Differences != differences+2 || len(log.lines("cannot read the buckets of a group")) != 2 {
		t.Errorf("no buckets: %+v; %q", s, log.lines("buckets"))
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	d.mu.Lock()
	d.reader.auditGroup(&group{key: groupKey{1, v4}, exists: true, id: 1}) // one that is none of the Driver's by now
	d.state.have.groups[groupKey{9, v4}] = &group{key: groupKey{9, v4}, id: 1}
	d.reader.auditGroup(d.state.have.groups[groupKey{9, v4}]) // one that is not there yet
	delete(d.state.have.groups, groupKey{9, v4})
	d.mu.Unlock()
	if s := d.Stats(); s.Differences != differences+2 {
		t.Errorf("groups that cannot differ: %+v", s)
	}

	// News that are lost.
	for _, c := range []struct {
		err                       error
		overruns, resyncs, logged int
	}{{os.ErrClosed, 0, 0, 0}, {rtnl.ErrOverrun, 1, 1, 0}, {errors.New("a broken socket"), 1, 1, 1}} {
		d.mu.Lock()
		stats, lines := d.state.stats, len(log.lines("cannot receive link events"))
		d.handleLinks(nil, c.err)
		overruns, resyncs := int(d.state.stats.Overruns-stats.Overruns), int(d.state.stats.Resyncs-stats.Resyncs)
		d.mu.Unlock()
		if n := len(log.lines("cannot receive link events")) - lines; overruns != c.overruns || resyncs != c.resyncs || n != c.logged {
			t.Errorf("%v: %d overruns, %d resyncs, %d lines; want %+v", c.err, overruns, resyncs, n, c)
		}
	}
	lines := len(log.lines("cannot read the kernel's objects back"))
	refusing(d, nil, beginning(unix.EPERM, "dump"), func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.handleLinks(nil, rtnl.ErrOverrun)
		if !d.integrity.unread {
			t.Error("nothing was read, and it counts as read")
		}
	})
	// The same while a refused change is tried again.
	refusing(d, beginning(unix.EPERM, "add route"), beginning(unix.EPERM, "dump"), func() {
		if refused := s.try(destination(target4(1), 1)); len(refused) != 1 {
			t.Errorf("refused: %v", refused)
		}
	})
	if n := len(log.lines("cannot read the kernel's objects back")) - lines; n < 1+tries-1 {
		t.Errorf("%d lines, want one each time", n)
	}
	d.audit()
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
}

// TestLostNewsOfObjects: lost events of objects make the Driver read the kernel back.
func TestLostNewsOfObjects(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	h.config.watchBuffer = 1
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	d.mu.Lock()
	d.others.disturbed()
	overruns := d.state.stats.Overruns
	batch(h.t, h.Namespace, slices.Repeat([]string{"route add 10.99.0.1/32 via 10.1.0.2 proto 11", "route del 10.99.0.1/32"}, 200))
	concerned, leads := d.others.disturbed()
	if !concerned || !leads || d.state.stats.Overruns != overruns+1 {
		t.Errorf("concerned is %v, %d overruns", concerned, d.state.stats.Overruns-overruns)
	}
	d.mu.Unlock()
}

// TestStraysThatCannotBeRead: reading back fails if the buckets of a group of an earlier run cannot be read.
func TestStraysThatCannotBeRead(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	crash(t, d)
	d = h.open()
	for errno, fails := range map[unix.Errno]bool{unix.EPERM: true, unix.ENOENT: false} {
		refusing(d, nil, beginning(errno, "dump buckets"), func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if err := d.reader.reread(false); errors.Is(err, errno) != fails || (err != nil) != fails || d.integrity.unread != fails {
				t.Errorf("%v: %v, unread is %v", errno, err, d.integrity.unread)
			}
		})
	}
	d.mu.Lock()
	if err := d.reader.reread(false); err != nil || len(d.state.have.strays) != 2 {
		t.Errorf("%v, %v", err, d.state.have.strays)
	}
	for id, stray := range d.state.have.strays {
		if n := len(stray.segments); n != 2 {
			t.Errorf("group %d has %d segments, want one for each sub-port", id, n)
		}
	}
	d.mu.Unlock()
	h.counted(d)
	// Ids in use are those of the kernel, whoever's. What was given up, and is there, is not what an earlier run left.
	b := h.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 5000, Protocol: DefaultProtocol, Family: unix.AF_INET, Blackhole: true, Device: 0}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 5001, Protocol: DefaultProtocol, Family: unix.AF_INET, Device: 1}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 5002, Protocol: 11, Family: unix.AF_INET, Device: 1}, rtnl.Create)
	d.mu.Lock()
	if err := errors.Join(h.conn.Do(b)...); err != nil {
		t.Error(err)
	}
	d.state.have.used[99], d.state.have.retired, d.state.have.hole[v4].ids = true, []uint32{4711, 5001}, nil
	if err := d.reader.reread(false); err != nil {
		t.Error(err)
	}
	all := h.objects()
	used := map[uint32]bool{}
	for _, n := range all {
		used[n.ID] = true
	}
	if _, loose := d.state.have.loose[5001]; !maps.Equal(d.state.have.used, used) || !slices.Equal(d.state.have.retired, []uint32{5001}) || loose || !slices.Contains(d.state.have.hole[v4].ids, 5000) {
		t.Errorf("used %v, the kernel has %v; retired %v, loose %v, holes %v", d.state.have.used, used, d.state.have.retired, d.state.have.loose, d.state.have.hole[v4].ids)
	}
	d.mu.Unlock()
	h.IP("nexthop", "del", "id", "5002")
	// Settle returns the refusals of removals.
	refusing(d, beginning(unix.EPERM, "delete"), nil, func() {
		if err := d.Settle(); !errors.Is(err, unix.EPERM) {
			t.Errorf("Settle: %v", err)
		}
	})
	if err := d.Settle(); err != nil {
		t.Error(err)
	}
	if got := h.state(); len(got) != 0 {
		t.Errorf("left: %v", got)
	}
	h.counted(d)
	// What cannot be removed is logged.
	log := h.captured()
	d.mu.Lock()
	d.state.log = h.config.Logger
	d.state.have.loose = map[uint32]rtnl.Nexthop{4711: {ID: 4711}}
	d.mu.Unlock()
	refusing(d, beginning(unix.EPERM, "delete"), nil, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.reader.removeStrays()
	})
	if lines := log.lines("cannot remove the objects of an earlier run"); len(lines) != 1 {
		t.Errorf("logged %q", lines)
	}
}

// TestAuditsInTime: an audit runs in every interval.
func TestAuditsInTime(t *testing.T) {
	h := newHost(t, 1)
	h.config.AuditInterval = 5 * time.Millisecond
	d := h.open()
	netnstest.Eventually(t, time.Minute, func() error {
		if n := d.Stats().Audits; n < 3 {
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
	d, c := h.start()
	h.someSources(program(t, c.server))
	if got := d.Stats().Rules; got != 6 {
		t.Errorf("%d rules were sent, want one for each loopback", got)
	}
	want := Removed{Routes: d.Stats().RouteObjects, Groups: d.Stats().GroupObjects, Nexthops: d.Stats().NexthopObjects, Rules: 6}
	h.counted(d)
	crash(t, d)
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
