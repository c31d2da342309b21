package peers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "fared-peers-")
	if err != nil {
		panic(err)
	}
	faredBinary = filepath.Join(dir, "fared")
	build := exec.Command("go", "build", "-trimpath", "-o", faredBinary, "github.com/fared/fared/cmd/fared")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("%v\n%s", err, out))
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// settings choose the parts of a contest.
type settings struct {
	full        bool
	rows        []string // by name, without or with the number of destinations; none means all
	contestants []contestant
	sizes       []int // numbers of destinations, ascending
	repetitions int   // rounds of every row; 0 means the row's own number
	idle        time.Duration
	out         string // directory of the report
}

// settingsOf reads the settings from the environment. Without FARED_PEERS the contest is a short one that shows only that each row works.
func settingsOf(env func(string) string) (s settings, err error) {
	list := func(name string) []string {
		return strings.FieldsFunc(env("FARED_PEERS_"+name), func(r rune) bool { return r == ',' || r == ' ' })
	}
	s = settings{full: env("FARED_PEERS") != "", sizes: []int{1, 64}, repetitions: 1, out: env("FARED_PEERS_OUT")}
	if s.full {
		s.sizes, s.repetitions, s.idle = []int{1, 1024, 10000}, 0, 300*time.Millisecond
	}
	s.rows = list("ROWS")
	s.contestants = contestants
	if names := list("CONTESTANTS"); len(names) > 0 {
		s.contestants = nil
		for _, name := range names {
			i := slices.IndexFunc(contestants, func(c contestant) bool { return c.name() == name })
			if i < 0 {
				return s, fmt.Errorf("no contestant %q", name)
			}
			s.contestants = append(s.contestants, contestants[i])
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
	s, err := settingsOf(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	// Between two events the garbage is collected explicitly.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	r := newReport(s)
	for _, n := range s.sizes {
		rows := slices.DeleteFunc(rowsAt(n, s), func(x row) bool { return !selected(x.name, s.rows) })
		if len(rows) == 0 {
			continue
		}
		t.Run(strings.ReplaceAll(count(n), " ", "-"), func(t *testing.T) { contest(t, s, r, rows, n) })
	}
	if err := r.finish(); err != nil {
		t.Fatal(err)
	}
	for _, f := range r.failures {
		t.Error(f)
	}
}

// contest measures rows with one number of destinations.
func contest(t *testing.T, s settings, r *report, rows []row, n int) {
	var beds []*bed
	for _, c := range s.contestants {
		b := newBed(t, c, n, 0)
		b.idle = s.idle
		beds = append(beds, b)
	}
	for _, b := range beds {
		if err := b.settle(quiet); err != nil {
			r.fail(b, "start", err)
		}
	}
	for _, x := range rows {
		r.begin(x)
		rounds := x.rounds
		if s.repetitions > 0 {
			rounds = min(s.repetitions, max(rounds, s.repetitions))
		}
		warm := 1
		if x.rounds == 1 {
			warm = 0
		}
		for round := -warm; round < rounds; round++ {
			for i := range beds {
				b := beds[(i+round+warm)%len(beds)]
				if b.out != nil {
					continue
				}
				idle(s.idle)
				got, err := x.measure(b)
				if err != nil && !(round < 0 && errors.Is(err, errLearned)) {
					r.fail(b, x.name, err)
				} else if round >= 0 {
					r.add(b.name, got)
				}
			}
			if x.mend == nil {
				continue
			}
			for _, b := range beds {
				if b.out == nil {
					if err := x.mend(b); err != nil {
						r.fail(b, x.name, err)
					}
				}
			}
			for _, b := range beds {
				if b.out == nil {
					if err := b.settle(quiet); err != nil {
						r.fail(b, x.name+", way back", err)
					}
				}
			}
		}
		r.end(x)
	}
}
