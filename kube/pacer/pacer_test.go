package pacer

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

var _ = gate.Package{NoGoroutine: true}

var epoch = time.Unix(1e9, 0)

// server is the dumb twin: it keeps what was written, and when.
type server struct {
	t       *testing.T
	p       *Pacer
	now     time.Time
	result  Result // of all writes; a failed one has its effect half the time
	objects map[string]string
	writes  []time.Time
	tries   int
}

func newServer(t *testing.T) *server {
	return &server{t: t, p: New(epoch), now: epoch, objects: map[string]string{}}
}

// run lets a time pass: the server is called whenever the pacer has a write, and takes no time.
func (s *server) run(d time.Duration) {
	end := s.now.Add(d)
	for {
		key, o, wake, ok := s.p.Next(s.now)
		switch {
		case ok:
			s.tries++
			if s.result == Written || s.result == Failed && s.tries%2 == 0 {
				s.objects[key] = o.Body
				s.writes = append(s.writes, s.now)
			}
			s.p.Done(s.now, s.result, 0)
		case wake.IsZero() || wake.After(end):
			s.now = end
			return
		case !wake.After(s.now):
			s.t.Fatalf("at %v there is nothing to write, and the wake is %v", s.now, wake)
		default:
			s.now = wake
		}
	}
}

// check checks that no period has more writes than a burst and one every twelve seconds.
func (s *server) check() {
	s.t.Helper()
	for i, from := range s.writes {
		for j := i; j < len(s.writes); j++ {
			if allowed := Burst + int(s.writes[j].Sub(from)/Refill); j-i+1 > allowed {
				s.t.Fatalf("%d writes in %v", j-i+1, s.writes[j].Sub(from))
			}
		}
	}
}

// TestFlap checks that a leaf that flaps at 1 Hz for an hour costs at most a write every twelve seconds after the
// burst, over all objects, that no object starves, and that the last state is written.
func TestFlap(t *testing.T) {
	s := newServer(t)
	keys := []string{"conditions", "labels", "state"}
	for i := range 3600 {
		for _, key := range keys {
			body := fmt.Sprint(i % 2)
			s.p.Want(s.now, key, Object{body + key, body})
		}
		if i == 0 {
			if s.run(0); len(s.objects) != 3 {
				t.Fatalf("at once are written: %v", s.objects)
			}
		}
		s.run(time.Second)
	}
	s.check()
	for _, key := range keys {
		s.p.Want(s.now, key, Object{"last", "last"})
	}
	if s.run(3 * Refill); s.objects["state"] != "last" || s.objects["labels"] != "last" || s.objects["conditions"] != "last" {
		t.Errorf("the last state is lost: %v", s.objects)
	}
	if n := len(s.writes); n > 3630/10 || n < 100 {
		t.Errorf("%d writes in an hour", n)
	}
}

// TestMinor checks that minor changes wait, merged, for ten seconds and for tokens that no urgent change needs, and
// that an object that is as written costs nothing.
func TestMinor(t *testing.T) {
	s := newServer(t)
	for i := range 300 {
		s.p.Want(s.now, "state", Object{fmt.Sprint(i), "up"})
		s.run(time.Second)
	}
	if n := len(s.writes); n < 29 || n > 31 {
		t.Errorf("%d writes of 300 minor changes", n)
	}
	s.run(time.Hour)
	if n := len(s.writes); s.objects["state"] != "299" || n > 31 {
		t.Errorf("%d writes, the last one is %v", n, s.objects)
	}
	s.p.Want(s.now, "state", Object{"300", "up"})
	s.p.Want(s.now, "state", Object{"299", "up"})
	before := len(s.writes)
	if s.run(time.Hour); len(s.writes) != before {
		t.Error("an object that is as written was written")
	}
	s.p.Refresh(s.now, "state")
	s.p.Want(s.now, "state", Object{"299", "up"}) // is no reason to forget that another program may have changed it
	if s.run(0); len(s.writes) != before+1 {
		t.Errorf("a refresh makes %d writes", len(s.writes)-before)
	}
	for i := range 2 { // tokens are short: only urgent ones
		for k := range Burst {
			s.p.Want(s.now, fmt.Sprint(k), Object{fmt.Sprint(i), fmt.Sprint(i)})
		}
	}
	s.run(0)
	s.p.Want(s.now, "state", Object{"301", "up"})
	if s.run(Refill); s.objects["state"] == "301" {
		t.Error("a minor change takes the token of an urgent one")
	}
	s.p.Want(s.now, "state", Object{"302", "down"})
	if s.run(Refill); s.objects["state"] != "302" {
		t.Error("an urgent change waits")
	}
}

// TestRandom compares with the dumb twin: after any changes, failures and waits, each object is what was wanted last,
// ten seconds after the end of an outage with tokens, and no period has too many writes.
func TestRandom(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 41))
		s := newServer(t)
		want := map[string]string{}
		for range 200 {
			switch r.IntN(8) {
			case 0:
				s.result = Result(r.IntN(3))
			case 1:
				s.p.Refresh(s.now)
			case 2, 3:
				s.run(time.Duration(r.Int64N(int64(40 * time.Second))))
			default:
				key := []string{"a", "b", "c", "d"}[r.IntN(4)]
				want[key] = fmt.Sprint(r.IntN(4))
				s.p.Want(s.now, key, Object{want[key], want[key][:1]})
			}
		}
		s.result = Refused
		before := s.tries
		if s.run(10 * time.Minute); s.tries-before > 4*(10*60/5+3) {
			t.Fatalf("seed %d: %d attempts in ten minutes of an outage", seed, s.tries-before)
		}
		s.result = Written
		s.run(10 * time.Second)
		for key, body := range want {
			if s.objects[key] != body {
				t.Fatalf("seed %d: %s is %q, want %q", seed, key, s.objects[key], body)
			}
		}
		s.check()
	}
}

// TestOneAtATime checks that a write is under way alone, and that a change meanwhile is written after it.
func TestOneAtATime(t *testing.T) {
	p := New(epoch)
	p.Want(epoch, "a", Object{"1", "1"})
	p.Want(epoch, "b", Object{"1", "1"})
	if key, o, _, ok := p.Next(epoch); !ok || key != "a" || o.Body != "1" {
		t.Fatal(key, o, ok)
	}
	p.Want(epoch, "a", Object{"2", "2"})
	if _, _, wake, ok := p.Next(epoch); ok || !wake.IsZero() {
		t.Error("a second write is under way")
	}
	p.Done(epoch.Add(time.Second), Written, 0)
	now := epoch.Add(time.Minute)
	for _, want := range []string{"b1", "a2"} {
		key, o, _, ok := p.Next(now)
		if !ok || key+o.Body != want {
			t.Errorf("%s%s is written, want %s", key, o.Body, want)
		}
		p.Done(now, Written, 0)
	}
}

// TestFailure checks that an object is written after a failed attempt, which the server may have carried out, although
// the wanted one is that of the last success.
func TestFailure(t *testing.T) {
	p := New(epoch)
	now := epoch
	for i, step := range []struct {
		body   string
		result Result
	}{{"1", Written}, {"2", Failed}, {"1", Written}} {
		p.Want(now, "a", Object{step.body, step.body})
		now = now.Add(time.Minute)
		if _, o, _, ok := p.Next(now); !ok || o.Body != step.body {
			t.Fatalf("step %d: %v, %+v", i, ok, o)
		}
		p.Done(now, step.result, 0)
	}
	if _, _, wake, ok := p.Next(now); ok || !wake.IsZero() {
		t.Error("an object is written twice")
	}
}

// TestWait checks that a server's Retry-After delays an attempt that the pacer would make earlier.
func TestWait(t *testing.T) {
	p := New(epoch)
	p.Want(epoch, "a", Object{"1", "1"})
	p.Next(epoch)
	p.Done(epoch, Refused, 7*time.Second)
	if _, _, wake, ok := p.Next(epoch); ok || wake != epoch.Add(7*time.Second) {
		t.Errorf("the next attempt is at %v", wake)
	}
}

// TestBehind checks since when objects are not written as wanted, over failures and a change during a write.
func TestBehind(t *testing.T) {
	begin := epoch
	at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
	p := New(begin)
	is := func(what string, objects, behind int, since time.Time) {
		t.Helper()
		if o, b, s := p.Behind(); o != objects || b != behind || !s.Equal(since) {
			t.Errorf("%s: %d objects, %d behind since %v, want %d, %d, %v", what, o, b, s, objects, behind, since)
		}
	}
	is("empty", 0, 0, time.Time{})
	p.Want(at(1), "a", Object{"1", "1"})
	p.Want(at(2), "b", Object{"1", "1"})
	is("wanted", 2, 2, at(1))
	p.Next(at(3))
	is("under way", 2, 2, at(1))
	p.Done(at(4), Failed, 0)
	is("failed", 2, 2, at(1))
	p.Next(at(5))
	p.Done(at(5), Written, 0)
	is("b is written", 2, 1, at(1))
	p.Next(at(6))
	p.Want(at(7), "a", Object{"2", "2"})
	p.Done(at(8), Written, 0)
	is("a is written, and changed meanwhile", 2, 1, at(8))
	p.Next(at(60))
	p.Done(at(60), Written, 0)
	is("all is written", 2, 0, time.Time{})
}

// TestEase checks that the second of two slow writes delays the next one, of whatever object.
func TestEase(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{2 * time.Second: 8 * time.Second, time.Hour: 16 * time.Second} {
		p := New(epoch)
		now := epoch
		for _, key := range []string{"a", "b", "c"} {
			p.Want(epoch, key, Object{"1", "1"})
		}
		for _, want := range []string{"a", "b"} {
			if key, _, _, ok := p.Next(now); !ok || key != want {
				t.Errorf("%v, %s, want %s", ok, key, want)
			}
			now = now.Add(took)
			p.Done(now, Written, 0)
		}
		if _, _, wake, ok := p.Next(now.Add(want - 1)); ok || !wake.Equal(now.Add(want)) {
			t.Errorf("%v, wakes %v after the write", ok, wake.Sub(now))
		}
		if key, _, _, ok := p.Next(now.Add(want)); !ok || key != "c" {
			t.Errorf("%v, %s", ok, key)
		}
	}
}
