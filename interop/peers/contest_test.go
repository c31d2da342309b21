package peers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// base has the files of all beds. Its path is short enough for sockets.
var base string

func TestMain(m *testing.M) {
	var err error
	if base, err = os.MkdirTemp("/tmp", "fared-"); err == nil {
		err = os.Chmod(base, 0o755) // FRR's processes run as another user
	}
	if err != nil {
		panic(err)
	}
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, unix.SIGTERM)
	go func() {
		<-interrupted
		sweep()
		os.Exit(1)
	}()
	if n := os.Getenv("FARED_PEERS_PLANES"); n != "" {
		if planes, err = strconv.Atoi(n); err != nil || planes < 3 || planes > mostPlanes {
			panic(fmt.Sprintf("FARED_PEERS_PLANES: %q is not a number from 3 to %d", n, mostPlanes))
		}
	}
	if n := os.Getenv("FARED_PEERS_SUB_PORTS"); n != "" {
		if subPorts, err = strconv.Atoi(n); err != nil || subPorts < 1 || subPorts > mostSubPorts {
			panic(fmt.Sprintf("FARED_PEERS_SUB_PORTS: %q is not a number from 1 to %d", n, mostSubPorts))
		}
	}
	code := m.Run()
	os.RemoveAll(base)
	os.Exit(code)
}

// sweep removes the namespaces of this process, with the processes in them and their files.
func sweep() {
	all, _ := filepath.Glob(fmt.Sprintf("/run/netns/fared-%d-*", os.Getpid()))
	for _, path := range all {
		name := filepath.Base(path)
		if out, err := exec.Command("ip", "netns", "pids", name).Output(); err == nil {
			for _, word := range strings.Fields(string(out)) {
				if pid, err := strconv.Atoi(word); err == nil {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
			}
		}
		_ = exec.Command("ip", "netns", "del", name).Run() // what remains is shown by ip netns
		os.RemoveAll("/sys/fs/bpf/" + name)
	}
	os.RemoveAll(base)
}

// settings choose the parts of a contest.
type settings struct {
	full        bool
	rows        []string // by name, without or with the number of destinations; none means all
	contestants []contestant
	sizes       []int // numbers of destinations, ascending
	repetitions int   // rounds of every row; 0 means the row's own number
	idle        time.Duration
	flap        time.Duration // duration of flaps
	rest        time.Duration // before memory is read, or idle processes are measured, after changes
	busy        int           // processes that use processor time all the time, next to which each row is measured once more; 0 means none
	out         string        // directory of the report
}

// settingsOf reads the settings from the environment. Without FARED_PEERS the contest is a short one that shows only
// that each row works.
func settingsOf(env func(string) string) (s settings, err error) {
	list := func(name string) []string {
		return strings.FieldsFunc(env("FARED_PEERS_"+name), func(r rune) bool { return r == ',' || r == ' ' })
	}
	s = settings{full: env("FARED_PEERS") != "", sizes: []int{1, 64}, repetitions: 1, flap: 500 * time.Millisecond, out: env("FARED_PEERS_OUT")}
	if s.full {
		s.sizes, s.repetitions, s.idle, s.flap, s.rest = []int{1, 1024, 10000}, 0, 300*time.Millisecond, 10*time.Second, 10*time.Second
	}
	s.rows = list("ROWS")
	s.contestants = contestants
	if names := list("CONTESTANTS"); len(names) > 0 {
		s.contestants = nil
		for _, name := range names {
			all := slices.Concat(contestants, newer)
			i := slices.IndexFunc(all, func(c contestant) bool { return c.name() == name })
			if i < 0 {
				return s, fmt.Errorf("no contestant %q", name)
			}
			s.contestants = append(s.contestants, all[i])
		}
	}
	if sizes := list("SIZES"); len(sizes) > 0 {
		s.sizes = nil
		for _, size := range sizes {
			n, err := strconv.Atoi(size)
			if err != nil || n < 1 || n > 1<<20 {
				return s, fmt.Errorf("%q is not a number of destinations", size)
			}
			s.sizes = append(s.sizes, n)
		}
		slices.Sort(s.sizes)
	}
	if n := env("FARED_PEERS_REPETITIONS"); n != "" {
		if s.repetitions, err = strconv.Atoi(n); err != nil || s.repetitions < 1 {
			return s, fmt.Errorf("%q is not a number of repetitions", n)
		}
	}
	if n := env("FARED_PEERS_BUSY"); n != "" {
		if s.busy, err = strconv.Atoi(n); err != nil || s.busy < 0 {
			return s, fmt.Errorf("%q is not a number of busy processes", n)
		}
	}
	if d := env("FARED_PEERS_FLAP"); d != "" {
		if s.flap, err = time.ParseDuration(d); err != nil || s.flap < period || s.flap > longestTraffic-10*time.Second {
			return s, fmt.Errorf("%q is not a duration of flaps from %v to %v", d, period, longestTraffic-10*time.Second)
		}
	}
	known := false
	for _, n := range s.sizes {
		for _, r := range rowsAt(n, s) {
			known = known || selected(r.name, s.rows)
		}
	}
	if !known {
		return s, fmt.Errorf("no row %q", s.rows)
	}
	return s, nil
}

// TestContest measures the chosen rows for the chosen contestants.
func TestContest(t *testing.T) {
	gate.Slow(t, gate.Chaos, "every row of every contestant")
	t.Parallel()
	s, err := settingsOf(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	if s.full { // between two events the garbage is collected explicitly
		defer debug.SetGCPercent(debug.SetGCPercent(-1))
	}
	r := newReport(s)
	load := busyProcesses(t, s.busy)
	for _, n := range s.sizes {
		rows := slices.DeleteFunc(rowsAt(n, s), func(x row) bool { return !selected(x.name, s.rows) })
		if len(rows) == 0 {
			continue
		}
		for _, v := range variants {
			some := slices.DeleteFunc(slices.Clone(rows), func(x row) bool { return x.bed != v })
			if len(some) > 0 {
				t.Run(fmt.Sprintf("%d/bfd=%v,damped=%v", n, v.bfd, v.damped), func(t *testing.T) { contest(t, s, r, load, some, n, v) })
			}
		}
	}
	if err := r.finish(); err != nil {
		t.Fatal(err)
	}
}

// busyProcesses starts processes that use processor time while they are not stopped, as they are at first. The function
// continues or stops them; nil without processes.
func busyProcesses(t *testing.T, n int) func(run bool) {
	var all []*netnstest.Process
	signal := func(s unix.Signal) {
		for _, p := range all {
			if err := p.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range n {
		p := netnstest.New(t).Start(t, "sh", "-c", "while :; do :; done")
		t.Cleanup(p.Kill) // a stopped process does not end by SIGTERM
		all = append(all, p)
	}
	signal(unix.SIGSTOP)
	if n == 0 {
		return nil
	}
	return func(run bool) {
		if run {
			signal(unix.SIGCONT)
		} else {
			signal(unix.SIGSTOP)
		}
	}
}

// contest measures rows with one number of destinations: idle, and where there are busy processes, next to them too, in
// turn.
func contest(t *testing.T, s settings, r *report, load func(run bool), rows []row, n int, v variant) {
	var beds []*bed
	for _, c := range s.contestants {
		b := newBed(t, c, n, v)
		b.idle = s.idle
		beds = append(beds, b)
	}
	for _, b := range beds {
		if err := b.settle(); err != nil {
			r.fail(b, "start", err)
		}
	}
	for _, x := range rows {
		r.begin(x)
		rounds := x.rounds
		if s.repetitions > 0 && rounds > 1 {
			rounds = s.repetitions
		}
		warm := 1
		if x.rounds == 1 {
			warm = 0
		}
		// The first event of a kind shows which flows move. In a full contest it also warms all others up.
		takesPart := func(b *bed, round int) bool {
			return b.out == nil && (round >= 0 || s.full || x.packets || !b.contestant.inKernel())
		}
		pass := func(round int, busy bool) {
			if busy {
				load(true)
				defer load(false)
			}
			for i := range beds {
				b := beds[(i+round+warm)%len(beds)]
				if !takesPart(b, round) {
					continue
				}
				idle(s.idle)
				got, err := x.measure(b)
				if err != nil && !(round < 0 && errors.Is(err, errLearned)) {
					r.fail(b, x.name, err)
				} else if round >= 0 {
					r.add(b.name, got, busy)
				}
			}
			if x.mend == nil {
				return
			}
			for _, b := range beds {
				if takesPart(b, round) {
					if err := x.mend(b); err != nil {
						r.fail(b, x.name, err)
					}
				}
			}
			for _, b := range beds {
				if b.out == nil {
					if err := b.settle(); err != nil {
						r.fail(b, x.name+", way back", err)
					}
				}
			}
		}
		for round := -warm; round < rounds; round++ {
			pass(round, false)
			if load != nil && round >= 0 {
				pass(round, true)
			}
		}
		r.end(x)
	}
}
