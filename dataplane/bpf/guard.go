package bpf

import (
	"cmp"
	"fmt"
	"log/slog"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// guard judges comparisons with the kernel: it reports and counts the changes of kernel objects by other programs.
// Between comparisons torn is "" if and only if the last report, if any, was that everything is intact. Steering's
// mutex guards it.
type guard struct {
	log     *slog.Logger
	report  func(*farev1.Integrity) // nil without a receiver
	torn    string                  // difference that is not repaired yet; "" if there is none
	repairs uint64                  // repaired objects
	audits  uint64                  // comparisons of everything
	// occupied is true if a commit was refused because of another program's route, since the last call of again.
	occupied bool
	again    func() // reports that a refused change may succeed; nil without a receiver
	head     contest
}

// unrepaired reports whether there is a difference that a comparison of everything may repair.
func (g *guard) unrepaired() bool { return g.torn != g.head.ousted }

// freed reports that routes of other programs in the table may have been removed.
func (g *guard) freed() {
	if g.occupied && g.again != nil {
		g.occupied = false
		g.again()
	}
}

// findings collects the differences of one comparison.
type findings struct {
	guard *guard
	n     uint64
	first string
}

// differs records a difference, before it is repaired. The first one is reported immediately.
func (f *findings) differs(format string, args ...any) {
	if f.n++; f.n > 1 {
		return
	}
	f.first = fmt.Sprintf(format, args...)
	f.guard.tear(f.first)
}

// tear reports that the kernel lacks an object.
func (g *guard) tear(difference string) {
	g.torn = difference
	if g.report != nil {
		g.report(&farev1.Integrity{Message: "steering: " + difference, Repairs: g.repairs})
	}
}

// check compares with the kernel, repairs, and reports both. compare records each difference before it repairs it; if
// it returns an error, the difference remains, and unrepaired is true.
func (g *guard) check(compare func(*findings) error) {
	was := g.torn
	f := findings{guard: g}
	err := compare(&f)
	switch {
	case err != nil:
		if g.torn != err.Error() {
			g.log.Error("steering: cannot repair objects that another program changed; retrying", "difference", f.first, "error", err)
		}
		g.tear(err.Error())
	case g.head.ousted != "":
		if f.n > 0 {
			g.count(&f, f.first)
		}
		if g.torn != g.head.ousted {
			g.tear(g.head.ousted)
		}
	case f.n > 0 || was != "":
		g.torn = ""
		first := cmp.Or(f.first, was)
		g.count(&f, first)
		if g.report != nil {
			g.report(&farev1.Integrity{Intact: true, Message: "steering: repaired: " + first, Repairs: g.repairs})
		}
	}
}

// count counts and logs repaired differences.
func (g *guard) count(f *findings, first string) {
	g.repairs += f.n
	g.log.Warn("steering: another program changed objects of the agent; they are repaired", "objects", f.n, "first", first)
}
