package tcpqp

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Bits of flow.ready, as framing.bpf.c has them, and opcodes without and with data of a message: of a READ request, and
// of a WRITE.
const (
	heard, owed, acked = 1, 2, 4
	withoutData        = 0x0c
	withData           = 0x0a
)

// agreement is the framing program's state machine of rtr and rtr_ack, as tables.
type agreement struct {
	none, data [8]int     // by flow.ready: rtr and rtr_ack in a segment without and with data of a message; -1: it has no option
	next       [8][16]int // by flow.ready and the flags of a received option: flow.ready
}

// newAgreement runs the program, compiled for this machine, for every state and segment.
func newAgreement(t *testing.T) (a agreement) {
	t.Helper()
	netnstest.Require(t, "gcc")
	program := filepath.Join(t.TempDir(), "ready")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-Itestdata/host", "-o", program, "testdata/host/ready.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var in strings.Builder
	var to []*int
	ask := func(p *int, format string, args ...any) {
		fmt.Fprintf(&in, format+"\n", args...)
		to = append(to, p)
	}
	for ready := range 8 {
		ask(&a.none[ready], "write %x %x", ready, withoutData)
		ask(&a.data[ready], "write %x %x", ready, withData)
		for flags := range 16 {
			ask(&a.next[ready][flags], "parse %x %x", ready, optionVersion<<6|flags)
		}
	}
	cmd := exec.Command(program)
	cmd.Stdin = strings.NewReader(in.String())
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	if len(lines) != len(to) {
		t.Fatalf("%d answers to %d questions", len(lines), len(to))
	}
	for i, line := range lines {
		if *to[i] = -1; line != "none" {
			if _, err := fmt.Sscanf(line, "%x", to[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return a
}

// TestReadyTable checks the state machine of rtr and rtr_ack state by state.
func TestReadyTable(t *testing.T) {
	a := newAgreement(t)
	const stamped = optionVersion<<6 | flagTimestamp
	for ready, want := range [8]struct{ none, data int }{
		0:                    {stamped | flagRTR, -1},
		heard:                {stamped | flagRTR, stamped | flagRTR},
		owed:                 {stamped | flagRTR | flagRTRAck, -1}, // unreachable
		heard | owed:         {stamped | flagRTR | flagRTRAck, stamped | flagRTR | flagRTRAck},
		acked:                {stamped, -1},
		acked | heard:        {stamped, stamped},
		acked | owed:         {stamped | flagRTRAck, -1}, // unreachable
		acked | heard | owed: {stamped | flagRTRAck, stamped | flagRTRAck},
	} {
		if a.none[ready] != want.none || a.data[ready] != want.data {
			t.Errorf("state %d: flags %#x and %#x, want %#x and %#x", ready, a.none[ready], a.data[ready], want.none, want.data)
		}
		for flags, next := range a.next[ready] {
			want := ready &^ owed
			if flags&flagRTR != 0 {
				want |= heard | owed
			}
			if flags&flagRTRAck != 0 {
				want |= acked
			}
			if next != want {
				t.Errorf("state %d after the flags %#x: %d, want %d", ready, flags, next, want)
			}
		}
	}
}

// TestReadyAgrees walks every state that two ends can reach, if each segment is lost, late or repeated: an end gets an
// acknowledgement of its rtr only after the other one has received it, and wherever the two are, three exchanges
// complete the agreement, and end both flags.
func TestReadyAgrees(t *testing.T) {
	a := newAgreement(t)
	// state is flow.ready of both ends, and the set of the flags of all segments that each has sent, any of which may
	// arrive now.
	type state struct {
		ready [2]int
		sent  [2]uint16
	}
	seen := map[state]bool{{}: true}
	for queue := []state{{}}; len(queue) > 0; queue = queue[1:] {
		s := queue[0]
		reach := func(s state) {
			if !seen[s] {
				seen[s] = true
				queue = append(queue, s)
			}
		}
		for end := range 2 {
			for _, flags := range []int{a.none[s.ready[end]], a.data[s.ready[end]]} {
				if flags >= 0 {
					next := s
					next.sent[end] |= 1 << (flags & 15)
					reach(next)
				}
			}
			for flags := range 16 {
				if s.sent[1-end]&(1<<flags) != 0 {
					next := s
					next.ready[end] = a.next[s.ready[end]][flags]
					reach(next)
				}
			}
			if s.ready[end]&acked != 0 && s.ready[1-end]&heard == 0 {
				t.Fatalf("%+v: end %d has the acknowledgement of an rtr that has not arrived", s, end)
			}
		}
		ready := s.ready
		for range 3 {
			for end := range 2 {
				ready[1-end] = a.next[ready[1-end]][a.none[ready[end]]&15]
			}
		}
		if ready != [2]int{heard | acked, heard | acked} {
			t.Fatalf("%+v: after three exchanges the states are %v", s, ready)
		}
	}
	if len(seen) < 50 {
		t.Errorf("%d states", len(seen))
	}
	t.Logf("%d states", len(seen))
}
