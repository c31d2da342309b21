package linux

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/internal/rtnl"
)

// captured returns the log of the host's Planes, and disables audits by time.
func (h *host) captured() *logged {
	var log logged
	h.config.Logger, h.config.AuditInterval = slog.New(slog.NewTextHandler(&log, nil)), time.Hour
	return &log
}

// refusing runs do while the functions decide which messages and dumps of a Plane the kernel refuses.
func refusing(p *Plane, messages, dumps func(what string) unix.Errno, do func()) {
	set := func(messages, dumps func(what string) unix.Errno) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.conn.Refuse(messages)
		p.conn.RefuseDumps(dumps)
	}
	set(messages, dumps)
	defer set(nil, nil)
	do()
}

// beginning returns a function for refusing: requests whose description has the prefix are refused with the code.
func beginning(errno unix.Errno, begins string) func(string) unix.Errno {
	return func(what string) unix.Errno {
		if strings.HasPrefix(what, begins) {
			return errno
		}
		return 0
	}
}

// descriptors counts the open files of the process.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestOpenFails: an Open that fails returns the cause and leaves no descriptor open, whichever step fails. Close leaves none open either, and
// returns the same error each time.
func TestOpenFails(t *testing.T) {
	h := newHost(t, 1)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the garbage collector would close files
	before := descriptors(t)
	unchanged := func(what string) {
		t.Helper()
		if n := descriptors(t); n != before {
			t.Errorf("%s: %d descriptors, before %d", what, n, before)
		}
	}
	failed := 0
	for free := 0; ; free++ {
		var p *Plane
		err := h.Do(func() (err error) {
			release := leaveDescriptors(t, free)
			defer release()
			p, err = Open(h.config)
			return err
		})
		if err == nil {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			unchanged("after Close")
			break
		}
		failed++
		if !errors.Is(err, unix.EMFILE) || p != nil || free == 32 {
			t.Fatalf("%d descriptors: %v, %v", free, p, err)
		}
		unchanged(fmt.Sprintf("%d descriptors", free))
	}
	if failed < 5 {
		t.Errorf("Open succeeded with %d descriptors", failed)
	}
	h.IP("link", "set", "lo", "down")
	if err := h.Do(func() error {
		_, err := Open(h.config)
		return err
	}); !errors.Is(err, unix.ENETDOWN) || !strings.Contains(err.Error(), "ip link set lo up") {
		t.Errorf("with the loopback down: %v", err)
	}
	unchanged("with the loopback down")
	h.IP("link", "set", "lo", "up")
	// A setting that cannot be made.
	if _, err := h.Output("sysctl", "-qw", "net.ipv4.nexthop_compat_mode=1"); err != nil {
		t.Fatal(err)
	}
	n := namespace{}
	if err := h.Do(func() (err error) {
		n, err = openNamespace()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var openErr error
	if err := n.do(func() error {
		err := readOnly()
		if err == nil {
			_, openErr = Open(h.config)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if openErr == nil || !strings.Contains(openErr.Error(), "net.ipv4.nexthop_compat_mode to 0") {
		t.Errorf("below a read-only /proc/sys: %v", openErr)
	}
	unchanged("below a read-only /proc/sys")
	p := h.open()
	if err := p.space.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Close of what is closed: %v", err)
		}
	}
	unchanged("after Close of what is closed")
}

// TestNamespaceDo: the function runs inside the namespace, and no thread of the process stays there.
func TestNamespaceDo(t *testing.T) {
	netnstest.Require(t)
	home, err := openNamespace()
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	var away namespace
	if err := netnstest.New(t).Do(func() (err error) {
		away, err = openNamespace()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer away.Close()
	if home.id == away.id {
		t.Fatal("one namespace")
	}
	mine := errors.New("the function's own")
	for range 50 {
		for _, n := range []namespace{away, home} {
			var at fileID
			if err := n.do(func() (err error) {
				runtime.Gosched()
				if at, err = identify(threadNamespace); err != nil {
					return err
				}
				return mine
			}); err != mine || at != n.id {
				t.Fatalf("in %v: at %v, %v", n.id, at, err)
			}
			for range 4 {
				ids := make(chan fileID)
				go func() {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
					id, _ := identify(threadNamespace)
					ids <- id
				}()
				if id := <-ids; id != home.id {
					t.Fatalf("a thread of the process is in %v, want %v", id, home.id)
				}
			}
		}
	}
	if _, err := identify("/no/such/file"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// settings runs f on a thread whose /proc/sys has these files alone, and returns their contents afterwards.
func settings(t *testing.T, files map[string]string, f func()) (after map[string]string) {
	t.Helper()
	netnstest.Require(t)
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount(dir, "/proc/sys", "", unix.MS_BIND, "")
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	after = map[string]string{}
	for name := range files {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		after[name] = string(text)
	}
	return after
}

// TestSettingsOfOtherKernels checks the settings made on kernels without IPv6, without a seed, and with hash fields of the administrator.
func TestSettingsOfOtherKernels(t *testing.T) {
	const fieldsV4, fieldsV6 = "net/ipv4/fib_multipath_hash_fields", "net/ipv6/fib_multipath_hash_fields"
	type files = map[string]string
	for _, c := range []struct {
		what    string
		before  files
		changed int
		names   string // that the error names; "": none
		after   files
	}{
		{"all wrong", files{compatMode: "1\n", hashPolicyV4: "0\n", hashPolicyV6: "2\n"}, 3, "", files{compatMode: "0", hashPolicyV4: "1", hashPolicyV6: "1"}},
		{"all right", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "1\n"}, 0, "", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "1\n"}},
		{"no IPv6", files{compatMode: "1\n", hashPolicyV4: "0\n"}, 2, "", files{compatMode: "0", hashPolicyV4: "1"}},
		{"no IPv4", files{compatMode: "1\n", hashPolicyV6: "0\n"}, 1, hashPolicyV4, files{compatMode: "0", hashPolicyV6: "0\n"}},
		{"no mode", files{hashPolicyV4: "0\n", hashPolicyV6: "0\n"}, 0, compatMode, files{hashPolicyV4: "0\n", hashPolicyV6: "0\n"}},
		{"no number", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "x\n"}, 0, hashPolicyV6, files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "x\n"}},
		{"fields", files{compatMode: "0\n", hashPolicyV4: "3\n", fieldsV4: "55\n", hashPolicyV6: "3\n", fieldsV6: "7\n"}, 1, "",
			files{compatMode: "0\n", hashPolicyV4: "3\n", fieldsV4: "55\n", hashPolicyV6: "1", fieldsV6: "7\n"}},
		{"fields that cannot be read", files{compatMode: "0\n", hashPolicyV4: "3\n", hashPolicyV6: "3\n", fieldsV6: "55\n"}, 1, "",
			files{compatMode: "0\n", hashPolicyV4: "1", hashPolicyV6: "3\n", fieldsV6: "55\n"}},
	} {
		var changed int
		var err error
		after := settings(t, c.before, func() { changed, err = setUp() })
		if changed != c.changed || (err == nil) != (c.names == "") || err != nil && !strings.Contains(err.Error(), c.names) || !maps.Equal(after, c.after) {
			t.Errorf("%s: %d changed, %v, now %q; want %d, %q, %q", c.what, changed, err, after, c.changed, c.names, c.after)
		}
	}
	for _, c := range []struct {
		what    string
		ipv6    bool
		before  files
		changed int
		fails   bool
		after   files
	}{
		{"both", true, files{forwardV4: "0\n", forwardV6: "0\n"}, 2, false, files{forwardV4: "1", forwardV6: "1"}},
		{"IPv4 alone", false, files{forwardV4: "0\n", forwardV6: "0\n"}, 1, false, files{forwardV4: "1", forwardV6: "0\n"}},
		{"one was set", true, files{forwardV4: "1\n", forwardV6: "0\n"}, 1, false, files{forwardV4: "1\n", forwardV6: "1"}},
		{"one is not there", true, files{forwardV4: "0\n"}, 1, true, files{forwardV4: "1"}},
	} {
		var changed int
		var err error
		after := settings(t, c.before, func() { changed, err = setUpTransit(c.ipv6) })
		if changed != c.changed || (err != nil) != c.fails || !maps.Equal(after, c.after) {
			t.Errorf("forward %s: %d changed, %v, now %q; want %d, %q", c.what, changed, err, after, c.changed, c.after)
		}
	}
	for _, c := range []struct {
		text  string // "": no such setting
		seed  uint32
		ok    bool
		fails bool
		after string
	}{{"0\n", 7, true, false, "7"}, {"42\n", 42, true, false, "42\n"}, {"x", 0, false, true, "x"}, {"", 0, false, false, ""}} {
		before := files{compatMode: "0"}
		if c.text != "" {
			before[hashSeed] = c.text
		}
		var seed uint32
		var ok bool
		var err error
		after := settings(t, before, func() { seed, ok, err = setUpSeed(7) })
		if seed != c.seed || ok != c.ok || (err != nil) != c.fails || after[hashSeed] != c.after {
			t.Errorf("the seed %q: %d, %v, %v, now %q", c.text, seed, ok, err, after[hashSeed])
		}
	}
	for _, c := range []struct {
		what   string
		before files
		says   string
	}{
		{"IPv6", files{hashPolicyV6: "1\n", loopbackOff: "0\n"}, ""}, {"no setting of the loopback", files{hashPolicyV6: "1\n"}, ""},
		{"no IPv6", files{loopbackOff: "0\n"}, "the kernel has no IPv6"}, {"IPv6 is off", files{hashPolicyV6: "1\n", loopbackOff: "1\n"}, "disable_ipv6 is 1"},
	} {
		var why string
		settings(t, c.before, func() { why = lacksIPv6() })
		if (why == "") != (c.says == "") || !strings.Contains(why, c.says) {
			t.Errorf("%s: %q, want %q", c.what, why, c.says)
		}
	}
}

// TestUnreadIsReadAgain: whichever dump fails, the failure is reported, the kernel is read again, and the repair is reported.
func TestUnreadIsReadAgain(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	p := h.open()
	var heard reports
	c := &client{t: t, server: newServer(p)}
	p.Guard(heard.report) // in place of the server
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
		heard.take()
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
		all := heard.take()
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
		heard.settled(t)
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

	// Buckets that cannot be read are dealt anew.
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
	// Settle says what it cannot remove.
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

// TestGoneAlready: the removal of an object that another program has removed succeeds.
func TestGoneAlready(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := p.news.Close(); err != nil { // nothing is heard any more
		t.Fatal(err)
	}
	h.IP("route", "del", target4(0))
	h.IP("-6", "route", "del", target6(0))
	s.do(deleteDestination(target4(0)), deleteDestination(target6(0)), deleteGroupOp(1))
	p.mu.Lock()
	failures := p.execute(&plan{Plane: p, lastOps: []op{{kind: deleteGroup, id: 4711}, {kind: deleteNexthop, id: 4712}}}, false)
	p.mu.Unlock()
	if len(failures) != 0 {
		t.Errorf("%v", failures)
	}
	if got := p.Stats(); got.Errors != 0 || got.Retries != 0 || got.RouteObjects != 0 || got.GroupObjects != 0 {
		t.Errorf("%+v", got)
	}
}

// TestMessagesAreCounted compares the counters of each kind with the messages that the kernel receives.
func TestMessagesAreCounted(t *testing.T) {
	h := newHost(t, 3)
	h.captured()
	h.config.RepairDelay = time.Hour
	p, c := h.start()
	s := program(t, c.server)
	type counts struct{ nexthops, groups, routes uint64 }
	var seen counts
	count := func(what string) unix.Errno {
		switch words := strings.Fields(what); {
		case words[1] == "route":
			seen.routes++
		case strings.Contains(what, "group") || what == fmt.Sprint("delete nexthop ", p.groups[groupKey{1, v4}].idOf()):
			seen.groups++
		default:
			seen.nexthops++
		}
		return 0
	}
	for _, step := range []struct {
		what string
		do   func()
		want counts
	}{
		{"a destination", func() { s.do(h.group(1, 1, 1, 1), destination(target4(0), 1)) }, counts{4, 1, 1}},
		{"another", func() { s.do(destination(target4(1), 1)) }, counts{0, 0, 1}},
		{"a weight", func() { s.do(h.group(1, 1, 1)) }, counts{2, 1, 0}},
		{"none", func() { s.do(h.group(1)) }, counts{1, 1, 0}},
		{"one less", func() { s.do(deleteDestination(target4(1))) }, counts{0, 0, 1}},
		{"the last", func() { s.do(deleteDestination(target4(0))) }, counts{0, 1, 1}},
		{"a sub-port less", func() {
			fewer := proto.CloneOf(h.forwarding)
			fewer.Planes = fewer.Planes[:2]
			c.hello(fewer)
		}, counts{1, 0, 0}},
	} {
		before := p.Stats()
		seen = counts{}
		asks := step.what == "a sub-port less" // Hello asks the kernel how it hashes, by other messages
		if asks {
			step.do()
			seen = step.want
		} else {
			refusing(p, count, nil, step.do)
		}
		after := p.Stats()
		got := counts{after.Nexthops - before.Nexthops, after.Groups - before.Groups, after.Routes - before.Routes}
		if got != seen || got != step.want {
			t.Errorf("%s: counted %+v, the kernel got %+v, want %+v", step.what, got, seen, step.want)
		}
		h.counted(p)
	}
}

// idOf returns the kernel's id of a group, or 0 for nil.
func (g *group) idOf() uint32 {
	if g == nil {
		return 0
	}
	return g.id
}

// TestAttempts: a refused message is sent tries times, each time after the kernel was read back. A refused removal of an object that is gone
// is not a failure.
func TestAttempts(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	for refusals := range tries + 2 {
		before, n := p.Stats(), 0
		var refused []*farev1.Ack
		refusing(p, func(what string) unix.Errno {
			if strings.HasPrefix(what, "add route") && n < refusals {
				n++
				return unix.EINVAL
			}
			return 0
		}, nil, func() { refused = s.try(destination(target4(1), 1)) })
		fails := min(refusals, tries)
		after := p.Stats()
		if fails < tries != (len(refused) == 0) || n != fails || after.Errors-before.Errors != uint64(fails) ||
			fails < tries && (after.Retries-before.Retries != uint64(fails) || after.Resyncs-before.Resyncs != uint64(fails)) {
			t.Errorf("%d refusals: %d messages were refused, %v; %+v, before %+v", refusals, n, refused, after, before)
		}
		if len(refused) == 0 {
			s.do(deleteDestination(target4(1)))
		}
	}
	// Somebody removes what is to be removed, and the answer is another one.
	s.do(destination(target4(2), 1))
	n := 0
	refusing(p, func(what string) unix.Errno {
		if strings.HasPrefix(what, "delete route") {
			n++
			b := h.conn.Begin()
			b.DelRoute(rtnl.Route{Prefix: mustPrefix(target4(2)), Protocol: DefaultProtocol})
			if err := errors.Join(h.conn.Do(b)...); err != nil {
				t.Error(err)
			}
			return unix.EINVAL
		}
		return 0
	}, nil, func() {
		if refused := s.try(deleteDestination(target4(2))); len(refused) != 0 || n != 1 {
			t.Errorf("refused %v after %d messages", refused, n)
		}
	})
}

// TestNoWayBack: a change that is refused in the middle and cannot be undone at once is reported, and undone once the kernel allows it.
func TestNoWayBack(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	p := h.open()
	var heard reports
	c := &client{t: t, server: newServer(p)}
	p.Guard(heard.report) // in place of the server
	c.hello(h.forwarding)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), h.group(2, 1, 3), destination(target4(0), 1), destination(target4(1), 2), destination(target4(2), 2))
	before := h.state()
	p.mu.Lock()
	was := p.wanted[1]
	p.mu.Unlock()
	other := proto.CloneOf(was)
	other.Members[0].Weight = 7
	changes := []contract.Change{{Kind: contract.GroupChange, Group: 1, Before: was, After: other}, {Kind: contract.DestinationChange, Prefix: mustPrefix(target4(1))}}
	changes[1].From.Group, changes[1].To.Group = 2, 1
	heard.take()
	ended := false
	refusing(p, func(what string) unix.Errno {
		if ended = ended || strings.HasPrefix(what, "set route"); ended {
			return unix.EPERM
		}
		return 0
	}, nil, func() {
		if err := p.Commit(changes); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if all := heard.take(); len(all) == 0 || all[0].Intact || !strings.Contains(all[0].Message, "the kernel refused") {
		t.Errorf("reports %v; want one that is not intact", all)
	}
	if lines := log.lines("cannot restore the state before"); len(lines) != 1 {
		t.Errorf("logged %q", lines)
	}
	heard.settled(t)
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	// One that can be undone is nobody's concern.
	refusing(p, beginning(unix.EPERM, "set route"), nil, func() {
		if err := p.Commit(changes); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if all := heard.take(); len(all) != 0 || len(log.lines("cannot restore the state before")) != 1 {
		t.Errorf("reports %v; logged %q", all, log.lines("level="))
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
}

// TestRefusedMoveKeepsTheRoute checks that a group stays while the kernel refuses to move the last route away from it: the kernel deletes a group's
// routes with the group.
func TestRefusedMoveKeepsTheRoute(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), h.group(2, 1, 3), destination(target4(0), 1), destination(target4(1), 2))
	before := h.state()
	p.mu.Lock()
	group := p.routes[routeKey{mustPrefix(target4(1)), 254}].nexthop
	p.mu.Unlock()
	move := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(target4(1))}
	move.From.Group, move.To.Group = 2, 1
	var deleted []string
	refusing(p, func(what string) unix.Errno {
		if strings.HasPrefix(what, "delete nexthop") {
			deleted = append(deleted, what)
		}
		if strings.HasPrefix(what, "set route") {
			return unix.EPERM
		}
		return 0
	}, nil, func() {
		if err := p.Commit([]contract.Change{move}); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if group == 0 {
		t.Fatal("the route has no group")
	}
	if slices.Contains(deleted, fmt.Sprintf("delete nexthop %d", group)) {
		t.Errorf("group %d, which the route still used, was deleted: %q", group, deleted)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if err := p.Commit([]contract.Change{move}); err != nil {
		t.Error(err)
	}
	if text := h.state()["10.255.1.2"]; text != h.state()["10.255.1.1"] {
		t.Errorf("after the kernel allowed it: %s", text)
	}
}

// TestHelloWithoutRoom: a Hello that the kernel has no room for is refused, and the previous forwarding continues.
func TestHelloWithoutRoom(t *testing.T) {
	h := newHost(t, 3)
	log := h.captured()
	h.forwarding.Planes = h.forwarding.Planes[:2]
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := p.Settle(); err != nil {
		t.Fatal(err)
	}
	before := h.state()
	less := proto.CloneOf(h.forwarding)
	less.Planes = less.Planes[:1]
	for _, c := range []struct {
		back  bool // there is room for what was before
		lines int
	}{{true, 0}, {false, 1}} {
		lines := len(log.lines("cannot restore the forwarding before"))
		refusing(p, func(what string) unix.Errno {
			if (strings.HasPrefix(what, "set nexthop") || strings.HasPrefix(what, "add nexthop")) && (len(p.subPorts) == 1 || !c.back) {
				return unix.ENOMEM
			}
			return 0
		}, nil, func() {
			if err := p.SetForwarding(less); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%+v: %v", c, err)
			}
		})
		if n := len(log.lines("cannot restore the forwarding before")) - lines; n != c.lines {
			t.Errorf("%+v: logged %d lines", c, n)
		}
		if d := diff(h.state(), before); d != "" {
			t.Errorf("%+v: %s", c, d)
		}
		p.mu.Lock()
		if len(p.subPorts) != 2 || !proto.Equal(p.forwarding, h.forwarding) {
			t.Errorf("%+v: %d sub-ports, %v", c, len(p.subPorts), p.forwarding)
		}
		p.mu.Unlock()
	}
	p.audit()
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	// Settings that cannot be read refuse a node that forwards for others.
	leaf := proto.CloneOf(h.forwarding)
	leaf.Loopbacks, leaf.UdpPorts = nil, nil
	release := exhaustDescriptors(t)
	err := p.SetForwarding(leaf)
	release()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "forwards for others") {
		t.Errorf("without descriptors: %v", err)
	}
	// A loopback that the kernel refused once is tried again.
	h.sends("10.255.0.1", "fd00:255::1")
	p.mu.Lock()
	p.unfit[mustPrefix("10.255.0.1/32").Addr()] = true
	p.mu.Unlock()
	s.do(deleteDestination(target4(0)), destination(target4(0), 1))
	h.sends("", "fd00:255::1")
	c.hello(h.forwarding)
	h.sends("10.255.0.1", "fd00:255::1")
}

// TestHashAttempts: transient errors are retried hashAttempts times, and keep the previous hash.
func TestHashAttempts(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	p, _ := h.start()
	p.mu.Lock()
	hash, flow := p.hash, proto.CloneOf(p.capabilities.FlowHash)
	p.mu.Unlock()
	if _, err := h.Output("sysctl", "-qw", "net.ipv4.fib_multipath_hash_seed=42"); err != nil {
		t.Fatal(err)
	}
	for refusals := hashAttempts; refusals >= 0; refusals-- {
		n := 0
		var err error
		refusing(p, func(what string) unix.Errno {
			if strings.HasPrefix(what, "delete route") && strings.Contains(what, "192.0.0.8") && n < refusals {
				n++
				return unix.EBUSY
			}
			return 0
		}, nil, func() { err = p.SetForwarding(h.forwarding) })
		p.mu.Lock()
		now, nowFlow := p.hash, proto.CloneOf(p.capabilities.FlowHash)
		p.mu.Unlock()
		if refusals == hashAttempts {
			if status.Code(err) != codes.Unavailable || now != hash || !proto.Equal(nowFlow, flow) || n != hashAttempts || len(log.lines("cannot be determined now")) != 1 {
				t.Errorf("%d refusals: %v, %v, %v, %d messages, %q", refusals, err, now, nowFlow, n, log.lines("level="))
			}
		} else if err != nil || now.Seed != 42 || nowFlow.Seed != 42 || nowFlow.Algorithm != computed || n != refusals {
			t.Errorf("%d refusals: %v, %v, %v, %d messages", refusals, err, now, nowFlow, n)
		}
	}
	// An error of another kind is no matter of time.
	refusing(p, beginning(unix.EPERM, "delete route"), nil, func() {
		if err := p.SetForwarding(h.forwarding); err != nil {
			t.Error(err)
		}
	})
	if f := p.Capabilities().FlowHash; f.GetAlgorithm() != asked || len(log.lines("cannot be relied on")) != 1 {
		t.Errorf("%v; %q", f, log.lines("level="))
	}
	// One family with a policy of its own hashes otherwise.
	if _, err := h.Output("sysctl", "-qw", "net.ipv6.fib_multipath_hash_fields=0x37", "net.ipv6.fib_multipath_hash_policy=3"); err != nil {
		t.Fatal(err)
	}
	if err := p.SetForwarding(h.forwarding); err != nil || p.Capabilities().FlowHash.GetAlgorithm() != asked {
		t.Errorf("policy 3 of IPv6: %v, %v", err, p.Capabilities().FlowHash)
	}
}

// TestLargestWeight: the largest weight follows from the kernel's answer to one of more than 8 bits.
func TestLargestWeight(t *testing.T) {
	h := newHost(t, 1)
	h.captured()
	p := h.open()
	// The test asks by a message of its own.
	b := h.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 5, Family: unix.AF_INET, Blackhole: true}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 6, Members: []rtnl.Member{{ID: 5, Weight: 300}}}, rtnl.Create)
	b.DelNexthop(6)
	b.DelNexthop(5)
	kernel := 65535
	if errs := h.conn.Do(b); errs[1] != nil {
		kernel = 256
	}
	before := h.Objects()
	for _, c := range []struct {
		what   string
		refuse func(what string) unix.Errno
		want   int
		err    error
	}{
		{"both", nil, kernel, nil},
		{"no group", func(what string) unix.Errno {
			if strings.Contains(what, "group") {
				return unix.EINVAL
			}
			return 0
		}, 256, nil},
		{"nothing", beginning(unix.EPERM, "add nexthop"), 0, unix.EPERM},
	} {
		refusing(p, c.refuse, nil, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.maxWeight = 0
			if err := p.findMaxWeight(); !errors.Is(err, c.err) || p.maxWeight != c.want {
				t.Errorf("%s: %d, %v", c.what, p.maxWeight, err)
			}
		})
		if after := h.Objects(); after != before {
			t.Errorf("%s left\n%s", c.what, after)
		}
	}
}

// TestAskedWithoutCarriers: without a carrier, IPv4 probes use the loopback, and IPv6 cannot be probed. A programmed route to the destination of
// the hash check stays.
func TestAskedWithoutCarriers(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1), destination("192.0.0.8/32", 1))
	c.hello(h.forwarding)
	h.wants("192.0.0.8/32", map[string]int{"p0": 512, "p1": 512})
	for _, device := range []string{"p0", "p1"} {
		h.leaf.IP("link", "set", device, "down")
	}
	h.wants(target6(0), map[string]int{"blackhole": 1024})
	for source, want := range map[string]codes.Code{"10.255.0.1": codes.OK, "fd00:255::1": codes.Unavailable} {
		to := target4(0)
		if want != codes.OK {
			to = target6(0)
		}
		answer, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
			Source: source, Destination: mustPrefix(to).Addr().String(), DestinationPort: 4791,
		})
		if status.Code(err) != want || err != nil && !strings.Contains(err.Error(), "carrier") {
			t.Errorf("from %s: %v", source, err)
		}
		if err == nil && (!slices.Contains(answer.SubPortOfPort, 1) || !slices.Contains(answer.SubPortOfPort, 2)) {
			t.Errorf("from %s: no port lands on some sub-port", source)
		}
	}
}

// TestDroppingRouteRefused: a refused route that drops packets is retried before the destination is acknowledged.
func TestDroppingRouteRefused(t *testing.T) {
	h := gpus(t)
	h.captured()
	h.config.Logger = slog.New(slog.DiscardHandler)
	p, c := h.start()
	s := program(t, c.server)
	h.someSources(s)
	n := 0
	refusing(p, func(what string) unix.Errno {
		if strings.HasPrefix(what, "add route") && strings.Contains(what, strings.TrimSuffix(target4(5), "/32")) && n == 0 {
			n++
			return unix.EINVAL
		}
		return 0
	}, nil, func() { s.do(of(sourceA, destination(target4(5), 1))) })
	for _, source := range []string{sourceB, sourceC} {
		table := fmt.Sprint(p.sources[mustPrefix(source)].own)
		if text := h.IP("route", "show", "table", table, "to", target4(5)); n != 1 || text == "" {
			t.Errorf("%d refusals; table %s: %q", n, table, text)
		}
	}
	h.counted(p)
}

// TestNexthopsThatCannotGo: a refused removal of nexthops on a device without a carrier is logged, unless the kernel has removed them.
func TestNexthopsThatCannotGo(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	p, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	lines := func() int { return len(log.lines("packets go to a device without a carrier")) }
	p.mu.Lock()
	p.remove(map[uint32]*pool{4711: nil})
	p.mu.Unlock()
	if lines() != 0 {
		t.Errorf("logged %q", log.lines("level="))
	}
	refusing(p, beginning(unix.EPERM, "delete nexthop"), nil, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.remove(map[uint32]*pool{4711: nil})
	})
	if lines() != 1 {
		t.Errorf("logged %q", log.lines("level="))
	}
	// Packets that wait are given up once no group sends more of them.
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.groups[groupKey{1, v4}]
	p.dark[4711] = true
	g.moved = true
	if p.abandon(); !p.dark[4711] {
		t.Error("given up while a group may send more")
	}
	g.moved = false
	if p.abandon(); len(p.dark) != 0 || len(log.lines("connections may stall")) != 0 {
		t.Errorf("dark %v; logged %q", p.dark, log.lines("level="))
	}
}

// TestRulesRefused: a Hello whose rules the kernel refuses is refused.
func TestRulesRefused(t *testing.T) {
	h := gpus(t)
	h.config.Logger = slog.New(slog.DiscardHandler)
	p := h.open()
	refusing(p, beginning(unix.EPERM, "add rule"), nil, func() {
		if err := p.SetForwarding(h.forwarding); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "rules: ") {
			t.Errorf("%v", err)
		}
	})
	if err := p.SetForwarding(h.forwarding); err != nil || p.Stats().Differences != 0 {
		t.Errorf("%v, %+v", err, p.Stats())
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

// TestHeldDownIsAskedFor: an operation that holds a sub-port down makes polls of all carriers due at once.
func TestHeldDownIsAskedFor(t *testing.T) {
	h := newHost(t, 2)
	p, _ := h.start()
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		events, err := p.watch.Ask(p.carriers())
		if err != nil {
			t.Fatal(err)
		}
		if len(events) == 0 { // not due for some milliseconds
			break
		}
	}
	p.want(contract.Change{Kind: contract.SubPortChange, Device: "p0"}, map[groupKey]bool{}, map[routeKey]bool{})
	events, err := p.watch.Ask(p.carriers())
	if err != nil || len(events) != 2 || !events[0].Asked {
		t.Errorf("%v, %v; want the carriers of both sub-ports", events, err)
	}
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
		t.Errorf("somebody else's mark: %v", err)
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
