package report

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

// TestComplaint checks that errors that last, also in turn or from other ports, have one line each, and one more after
// a success.
func TestComplaint(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	var c complaint
	for _, err := range []error{errors.New("a"), errors.New("a"), errors.New("b"), errors.New("a"), errors.New("1:2->c"), errors.New("1:3->c"), nil, nil, errors.New("b")} {
		c.note(log, "silent", err, "worker", "w")
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, line[strings.Index(line, "worker="):])
	}
	if text := strings.Join(got, ""); text != "worker=w error=a\nworker=w error=b\nworker=w error=1:2->c\nworker=w error=b\n" {
		t.Errorf("logged\n%s", out.String())
	}
}
