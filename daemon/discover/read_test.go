package discover

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestDumpsAreRepeated checks that a list which changes meanwhile is read again, at most dumpTries times, and that
// other errors end at once.
func TestDumpsAreRepeated(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		name   string
		errs   []error // of the attempts; afterwards the last one
		err    error
		tries  int
		result []int
	}{
		{"at once", []error{nil}, nil, 1, []int{1}},
		{"third time", []error{netlink.ErrDumpInterrupted, netlink.ErrDumpInterrupted, nil}, nil, 3, []int{3}},
		{"never", []error{netlink.ErrDumpInterrupted}, netlink.ErrDumpInterrupted, dumpTries, nil},
		{"another error", []error{netlink.ErrDumpInterrupted, broken}, broken, 2, nil},
	} {
		tries := 0
		got, err := repeat(func() ([]int, error) {
			err := c.errs[min(tries, len(c.errs)-1)]
			tries++
			return []int{tries}, err
		})
		if !errors.Is(err, c.err) || tries != c.tries || err == nil && !slices.Equal(got, c.result) {
			t.Errorf("%s: %v, %v after %d attempts, want %v, %v after %d", c.name, got, err, tries, c.result, c.err, c.tries)
		}
	}
}
